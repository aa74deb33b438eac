"""Compiles the native step when the package is built or installed, so that no compiler is wanted at run time.

Without a compiler the package is complete but for that: models run on torch.  With POLYHEAD_NATIVE=aside nothing is
compiled here: `make` sets it and compiles in a process of its own, because pip builds this package before it
downloads anything else.  With POLYHEAD_NATIVE=aarch64 the wheel is for 64-bit ARM: aarch64-linux-gnu-g++ compiles
its steps (deploy/release.sh).
"""

import importlib.util
import os
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):
    """`editable` installs compile in place; a wheel holds what was compiled, and says for which platform."""

    crossed: "TemporaryDirectory[str] | None" = None  # with the library for another machine, until the wheel is written

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or os.environ.get("POLYHEAD_NATIVE") == "aside":
            return
        where = Path(self.root) / "models" / "native" / "build.py"
        spec = importlib.util.spec_from_file_location("native_build", where)
        assert spec is not None
        assert spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)  # by its path: nothing else of the package can be imported yet
        if os.environ.get("POLYHEAD_NATIVE") == "aarch64":
            self.crossed = TemporaryDirectory()
            build_data["pure_python"], build_data["tag"] = False, "py3-none-linux_aarch64"
            for name in native.ARM:
                library = native.compile_target("aarch64-linux-gnu-g++", name, out=Path(self.crossed.name))
                build_data["force_include"][str(library)] = f"polyhead/models/native/lib/{library.name}"
            return
        built = native.build()
        self.app.display_info(f"native step compiled for: {', '.join(built) or 'nothing'}")
        if built and version != "editable":
            tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"], build_data["tag"] = False, f"py3-none-{tag}"
            libraries = (native.LIBRARIES / f"{name}.so" for name in built)
            build_data["artifacts"] += [f"polyhead/{path.relative_to(self.root)}" for path in libraries]

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        if self.crossed is not None:
            self.crossed.cleanup()
