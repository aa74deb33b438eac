#!/bin/bash
# Builds what a release consists of into dist/, and prints what would be pushed; it pushes nothing.
#   deploy/release.sh [PART...]     parts: wheel aarch64 sdist sbom chart image; by default all of them
# `make release` installs the tools.  A part whose tool is missing is named and left out; the exit status is then 1.
# Wheels get the oldest manylinux tag that is true of them, which is that of this machine's C library.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
parts=("${@:-wheel aarch64 sdist sbom chart image}")
missing=0

grep -q "^## $version " CHANGELOG.md || { echo "CHANGELOG.md has no section for $version" >&2; exit 1; }
grep -qx "version: $version" deploy/helm/polyhead/Chart.yaml || { echo "the chart is not of version $version" >&2; exit 1; }
mkdir -p dist
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

needs() {  # PART PROGRAM...
  local part=$1 program
  shift
  for program in "$@"; do
    command -v "$program" >/dev/null || { echo "$part is left out: $program is not here" >&2; missing=1; return 1; }
  done
}

wheel() {  # PART MACHINE: a wheel with a compiled step, tagged manylinux
  POLYHEAD_NATIVE=$2 python3 -m build --wheel --outdir "$scratch/$1" .
  auditwheel repair --wheel-dir dist "$scratch/$1"/*.whl
}

for part in ${parts[*]}; do
  case $part in
    wheel) needs wheel auditwheel patchelf c++ && wheel wheel "" ;;
    aarch64) needs aarch64 auditwheel patchelf aarch64-linux-gnu-g++ && wheel aarch64 aarch64 ;;
    sdist) python3 -m build --sdist --outdir dist . ;;
    sbom)  # of what pip would install with the wheel, at this moment, without installing it
      if needs sbom cyclonedx-py; then
        python3 -m pip install --quiet --dry-run --ignore-installed --report "$scratch/report.json" -c constraints.txt .
        python3 - "$scratch" <<'PYTHON'
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
found = [each["metadata"] for each in json.loads((folder / "report.json").read_text())["install"]]
lines = sorted(f"{each['name']}=={each['version']}\n" for each in found if each["name"] != "polyhead")
(folder / "pinned.txt").write_text("".join(lines))
PYTHON
        cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
          --output-file "dist/polyhead-$version.cdx.json" "$scratch/pinned.txt"
      fi ;;
    chart) needs chart helm && helm package --destination dist deploy/helm/polyhead ;;
    image)
      if docker info >/dev/null 2>&1; then
        NAME=polyhead:$version deploy/image.sh && docker save "polyhead:$version" | gzip >"dist/polyhead-$version-image.tar.gz"
      elif needs image buildah; then
        NAME=polyhead:$version deploy/image.sh && buildah push "polyhead:$version" "oci-archive:dist/polyhead-$version-image.tar"
      fi ;;
    *) echo "no part is called $part" >&2; exit 1 ;;
  esac || missing=1
done

echo "Built from $(git rev-parse --short HEAD 2>/dev/null || echo unknown), version $version. Nothing is pushed; these would be:"
for file in dist/*"$version"*; do
  [ -e "$file" ] || continue
  case $file in
    *.whl | *.tar.gz) [[ $file = *-image* ]] && goal="an image registry" || goal="a package index" ;;
    *.tgz | *.tar) goal="an image registry" ;;
    *) goal="the page of the release" ;;
  esac
  printf '  %-70s %6s  to %s\n' "$file" "$(du -h "$file" | cut -f1)" "$goal"
done
exit "$missing"
