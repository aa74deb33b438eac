"""The systemd unit: systemd finds no fault in it, and its settings are settings."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from polyhead.service.config.settings import Settings
from tests.support.places import ROOT

FOLDER = ROOT / "deploy" / "systemd"


def options() -> dict[str, str]:
    lines = (FOLDER / "polyhead.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if re.match(r"[A-Z]\w+=", line))


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not here")
def test_systemd_finds_no_fault(tmp_path: Path) -> None:
    """The program is one that this machine has, because systemd looks for it."""
    unit = (FOLDER / "polyhead.service").read_text().replace("/opt/polyhead/bin/polyhead", "/bin/true")
    (tmp_path / "polyhead.service").write_text(unit)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "polyhead.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    about_it = [line for line in done.stderr.splitlines() if "polyhead.service" in line]
    assert (done.returncode, about_it) == (0, []), done.stderr


def test_settings_of_the_environment_file_exist() -> None:
    names = re.findall(r"^#?POLYHEAD_(\w+)=", (FOLDER / "polyhead.env").read_text(), flags=re.MULTILINE)
    assert names
    assert {name.lower() for name in names} <= set(Settings.model_fields)


def test_the_stop_leaves_time_for_the_drain() -> None:
    drain = Settings.model_fields["drain_seconds"].default
    assert int(options()["TimeoutStopSec"]) >= drain + 8
    assert options()["RestartPreventExitStatus"] == "2"  # of settings that are wrong
