"""llama.cpp's own server, compiled from the sources that llama-cpp-python's archive holds; runs in its environment.

    python -m benchmarks.peer_runs.build_llama_server FOLDER

Of the same version as what runs in process, else of the newest, and with the same instructions. Takes minutes, on a
busy machine an hour. What an interrupted run compiled stays beside FOLDER, and the next run continues there.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = "llama-cpp-python"
OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON"),
    *("-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
)


def wanted() -> str:
    try:
        return f"{PACKAGE}=={version(PACKAGE)}"
    except PackageNotFoundError:
        return PACKAGE


def find_sources(folder: Path) -> Path:
    """llama.cpp's sources below `folder`, downloaded if they are not there."""
    if not folder.exists():
        scratch = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(scratch, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", PACKAGE]
        subprocess.run([*pip, "-d", str(scratch), wanted()], check=True)
        with tarfile.open(next(scratch.glob("*.tar.gz"))) as archive:
            archive.extractall(scratch, filter="data")
        scratch.rename(folder)
    return next(folder.glob("*/vendor/llama.cpp"))


def main() -> None:
    target = Path(sys.argv[1])
    source, build = find_sources(target.with_name("server-sources")), target.with_name("server-build")
    subprocess.run(["cmake", "-S", source, "-B", build, *OPTIONS], check=True)
    cores = str(os.cpu_count())
    subprocess.run(["cmake", "--build", build, "--target", "llama-server", "-j", cores], check=True)
    shutil.copytree(build / "bin", target, symlinks=True)


if __name__ == "__main__":
    main()
