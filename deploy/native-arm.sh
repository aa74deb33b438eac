#!/bin/bash
# Compiles the step of the models for 64-bit ARM and runs its tests under qemu, on a machine of another family.
#   deploy/native-arm.sh [PYTEST ARGUMENT...]     by default all tests of tests/models/native that run there
# Needs Debian or Ubuntu with g++-aarch64-linux-gnu and qemu-user.  Python for ARM and its libraries come from the
# distribution and pip, into build/arm; nothing is installed into the system.  All tests take hours.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
here=$PWD/build/arm
version=$($python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
compiler=aarch64-linux-gnu-g++
for program in $compiler qemu-aarch64 apt-get dpkg-deb; do
  command -v $program >/dev/null || { echo "$program is not here: apt install g++-aarch64-linux-gnu qemu-user" >&2; exit 1; }
done
mkdir -p "$here"

if [ ! -e "$here/.root" ]; then  # Python for ARM
  own=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$here/apt" -o Dir::Cache="$here/apt"
       -o Dir::State::status="$here/apt/status" -o APT::Sandbox::User=root)
  mkdir -p "$here/apt/lists/partial" "$here/apt/archives/partial" "$here/debs" "$here/system"
  touch "$here/apt/status"
  apt-get "${own[@]}" -qq update
  mapfile -t names < <(apt-get "${own[@]}" install -y --no-install-recommends --print-uris "python$version" libgomp1 libstdc++6 |
    sed -n "s/^'[^']*' \([^_]*\)_.*/\1/p")
  (cd "$here/debs" && apt-get "${own[@]}" -qq download "${names[@]}")
  for package in "$here"/debs/*.deb; do dpkg-deb -x "$package" "$here/system"; done
  mkdir -p "$here/system/proc"  # what the emulated processor has
  printf 'Features\t: fp asimd asimdhp asimddp i8mm\n' >"$here/system/proc/cpuinfo"
  touch "$here/.root"
fi

if [ ! -e "$here/.site" ]; then  # torch's oldest release that polyhead takes: later ones for ARM need CUDA
  platforms=$(for n in 2_17 2_24 2_26 2_27 2_28; do echo "--platform manylinux_${n}_aarch64"; done)
  wheels="$platforms --python-version $version --implementation cp --abi cp${version/./} --abi abi3 --abi none"
  # shellcheck disable=SC2086
  $python -m pip install --quiet --only-binary :all: --target "$here/site" $wheels --no-deps torch==2.8.0
  # shellcheck disable=SC2086
  $python -m pip install --quiet --only-binary :all: --target "$here/site" $wheels numpy safetensors 'tokenizers>=0.22' gguf \
    jinja2 pyyaml orjson pydantic pydantic-settings httpx prometheus-client fastapi uvicorn python-multipart typer rich \
    llguidance 'transformers>=5' hypothesis pytest pytest-timeout sympy networkx fsspec filelock setuptools
  touch "$here/.site"
fi

rm -rf "$here/tree"
mkdir -p "$here/tree"
git ls-files -z | tar --create --null --files-from=- | tar --extract --directory="$here/tree"
$python - "$compiler" "$here/tree/models/native/lib" <<'PYTHON'
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from polyhead.models.native import build

with ThreadPoolExecutor() as pool:
    made = pool.map(lambda name: build.compile_target(sys.argv[1], name, out=Path(sys.argv[2])), build.ARM)
    print("compiled:", *(library.stem for library in made))
PYTHON

emulate() { qemu-aarch64 -L "$here/system" -cpu max "$@"; }
$python -c 'from polyhead.models.native.build import ARM; [print(*flags) for flags in ARM.values()]' >"$here/flags"
while read -r flags; do  # the sampler's test is a program
  # shellcheck disable=SC2086
  $compiler -std=c++20 -O1 -pthread $flags -Imodels/native/src -o "$here/selecting" tests/support/selecting.cpp
  emulate "$here/selecting" 2
done <"$here/flags"
cd "$here/tree"
[ $# -gt 0 ] || set -- tests/models/native --ignore tests/models/native/test_build.py \
  --ignore tests/models/native/test_sanitized.py --ignore tests/models/native/test_sample.py
OMP_NUM_THREADS=1 PYTHONPATH=$here/tree:$here/site emulate "$here/system/usr/bin/python$version" \
  -m pytest -q -p no:cacheprovider -o addopts= --timeout 3600 "$@"
