"""Compiles src/step.cpp once for each instruction set of this processor family.

library.py chooses at load time which one is used. Without a compiler there is no library, and the torch executor is
used instead. hatch_build.py calls this when the package is installed, `make` before it serves or tests, `python -m
polyhead.models.native.build` by hand. A library contains a hash of its sources and flags, so whether it is stale does
not depend on file times.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = HERE / "lib"
SOURCES = sorted((HERE / "src").glob("*.?pp"))
GCC_FLAGS = ("-fno-gnu-unique", "-Wno-maybe-uninitialized")  # clang does not know them
COMMON_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-Wall",
    "-Wno-maybe-uninitialized",
)
# The compiled step is tested on Linux only. On macOS it needs clang++, on Windows clang++ or g++ of MinGW, because cl
# of Visual Studio has no vector types; both are untested.
WINDOWS = platform.system() == "Windows"
WINDOWS_UNKNOWN = ("-fPIC", "-pthread", "-fvisibility=hidden")
COMPILERS = ("clang++", "g++") if WINDOWS else ("c++", "g++", "clang++")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mprefer-vector-width=512")
X86: dict[str, tuple[str, ...]] = {
    "avx512vnni": (*AVX2, *AVX512),
    "avxvnni": (*AVX2, "-mavxvnni"),
    "avx2": AVX2,
    "portable": (),
}
ARM: dict[str, tuple[str, ...]] = {
    "i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
    "dotprod": ("-march=armv8.2-a+dotprod",),
    "portable": (),
}
BY_MACHINE = {"x86_64": X86, "AMD64": X86, "aarch64": ARM, "arm64": ARM}
TARGETS = BY_MACHINE.get(platform.machine(), {"portable": ()})

log = logging.getLogger(__name__)


def find_compiler() -> str | None:
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def compiler_flags(command: str) -> list[str]:
    """The flags for all instruction sets that this compiler knows."""
    said = subprocess.run([command, "--version"], check=True, capture_output=True, text=True).stdout
    unknown = (*(GCC_FLAGS if "clang" in said else ()), *(WINDOWS_UNKNOWN if WINDOWS else ()))
    return [flag for flag in COMMON_FLAGS if flag not in unknown]


def target_flags(name: str) -> tuple[str, ...]:
    """The flags of one instruction set, also of another processor family."""
    return (X86 | ARM | TARGETS)[name]


def source_hash(name: str) -> str:
    """A hash of the sources and of the flags they are compiled with."""
    digest = hashlib.sha256("\0".join((*COMMON_FLAGS, *target_flags(name))).encode())
    for path in SOURCES:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_stale(library: Path) -> bool:
    """Whether the library is missing, or compiled from other sources or flags. The file is read, not loaded."""
    return not library.exists() or source_hash(library.stem).encode() not in library.read_bytes()


def compile_target(command: str, name: str, *more: str, out: Path = LIBRARIES) -> Path:
    """Compile one library; the file appears whole or not at all. Raises CalledProcessError with the compiler's
    output."""
    out.mkdir(exist_ok=True)
    library = out / f"{name}.so"
    growing = library.with_suffix(f".{os.getpid()}")
    source = str(HERE / "src" / "step.cpp")
    subprocess.run(
        [
            command,
            *compiler_flags(command),
            *target_flags(name),
            *more,
            f'-DMADE_OF="{source_hash(name)}"',
            "-o",
            str(growing),
            source,
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    growing.replace(library)
    return library


def build() -> list[str]:
    """Compile the libraries that are stale. Returns the names of all that exist afterwards."""
    command = find_compiler()
    if command is None:
        log.warning(
            "no C++ compiler was found, so models run on torch alone, which is slower; install one (Debian and Ubuntu: "
            "apt install g++) and run: python -m polyhead.models.native.build"
        )
        return []

    def attempt(name: str) -> str | None:
        try:
            if is_stale(LIBRARIES / f"{name}.so"):
                compile_target(command, name)
        except subprocess.CalledProcessError as error:
            log.warning("%s could not be compiled for %s: %s", command, name, error.stderr[-2000:])
            return None
        return name

    with ThreadPoolExecutor() as pool:
        return [name for name in pool.map(attempt, TARGETS) if name]


if __name__ == "__main__":
    if any(is_stale(LIBRARIES / f"{name}.so") for name in TARGETS) and find_compiler():
        sys.stderr.write(f"compiling the step of the models for {', '.join(TARGETS)}; this takes 1 to 4 minutes\n")
    sys.stderr.write(f"the step of the models is compiled for: {', '.join(build()) or 'nothing'}\n")
