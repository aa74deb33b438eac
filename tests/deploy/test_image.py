"""The image without building it: the Dockerfile and the scripts that it runs.

`make lint` has hadolint read it, `make image` builds it, `python -m benchmarks.image` runs it as production would.
"""

import ast
import http.server
import importlib.util
import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import trustme

from polyhead.service.server import health_check
from tests.support.places import ROOT

Instruction = tuple[str, str]


def instructions() -> list[list[Instruction]]:
    """The instructions of the Dockerfile by stage. The first list has the arguments before the first stage."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages: list[list[Instruction]] = [[]]
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            stages.append([])
        stages[-1].append((name, rest.strip()))
    return stages


GLOBAL, BUILD, FINAL = instructions()


def values(stage: list[Instruction], name: str) -> list[str]:
    return [rest for instruction, rest in stage if instruction == name]


def test_the_image_is_for_cpus_by_default() -> None:
    assert "VARIANT=cpu" in values(GLOBAL, "ARG")
    assert './torch.sh "${VARIANT}"' in " ".join(values(BUILD, "RUN"))
    assert 'slim.py "${VARIANT}"' in " ".join(values(BUILD, "RUN"))


def test_the_base_is_pinned_by_version_and_digest() -> None:
    """The base of the first stage; the second stage has the same one unless RUNTIME is given."""
    base, runtime = (rest for rest in values(GLOBAL, "ARG") if rest.startswith(("BASE=", "RUNTIME=")))
    assert re.fullmatch(r"BASE=python:3\.\d+\.\d+-slim-[a-z]+@sha256:[0-9a-f]{64}", base)
    assert runtime == "RUNTIME=${BASE}"
    text = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^FROM (\S+)", text, flags=re.MULTILINE) == ["${BASE}", "${RUNTIME}"]


OLD, NEW = "sha256:" + "a" * 64, "sha256:" + "b" * 64


@pytest.fixture
def pinned(tmp_path: Path) -> Path:
    """A copy of the files that name images by digest, and a stub docker that returns the digest in the file `found`."""
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy" / "digests.sh", tmp_path / "deploy")
    (tmp_path / "Dockerfile").write_text(f"ARG BASE=python:3.12.15-slim-trixie@{OLD}\n")
    (tmp_path / "compose.yaml").write_text(f"image: polyhead:0.1.0\nimage: prom/prometheus:v3.13.2@{OLD}\n")
    (tmp_path / "found").write_text(NEW)
    docker = tmp_path / "docker"
    docker.write_text(
        '#!/bin/sh\n[ "$2" = version ] && exit\necho "$@" >>"${0%/*}/asked"\ncat "${0%/*}/found"\n', "utf-8"
    )
    docker.chmod(0o755)
    return tmp_path


def digests(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": f"{folder}:/usr/bin:/bin"}
    command = [folder / "deploy" / "digests.sh", *flags]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def test_digests_are_looked_up_by_version_and_written(pinned: Path) -> None:
    assert digests(pinned).returncode == 0
    assert (pinned / "Dockerfile").read_text() == f"ARG BASE=python:3.12.15-slim-trixie@{NEW}\n"
    assert (pinned / "compose.yaml").read_text() == f"image: polyhead:0.1.0\nimage: prom/prometheus:v3.13.2@{NEW}\n"
    asked = [line.split()[3] for line in (pinned / "asked").read_text().splitlines()]
    assert asked == ["prom/prometheus:v3.13.2", "python:3.12.15-slim-trixie"]
    assert "as it was" in digests(pinned).stdout


def test_digests_are_checked_without_writing(pinned: Path) -> None:
    before = (pinned / "compose.yaml").read_text()
    assert digests(pinned, "--check").returncode == 1
    assert (pinned / "compose.yaml").read_text() == before
    (pinned / "found").write_text(OLD)
    assert digests(pinned, "--check").returncode == 0


def test_an_invalid_digest_is_not_written(pinned: Path) -> None:
    (pinned / "found").write_text("unauthorised")
    done = digests(pinned)
    assert done.returncode == 1
    assert "no digest, but: unauthorised" in done.stderr
    assert OLD in (pinned / "Dockerfile").read_text()


def test_only_an_image_for_gpus_gets_a_compiler() -> None:
    """As files that are copied, since the final stage runs nothing."""
    (command,) = (rest for rest in values(BUILD, "RUN") if "/opt/compiler" in rest)
    assert re.search(r'if \[ "\$\{VARIANT\}" = gpu \]; then .* gcc libc6-dev .*; fi$', command)
    assert "--from=build /opt/compiler/usr /usr" in values(FINAL, "COPY")


def test_the_final_stage_only_copies() -> None:
    """The final stage therefore needs no shell and has neither compiler nor sources."""
    assert not values(FINAL, "RUN")
    assert all(copied.startswith("--from=build ") for copied in values(FINAL, "COPY"))
    assert not values(FINAL, "ADD")


@pytest.mark.parametrize("name", ["ENTRYPOINT", "CMD", "HEALTHCHECK"])
def test_no_shell_is_needed_to_start_it(name: str) -> None:
    (rest,) = values(FINAL, name)
    assert json.loads(rest[rest.index("[") :])


def test_it_runs_as_an_unprivileged_user() -> None:
    assert values(FINAL, "USER") == ["10001:10001"]
    assert [rest for rest in values(FINAL, "COPY") if "--chown" in rest] == [
        "--from=build --chown=10001:10001 /opt/models /models"
    ]


def test_it_has_the_oci_labels() -> None:
    (labels,) = values(FINAL, "LABEL")
    names = {label.partition("=")[0] for label in shlex.split(labels)}
    assert names == {
        f"org.opencontainers.image.{n}" for n in ("title", "description", "licenses", "version", "revision")
    }


def test_the_build_context_has_all_copied_files_and_every_option_is_an_argument() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / path).exists() for path in allowed)
    needed = {path for rest in values(BUILD, "COPY") for path in rest.split()[:-1]} - {"."}
    assert needed <= set(allowed)
    script = (ROOT / "deploy" / "image.sh").read_text()
    (options,) = re.findall(r"^for option in (.*); do$", script, flags=re.MULTILINE)
    arguments = {rest.partition("=")[0] for stage in (GLOBAL, BUILD, FINAL) for rest in values(stage, "ARG")}
    assert arguments - {"VERSION", "REVISION"} == set(options.split())
    (labels,) = values(FINAL, "LABEL")
    overridden = re.findall(r"--label \"([a-z.]+)=", script)
    assert len(overridden) == 2
    assert all(f"{name}=" in labels for name in overridden)


@pytest.fixture(params=["http", "https"])
def probed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[http.server.HTTPServer]:
    """A server whose /readyz answers with `status`, over HTTP or with a certificate of another host over HTTPS."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(self.server.status if self.path == "/readyz" else 404)  # type: ignore[attr-defined]
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        if request.param == "https":
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            trustme.CA().issue_cert("polyhead.example.com").configure_cert(context)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"POLYHEAD_PROBE_PORT": "0"},
        {"POLYHEAD_PROBE_PORT": "its", "POLYHEAD_PORT": "1"},
        {"POLYHEAD_TLS_CERT": "/tls.crt"},
        {"POLYHEAD_TLS_CERT": "/tls.crt", "POLYHEAD_PROBE_PORT": "its", "POLYHEAD_PORT": "1"},
    ],
)
@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_it_is_healthy_when_it_is_ready(
    probed: http.server.HTTPServer, status: int, healthy: bool, others: dict[str, str]
) -> None:
    """A file may say what no variable does: that the port of clients has TLS.  The port for probes has none."""
    if isinstance(probed.socket, ssl.SSLSocket) and others.get("POLYHEAD_PROBE_PORT") == "its":
        healthy = False
    probed.status = status  # type: ignore[attr-defined]
    (check,) = values(FINAL, "HEALTHCHECK")
    _, *arguments = json.loads(check[check.index("[") :])
    its = str(probed.server_address[1])
    environment = {"POLYHEAD_PORT": its} | {name: value.replace("its", its) for name, value in others.items()}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode == 0) == healthy


