"""`polyhead doctor`: what is installed here, what computes, what this machine gives to the process, and what to change.

A finding is one line. Findings with `broken` keep a server from starting with these settings; `slow` ones do not.
"""

import os
import platform
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Literal

import orjson
import torch

from polyhead.models.native.build import TARGETS, find_compiler
from polyhead.models.native.library import CPU_FLAGS, LIBRARIES, load_library, processor_flags, runnable_targets
from polyhead.models.network.varlen import try_kernel

from ..config.settings import Settings, SettingsError
from ..core.version import VERSION
from ..resources import capacity, machine
from ..runtime import quickstart
from ..server.process import bind_socket

Status = Literal["ok", "info", "slow", "broken"]
DISK_RESERVE = 1 << 30  # bytes that the quick-start models and their downloads take
GIB, MIB = 1 << 30, 1 << 20
# An extra, the distribution that shows whether it is installed, and what it is for.
EXTRAS = (
    ("hub", "huggingface-hub", "models of the hub"),
    ("otel", "opentelemetry-sdk", "traces"),
    ("ray", "ray", "replicas on several machines"),
    ("explain", "matplotlib", "figures of polyhead explain"),
    ("examples", "openai", "the clients of the examples"),
)


@dataclass(frozen=True)
class Finding:
    """What was found of a subject; `advice` is empty if nothing has to be done."""

    subject: str
    status: Status
    found: str
    advice: str = ""


def examine(settings: Settings) -> list[Finding]:
    """Return the findings for a server with these settings."""
    return [
        *examine_packages(),
        *examine_instructions(),
        *examine_machine(),
        examine_port(settings.host, settings.port),
        examine_models(settings.model_dir, is_needed=not settings.models),
    ]


def examine_packages() -> Iterator[Finding]:
    python = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if platform.system() == "Linux":
        yield Finding("python", "ok", python)
    else:
        yield Finding("python", "info", python, "polyhead is tested on Linux only; here it is untested")
    yield Finding("polyhead", "ok", VERSION)
    yield examine_torch(torch.__version__, torch.version.cuda or "", has_gpu=torch.cuda.is_available())
    if torch.cuda.is_available():
        yield examine_attention(try_kernel(torch.device("cuda"), torch.bfloat16)[1])
    for extra, distribution, purpose in EXTRAS:
        found = installed_version(distribution)
        advice = "" if found else f"for {purpose}: pip install 'polyhead[{extra}]'"
        yield Finding(f"extra {extra}", "ok" if found else "info", found or "not installed", advice)


def installed_version(distribution: str) -> str:
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return ""


def examine_torch(release: str, cuda: str, *, has_gpu: bool) -> Finding:
    if has_gpu:
        return Finding("torch", "ok", f"{release}, with a GPU")
    if cuda:
        command = "pip install uv && uv pip install --reinstall --torch-backend cpu torch"
        advice = f"the CPU build is several GB smaller: {command}"
        return Finding("torch", "info", f"{release}, built for CUDA {cuda}, and no GPU is seen", advice)
    return Finding("torch", "ok", f"{release}, for CPUs")


def examine_attention(problem: str) -> Finding:
    """What attends on the GPU; `problem`: why the kernel does not."""
    if not problem:
        return Finding("attention", "ok", "the Triton kernel runs on the GPU")
    advice = "Triton comes with torch's builds for CUDA, and needs a C compiler (Debian and Ubuntu: apt install gcc)"
    return Finding("attention", "slow", f"computed in groups, since the kernel cannot be used: {problem}", advice)


def examine_instructions() -> Iterator[Finding]:
    """What computes networks on the CPU, and why nothing faster."""
    runnable = runnable_targets()
    build = "python -m polyhead.models.native.build"
    if not runnable:
        advice = (
            build if find_compiler() else f"install a C++ compiler (Debian and Ubuntu: apt install g++); then {build}"
        )
        yield Finding("compiled step", "slow", "none is compiled, so torch computes", advice)
        return
    try:
        load_library(runnable[0])
    except OSError as error:
        yield Finding("compiled step", "broken", str(error), build)
        return
    flags = processor_flags()
    faster = [name for name in takewhile(lambda name: name != runnable[0], CPU_FLAGS) if name in TARGETS]
    found = f"{runnable[0]} runs" + "".join(f"; {describe_missing(name, flags)}" for name in faster)
    is_improvable = any(flags.issuperset(CPU_FLAGS[name]) for name in faster)
    advice = f"a faster one can be compiled: {build}" if is_improvable else ""
    is_slow = runnable[0] == "portable" or is_improvable
    yield Finding("compiled step", "slow" if is_slow else "ok", found, advice)


