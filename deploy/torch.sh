#!/bin/sh
# Installs torch in the version of constraints.txt, for `make` and the image:  torch.sh VARIANT [INDEX]
# PIP is the pip of the environment, by default the image's.  On Linux the plain `torch` of pip's index has CUDA,
# several gigabytes; the CPU build has the version VERSION+cpu.  It comes from INDEX or from what pip is configured to
# use, if either has it; otherwise uv fetches it, which knows where CPU builds are.
set -eu
variant=$1 index=${2:-}
pip=${PIP:-/opt/polyhead/bin/pip}
python=${pip%/*}/python
torch=$(grep '^torch==' constraints.txt)

by_pip() {  # pip writes nothing while it unpacks, which takes minutes on a busy machine
  while sleep 20 >/dev/null 2>&1; do echo "pip installs: $(du -sm "${pip%/bin/*}" 2>/dev/null | cut -f1) MB are there"; done &
  watch=$!
  "$pip" install "$1" && status=0 || status=1
  kill "$watch"
  return "$status"
}

by_uv() {
  echo "uv installs $torch for CPUs"
  uv=$(command -v uv) && uv_install "$uv" && return
  place=$(mktemp -d)  # there is none, or it is too old for --torch-backend
  trap 'rm -rf "$place"' EXIT
  "$pip" install --quiet --target "$place" uv && uv_install "$place/bin/uv"
}

uv_install() {
  "$1" pip install --python "$python" --torch-backend cpu "$torch"
}

case $variant in cpu | gpu) ;; *) echo "VARIANT must be cpu or gpu, not $variant" >&2; exit 1 ;; esac
# What is installed already is kept if it is of the variant, or else removed: installers take the other one for the same.
found=$("$python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null) || found=
case $variant:$(uname -s):$found in
  *:) ;;
  cpu:Linux:"${torch#torch==}+cpu" | gpu:*:"${torch#torch==}" | gpu:*:"${torch#torch==}+cu"* | cpu:[!L]*:"${torch#torch==}") exit ;;
  *) "$pip" uninstall --yes torch ;;
esac
[ "$variant" = cpu ] || exec env ${index:+"PIP_EXTRA_INDEX_URL=$index"} "$pip" install "$torch"
[ "$(uname -s)" = Linux ] || exec "$pip" install "$torch"  # elsewhere the plain torch is for CPUs
if [ -n "$index" ]; then  # for this package only
  PIP_EXTRA_INDEX_URL=$index by_pip "$torch+cpu" && exit
elif "$pip" config list | grep -E 'index|find-links' >/dev/null; then
  by_pip "$torch+cpu" && exit
fi
by_uv && exit
echo "$torch for CPUs is not to be had: pass TORCH_INDEX, the address of the index that PyTorch's page \"Get started\"
names for pip and CPU; or VARIANT=gpu for the build with CUDA." >&2
exit 1
