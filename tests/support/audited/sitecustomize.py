"""Python reads this first in every child of the tests, whose path begins here: it is watched like they are."""

import os

import audit_hook


def write(line: str) -> None:
    number = os.open(os.environ["AUDITED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(number, f"{line}\n".encode())
    os.close(number)


if "AUDITED" in os.environ:
    audit_hook.install(write)
