"""Removes files that serving never reads from an installed environment, and compiles the rest: `slim.py VARIANT`.

It runs once, with the environment's Python, while the image is built.  It imports the packages and finds the modules
that were loaded.  Bytecode doubles the size of a Python package, so only the loaded modules of large packages are
compiled; other packages are compiled completely.
"""

import compileall
import importlib
import pkgutil
import re
import shutil
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from py_compile import PycInvalidationMode

PACKAGES = ("polyhead",)
SITE = Path(sysconfig.get_path("purelib"))
UNUSED = (
    "torch/include",
    "torch/share",
    "torch/test",
    "torch/bin/[!t]*",
    "torch/bin/test*",
    "torch/lib/*test*",
    "torch/lib/*.a",
    "*/tests",
    "*/*/tests",
    "*/*/*/tests",
)
OPTIONAL = ("ray", "msgpack", "triton")  # of an extra or of torch for GPUs; some modules of ours need them
BULKY = re.compile(r"/(torch|torchgen|functorch|sympy|mpmath|networkx|numpy|pip|setuptools)/")


def remove() -> None:
    for pattern in UNUSED:
        for path in SITE.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for cache in SITE.rglob("__pycache__"):
        shutil.rmtree(cache)


def load() -> None:
    """Import every module of the product but those that stand on an extra which was not asked for; what they import in
    turn is the corner that gets compiled."""
    for package in PACKAGES:
        for module in pkgutil.walk_packages([str(SITE / package)], prefix=f"{package}."):
            if module.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as missing:
                if missing.name not in OPTIONAL:
                    raise


def compile_all() -> None:
    # Copying between image layers may change a file's time, so bytecode must not be checked against it.
    mode = PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(SITE, rx=BULKY, quiet=2, workers=0, invalidation_mode=mode)
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    for file in sorted({file for file in files if file and file.endswith(".py") and file.startswith(str(SITE))}):
        compileall.compile_file(file, quiet=2, invalidation_mode=mode)


def verify(variant: str) -> None:
    """Ends the build if an image for CPUs has CUDA in it, gigabytes that nobody asked for, or one for GPUs has none."""
    import torch

    packages = sorted(
        {found.name for found in metadata.distributions() if found.name.startswith(("nvidia-", "triton"))}
    )
    if variant == "cpu" and (torch.version.cuda or packages):
        sys.exit(f"VARIANT=cpu, but torch {torch.__version__} is built with CUDA and brought {', '.join(packages)}")
    if variant == "gpu" and not torch.version.cuda:
        sys.exit(f"VARIANT=gpu, but torch {torch.__version__} is built without CUDA: an index has only that one")


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    verify(sys.argv[1])
    remove()
    load()
    compile_all()