def test_the_health_check_is_within_its_time_and_loads_little() -> None:
    (check,) = values(FINAL, "HEALTHCHECK")
    assert int(re.findall(r"--timeout=(\d+)s", check)[0]) > 2 * health_check.TIMEOUT_S
    loaded = "import sys; import polyhead.service.server.health_check; print([*sys.modules])"
    found = subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"pydantic", "fastapi", "torch", "uvicorn"} & set(ast.literal_eval(found.stdout))


@dataclass(frozen=True)
class Installer:
    """pip and uv as stubs that write down how they were called, and fail unless a file has their name."""

    folder: Path

    def install(self, variant: str, index: str = "") -> subprocess.CompletedProcess[str]:
        (self.folder / "asked").write_text("")
        command = ["/bin/sh", ROOT / "deploy" / "torch.sh", variant, index]
        variables = {"PIP": str(self.folder / "pip"), "PATH": f"{self.folder}{os.pathsep}/usr/bin:/bin"}
        return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)

    def asked(self) -> list[str]:
        return [" ".join(line.split()) for line in (self.folder / "asked").read_text().splitlines()]

    def allow(self, *names: str) -> None:
        for name in ("pip", "uv"):
            (self.folder / f"{name}-works").unlink(missing_ok=True)
        for name in names:
            (self.folder / f"{name}-works").touch()


