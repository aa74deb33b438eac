"""Installs the audit hook in this process and in all children that are started after this import
(tests/support/audited)."""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("audited")))

import audit_hook

CHILD_REPORTS = Path(tempfile.mkdtemp(prefix="audited-")) / "heard"  # of children
reports: list[str] = []  # of this process

os.environ["AUDITED"] = str(CHILD_REPORTS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (sys.path[0], os.environ.get("PYTHONPATH", ""))))
audit_hook.install(reports.append)


def take_violations() -> list[str]:
    """The violations since the last call."""
    found = [*reports, *(CHILD_REPORTS.read_text().splitlines() if CHILD_REPORTS.exists() else ())]
    reports.clear()
    CHILD_REPORTS.unlink(missing_ok=True)
    return found
