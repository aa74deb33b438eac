"""Measure the container image as it is run in production: its size, and the time from `run` to ready.

python -m benchmarks.image MODELS [--name localhost/polyhead] [--rounds 5] [ARGUMENTS OF THE IMAGE]      as root

MODELS is a folder that becomes /models, read-only. Without arguments the image serves the quick-start models from it.
The image must be in buildah's storage. Where no container engine runs, the same environment is made from its parts: the
image's root and the models mounted read-only, one tmpfs, the image's user, environment and entry point, no
capabilities, no new privileges. Every shell in the image is covered, so a program that needs one fails. The first start
reads files into the page cache and is not counted.
"""

import argparse
import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving import answers, machine

SHELLS = ("sh", "bash", "dash", "ash", "busybox")
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "ld", "as")
PATHS = ("bin", "usr/bin", "usr/local/bin", "opt/polyhead/bin")
LIMIT_S = 120.0
WRITES = "import pathlib; pathlib.Path('{}').write_text('')"


@dataclass(frozen=True)
class Image:
    """The configuration of an image, and the folder of its files."""

    root: Path
    size: str
    config: dict[str, Any]
    models: Path

    def environment(self, port: int) -> dict[str, str]:
        own = dict(entry.split("=", 1) for entry in self.config["Env"])
        return own | {"POLYHEAD_MODEL_DIR": "/models", "POLYHEAD_HOST": "127.0.0.1", "POLYHEAD_PORT": str(port)}

    def within(self, *command: str) -> list[str]:
        """The command as the image's user, in the image's root."""
        user = f"--userspec={self.config['User']}"
        return [tool("setpriv"), "--no-new-privs", tool("chroot"), user, str(self.root), *command]

    def program(self, name: str) -> str:
        """The path of a program by the image's PATH, as a container engine looks it up."""
        folders = self.environment(0)["PATH"].split(":")
        return next(f"{folder}/{name}" for folder in folders if os.path.lexists(f"{self.root}{folder}/{name}"))

    def command(self, arguments: Sequence[str]) -> list[str]:
        first, *rest = [*self.config["Entrypoint"], *(arguments or self.config["Cmd"])]
        return [self.program(first), *rest]

    def present(self, names: Sequence[str]) -> list[Path]:
        found = (self.root / folder / name for folder in PATHS for name in names)
        return [path for path in found if os.path.lexists(path)]


def tool(name: str) -> str:
    found = shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
    return found or exit(f"{name} is not here; it is part of Debian's packages coreutils, util-linux and buildah")