@pytest.fixture
def installer(tmp_path: Path) -> Installer:
    for name in ("pip", "uv"):
        script = (
            '#!/bin/sh\ncd "${0%/*}"\n[ "$*" = "config list" ] && { cat config 2>/dev/null; exit; }\n'
            f'echo {name} "$PIP_EXTRA_INDEX_URL" "$@" >>asked\ntest -e {name}-works\n'
        )
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    return Installer(tmp_path)


def test_torch_comes_from_the_given_or_configured_index_or_else_by_uv(installer: Installer) -> None:
    (pinned,) = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    index, python = "https://example.com/cpu", installer.folder / "python"
    by_uv = f"uv pip install --python {python} --torch-backend cpu {pinned}"
    installer.allow("pip", "uv")
    assert (installer.install("cpu").returncode, installer.asked()) == (0, [by_uv])
    assert (installer.install("cpu", index).returncode, installer.asked()) == (0, [f"pip {index} install {pinned}+cpu"])
    assert (installer.install("gpu").returncode, installer.asked()) == (0, [f"pip install {pinned}"])
    installer.allow("uv")
    assert installer.install("cpu", index).returncode == 0
    assert installer.asked() == [f"pip {index} install {pinned}+cpu", by_uv]
    (installer.folder / "config").write_text("global.find-links='/opt/wheels'\n")
    installer.allow("pip", "uv")
    assert (installer.install("cpu").returncode, installer.asked()) == (0, [f"pip install {pinned}+cpu"])


@pytest.mark.parametrize(
    ("variant", "found", "asked"),
    [
        ("cpu", "+cpu", []),
        ("cpu", "+cu130", ["pip uninstall --yes torch", "uv pip install"]),
        ("gpu", "", []),
        ("gpu", "+cu130", []),
        ("gpu", "+cpu", ["pip uninstall --yes torch", "pip install torch"]),
    ],
)
def test_a_torch_of_the_other_variant_is_replaced(
    variant: str, found: str, asked: list[str], installer: Installer
) -> None:
    (pinned,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    (installer.folder / "python").write_text(f"#!/bin/sh\necho {pinned}{found}\n")
    (installer.folder / "python").chmod(0o755)
    installer.allow("pip", "uv")
    assert installer.install(variant).returncode == 0
    for line, start in zip(installer.asked(), asked, strict=True):
        assert line.startswith(start)


def test_a_build_without_a_torch_for_cpus_says_what_to_do(installer: Installer) -> None:
    done = installer.install("cpu")
    assert done.returncode == 1
    assert "pass TORCH_INDEX" in done.stderr
    assert "VARIANT=gpu" in done.stderr
    assert installer.install("tpu").stderr == "VARIANT must be cpu or gpu, not tpu\n"


@pytest.fixture
def slim() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slim", ROOT / "deploy" / "slim.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_packages_that_are_compiled_are_those_of_the_wheel(slim: ModuleType) -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert list(slim.PACKAGES) == wheel["packages"]


@pytest.mark.parametrize(
    ("variant", "cuda", "packages", "complaint"),
    [
        ("cpu", None, [], ""),
        ("gpu", "13.0", ["nvidia-cublas"], ""),
        ("cpu", "13.0", [], "is built with CUDA"),
        ("cpu", None, ["nvidia-cublas"], "brought nvidia-cublas"),
        ("gpu", None, [], "is built without CUDA"),
    ],
)
def test_installed_packages_must_match_the_variant(
    slim: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    cuda: str | None,
    packages: list[str],
    complaint: str,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    installed = [SimpleNamespace(name=name) for name in (*packages, "numpy")]
    monkeypatch.setattr(slim.metadata, "distributions", lambda: installed)
    if not complaint:
        slim.verify(variant)
        return
    with pytest.raises(SystemExit, match=complaint):
        slim.verify(variant)


def test_modules_of_an_extra_that_was_not_installed_are_skipped(
    slim: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "ours"
    package.mkdir()
    for name, content in {"__init__": "", "plain": "", "fleet": "import ray"}.items():
        (package / f"{name}.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(slim, "SITE", tmp_path)
    monkeypatch.setattr(slim, "PACKAGES", ("ours",))
    slim.load()
    assert "ours.plain" in sys.modules
    (package / "broken.py").write_text("import nowhere_at_all")
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        slim.load()


def test_the_usual_image_has_no_ray_in_it() -> None:
    """Ray takes a quarter of a gigabyte without its dependencies, so it is installed only on request."""
    (extras,) = [rest for rest in values(BUILD, "ARG") if rest.startswith("EXTRAS=")]
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras == "EXTRAS=hub,otel"
    assert {"hub", "otel", "ray"} <= known.keys()
