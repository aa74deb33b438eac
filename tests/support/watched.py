"""This process and all that it starts, watched from the import of this module on (tests/audited)."""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("audited")))

import audit_hook

HEARD = Path(tempfile.mkdtemp(prefix="audited-")) / "heard"  # of children
heard: list[str] = []  # of this process

os.environ["AUDITED"] = str(HEARD)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (sys.path[0], os.environ.get("PYTHONPATH", ""))))
audit_hook.install(heard.append)


def taken() -> list[str]:
    """What was heard since this was asked last."""
    said = [*heard, *(HEARD.read_text().splitlines() if HEARD.exists() else ())]
    heard.clear()
    HEARD.unlink(missing_ok=True)
    return said
