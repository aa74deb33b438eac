"""llama.cpp's own server, compiled from the sources that llama-cpp-python's archive holds; runs in its environment.

    python -m benchmarks.peer_runs.build_llama_server FOLDER

Of the same version as what runs in process, and with the same instructions.  Takes minutes.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON"),
    *("-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
)


def main() -> None:
    wanted = f"llama-cpp-python=={version('llama-cpp-python')}"
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "-d", folder, wanted], check=True)
        with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        source, build = next(Path(folder).glob("*/vendor/llama.cpp")), Path(folder) / "build"
        subprocess.run(["cmake", "-S", source, "-B", build, *OPTIONS], check=True)
        cores = str(os.cpu_count())
        subprocess.run(["cmake", "--build", build, "--target", "llama-server", "-j", cores], check=True)
        shutil.copytree(build / "bin", sys.argv[1], symlinks=True)


if __name__ == "__main__":
    main()
