"""Runs the commands of README, guides and examples in a fresh environment: `make docs-check`.

    python -m docs.site_build.run_blocks [--environment FOLDER] [PAGE...]

A virtual environment is made in a temporary folder and gets the package with the extras hub and examples, as a reader
would install it. Commands are run against a server of the quick start on a free port of 127.0.0.1; a page may start
another server with `polyhead serve`. Addresses in commands are replaced by that of the server.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from docs.site_build.command_blocks import Command, matches, runnable
from docs.site_build.links import ROOT

SHOWN_ADDRESS = "http://127.0.0.1:8000"
START_SECONDS, COMMAND_SECONDS = 600, 600
READY = re.compile(r"\bready on (http://[\w.]+:\d+)")


def pages() -> list[Path]:
    return [
        ROOT / "README.md",
        ROOT / "docs/get-started.md",
        *sorted((ROOT / "docs/guides").glob("*.md")),
        ROOT / "docs/decisions-api.md",
        ROOT / "docs/explain.md",
        ROOT / "examples/README.md",
    ]


def make_environment(folder: Path) -> None:
    venv.create(folder, with_pip=True)
    install = [folder / "bin/python", "-m", "pip", "install", "--quiet", "-c", "constraints.txt", ".[hub,examples]"]
    subprocess.run(install, cwd=ROOT, check=True)


class Server:
    """`polyhead serve` in the environment, started with a shell command."""

    def __init__(self, command: str, environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as out:
            line = f"exec {command} --port 0"
            self.child = subprocess.Popen(
                ["/bin/bash", "-c", line], env=environment, cwd=log.parent, stderr=out, stdout=out
            )
        self.url = self.wait_until_ready()

    def wait_until_ready(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.child.poll() is None:
            if found := READY.search(self.log.read_text()):
                return found[1]
            time.sleep(0.2)
        raise SystemExit(f"the server did not start:\n{self.log.read_text()}")

    def stop(self) -> None:
        self.child.terminate()
        self.child.wait(120)


class Checker:
    """Runs commands; counts those whose output is not what the page shows."""

    def __init__(self, environment: Path, folder: Path) -> None:
        self.folder, self.failed, self.ran = folder, 0, 0
        self.variables = os.environ | {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}
        for name in ("examples", "training"):
            (folder / name).symlink_to(ROOT / name)
        self.server = self.quick_start = Server("polyhead serve", self.variables, folder / "serve.log")

    def check(self, page: Path) -> None:
        for command in runnable(page.read_text("utf-8")):
            where = f"{page.relative_to(ROOT)}:{command.line}"
            if command.text.startswith("polyhead serve"):
                self.server = Server(command.text, self.variables, self.folder / "other.log")
                print(f"ok    {where} (a server of its own)")
                continue
            done = self.run(command)
            good = done.returncode == 0 and (command.output is None or matches(command.output, done.stdout))
            self.ran, self.failed = self.ran + 1, self.failed + (not good)
            print(f"{'ok   ' if good else 'WRONG'} {where}", flush=True)
            if not good:
                print(f"{command.text}\n--- shown\n{command.output}\n--- came\n{done.stdout}{done.stderr}", flush=True)
        if self.server is not self.quick_start:
            self.server.stop()
            self.server = self.quick_start

    def run(self, command: Command) -> subprocess.CompletedProcess[str]:
        url = self.server.url
        text = command.text.replace(SHOWN_ADDRESS, url)
        text = re.sub(r"\bpolyhead (classify|embed|chat|decide)\b", rf"polyhead \1 --url {url}", text)
        text = re.sub(r"\b(python examples/\w+\.py)", rf"\1 --url {url}", text)
        line = ["/bin/bash", "-c", text] if command.kind == "console" else ["python", "-c", text]
        return subprocess.run(
            line,
            env=self.variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_SECONDS,
            stdin=subprocess.DEVNULL,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="*", type=Path)
    parser.add_argument("--environment", type=Path, help="an environment that is used as it is")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = given.environment or Path(folder) / "environment"
        if not given.environment:
            make_environment(environment)
        checker = Checker(environment.absolute(), Path(folder))
        try:
            for page in [path.absolute() for path in given.page] or pages():
                checker.check(page)
        finally:
            checker.quick_start.stop()
    print(f"{checker.ran} commands, {checker.failed} of them wrong")
    sys.exit(checker.failed > 0)


if __name__ == "__main__":
    main()