def buildah(*arguments: str) -> str:
    return subprocess.run([tool("buildah"), *arguments], check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def mounted(name: str, models: Path) -> Iterator[Image]:
    container = buildah("from", "--pull-never", name)
    try:
        config = json.loads(buildah("inspect", "--type", "image", name))["Docker"]["config"]
        size = json.loads(buildah("images", "--json", name))[0]["size"]
        yield Image(Path(buildah("mount", container)), size, config, models)
    finally:
        buildah("rm", container)


def confined(image: Image, command: Sequence[str]) -> list[str]:
    """The command, once a mount namespace of its own is laid out; it ends with it."""
    root = shlex.quote(str(image.root))
    lines = [
        f"mount --rbind {root} {root}",
        f"mount -t proc proc {root}/proc",
        f"mount --rbind /dev {root}/dev && mount --rbind /sys {root}/sys",
        f"mount -t tmpfs -o mode=1777,size=64m tmpfs {root}/tmp",
        f"mount --bind {shlex.quote(str(image.models))} {root}/models && mount -o remount,bind,ro {root}/models",
        *(f"mount --bind {root}/dev/null {shlex.quote(str(shell.resolve()))}" for shell in image.present(SHELLS)),
        f"mount -o remount,bind,ro {root}",
        f"exec {shlex.join(image.within(*command))}",
    ]
    return [tool("unshare"), "--mount", "--propagation", "private", "/bin/sh", "-ec", "\n".join(lines)]


@dataclass(frozen=True)
class Ran:
    """One life of a container: seconds to ready and to its end, its exit status, what was found inside, the stages of
    its start as the server logs them."""

    ready_s: float
    leaving_s: float
    status: int
    found: dict[str, bool]
    stages: str


def run(image: Image, arguments: Sequence[str]) -> Ran:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile("a+") as log:
        began = time.monotonic()
        command = confined(image, image.command(arguments))
        environment = image.environment(port)
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            while not answers(port, "/readyz"):
                if process.poll() is not None or time.monotonic() - began > LIMIT_S:
                    log.seek(0)
                    raise SystemExit(f"it did not become ready:\n{log.read()}")
                time.sleep(0.02)
            ready = time.monotonic() - began
            found = inspected(image, process.pid, environment, port)
            asked = time.monotonic()
            process.send_signal(signal.SIGTERM)
            status = process.wait(60)
            log.seek(0)
            stages = re.search(r"ready on .* in [\d.]+ s \((.*)\)", log.read())
            return Ran(ready, time.monotonic() - asked, status, found, stages[1] if stages else "")
        finally:
            process.kill()


def inspected(image: Image, pid: int, environment: dict[str, str], port: int) -> dict[str, bool]:
    """What is true inside, asked by the image's own Python in the namespace of the running server."""

    def ends(*command: str) -> int:
        inside = [tool("nsenter"), f"--mount=/proc/{pid}/ns/mnt", *image.within(*command)]
        return subprocess.run(inside, env=environment, capture_output=True, check=False).returncode

    check, *health = image.config["Healthcheck"]["Test"]
    python = image.program("python")
    status = Path(f"/proc/{pid}/status").read_text()
    effective = status.split("CapEff:")[1].split()[0]
    return {
        "is not root": "0" not in status.split("Uid:")[1].split("\n")[0].split(),
        "has no capabilities": int(effective, 16) == 0,
        "root is read-only": ends(python, "-c", WRITES.format("/file")) != 0,
        "even its own environment": ends(python, "-c", WRITES.format("/opt/polyhead/file")) != 0,
        "models are read-only": ends(python, "-c", WRITES.format("/models/file")) != 0,
        "/tmp is not": ends(python, "-c", WRITES.format("/tmp/file")) == 0,
        "no shell runs": all(ends(f"/bin/{name}", "-c", "true") != 0 for name in ("sh", "bash", "dash")),
        "no compiler is in it": not image.present(COMPILERS),
        "HEALTHCHECK needs no shell": check == "CMD",
        "HEALTHCHECK passes": ends(python, *health[1:]) == 0,
        "a model answers": spoken_to(port),
    }


def spoken_to(port: int) -> bool:
    """Whether a model answers: the encoders with vectors, the generators with a word."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def asked(method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        content = json.loads(answer.read())
        return content if answer.status == 200 else {}

    models = [model["id"] for model in asked("GET", "/v1/models")["data"]]
    asks = [("/v1/embeddings", {"input": "A fine day"}), ("/v1/completions", {"prompt": "A fine", "max_tokens": 2})]
    return any(asked("POST", path, {"model": model, **body}) for model in models for path, body in asks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("models", type=Path)
    parser.add_argument("--name", default="localhost/polyhead")
    parser.add_argument("--rounds", type=int, default=5)
    options, arguments = parser.parse_known_args()
    with mounted(options.name, options.models.resolve()) as image:
        rounds = [run(image, arguments) for _ in range(options.rounds + 1)][1:]
    print(machine())
    print(f"size:            {image.size}")
    for what, seconds in (
        ("run to ready", [each.ready_s for each in rounds]),
        ("SIGTERM to end", [each.leaving_s for each in rounds]),
    ):
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} rounds"
        print(f"{what + ':':16s} median {statistics.median(seconds):.2f} s ({spread})")
    print(*(each.stages for each in rounds), sep="\n")
    for name in rounds[0].found:
        print(f"{'yes' if all(each.found[name] for each in rounds) else 'NO ':4s} {name}")
    print(f"{'yes' if not any(each.status for each in rounds) else 'NO ':4s} exit status 0")


if __name__ == "__main__":
    main()
