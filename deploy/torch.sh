#!/bin/sh
# Installs torch while the image is built, in the version of constraints.txt:  torch.sh VARIANT INDEX
# The plain `torch` of pip's index has CUDA on Linux, several gigabytes.  The CPU build has the version VERSION+cpu, so
# exactly this version is requested.
set -eu
variant=$1 index=$2
pip=${PIP:-/opt/polyhead/bin/pip}
torch=$(grep '^torch==' constraints.txt)

case $variant in
  cpu) torch="$torch+cpu" ;;
  gpu) ;;
  *) echo "VARIANT must be cpu or gpu, not $variant" >&2; exit 1 ;;
esac
# The index is used for this package only.
PIP_EXTRA_INDEX_URL=$index "$pip" install "$torch" && exit
[ "$variant" = gpu ] || echo "No index has $torch: pass TORCH_INDEX, the address of the index that PyTorch's page
\"Get started\" names for pip and CPU; or VARIANT=gpu for the build with CUDA." >&2
exit 1