def describe_missing(name: str, flags: set[str]) -> str:
    """Why an instruction set is not used."""
    missing = [flag for flag in CPU_FLAGS[name] if flag not in flags]
    if missing:
        return f"{name} needs {', '.join(missing)}, which this processor has not"
    return f"{name} is not compiled" if not (LIBRARIES / f"{name}.so").exists() else f"{name} is not used"


def examine_machine() -> Iterator[Finding]:
    quota = min(capacity.core_limits(), default=0)
    cores, seen = min(machine.core_limits()), os.cpu_count() or 1
    limits = f"{seen} seen, {machine.PHYSICAL_CORES} physical, quota {quota or 'none'}"
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if busy > cores:
        advice = f"{busy:.1f} processes want to run on {cores} cores: other programs make answers slower"
        yield Finding("cores", "slow", f"{cores} for computing ({limits})", advice)
    else:
        yield Finding("cores", "ok", f"{cores} for computing ({limits})")
    groups = [limit for limit, _ in capacity.group_limits()]
    free = min(capacity.available_memory(), default=0)
    limit = f"limit of the container {min(groups) / GIB:.1f} GiB" if groups else "no limit of a container"
    if shortage := capacity.explain_shortage():
        yield Finding("memory", "broken", f"{free / GIB:.1f} GiB free, {limit}", shortage)
    else:
        yield Finding("memory", "ok" if free else "info", f"{free / GIB:.1f} GiB free, {limit}" if free else "unknown")


def examine_port(host: str, port: int) -> Finding:
    """Whether a server can listen there."""
    try:
        bind_socket(host, port).close()
    except SettingsError as error:
        return Finding("port", "broken", str(error), f"for example --port {find_free_port()}")
    return Finding("port", "ok", f"{host} port {port} is free" if port else "a free one is taken")


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def examine_models(folder: Path, *, is_needed: bool) -> Finding:
    """The folder of the quick-start models; `is_needed`: a server with these settings fetches and loads them."""
    serious: Status = "broken" if is_needed else "info"
    present = [
        name
        for name, source in quickstart.sources(folder).items()
        if all(Path(part).exists() for part in source.split("+"))
    ]
    found = f"{folder}: {', '.join(present) or 'no model'} of the quick start"
    if len(present) == len(quickstart.sources(folder)):
        return Finding("model folder", "ok", found)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return Finding("model folder", serious, f"{found}; {existing} cannot be written", "--model-dir names another")
    free = shutil.disk_usage(existing).free
    if free < DISK_RESERVE:
        advice = "free 1 GiB there, or name another folder by --model-dir"
        return Finding("model folder", serious, f"{found}; {free // MIB} MiB of disk are free", advice)
    return Finding(
        "model folder", "info", f"{found}; {free // GIB} GiB of disk are free", "polyhead models fetches them"
    )


def is_healthy(findings: Sequence[Finding]) -> bool:
    return not any(finding.status == "broken" for finding in findings)


def as_text(findings: Sequence[Finding]) -> str:
    """A line for each finding, and its advice on a line below."""
    width = max(len(finding.subject) for finding in findings)
    lines = list[str]()
    for finding in findings:
        mark = "" if finding.status in ("ok", "info") else f"{finding.status.upper()}: "
        lines.append(f"{finding.subject:<{width}}  {mark}{finding.found}")
        if finding.advice:
            lines.append(f"{'':<{width}}    -> {finding.advice}")
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> str:
    value = {"healthy": is_healthy(findings), "findings": [asdict(finding) for finding in findings]}
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
