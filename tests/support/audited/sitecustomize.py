"""Python imports this module first in every child process of the tests, because their path begins with this folder.
It installs the audit hook there."""

import os

import audit_hook


def write(line: str) -> None:
    number = os.open(os.environ["AUDITED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(number, f"{line}\n".encode())
    os.close(number)


if "AUDITED" in os.environ:
    audit_hook.install(write)
