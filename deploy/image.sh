#!/bin/bash
# Builds the container image with docker if its engine is running, otherwise with buildah.
#   NAME=polyhead  VARIANT=cpu  TORCH_INDEX=  BASE=  EXTRAS=hub,otel     deploy/image.sh
# BASE is the Dockerfile's, by its digest, unless another is given.
# VARIANT=gpu has torch with CUDA; TORCH_INDEX is explained in the Dockerfile.
# With buildah and no BASE given, the base is made from Debian packages (deploy/base.sh): no image registry is needed.
# If buildah cannot mount overlays, STORAGE_DRIVER=vfs copies the layers.
# The pip configuration of this machine is passed on as a build secret; it is in no layer.
set -euo pipefail
cd "$(dirname "$0")/.."
name=${NAME:-polyhead}

secret=$(mktemp)
trap 'rm -f "$secret"' EXIT
{
  echo '[global]'
  # Lines such as  global.cert='/a/b'  and  :env:.find-links='/c d' ; the environment comes first and has precedence.
  python3 -m pip config list 2>/dev/null | sed -n "s/^[^.]*\.\([a-z-]*\)='\(.*\)'\$/\1 = \2/p" | awk '!seen[$1]++' || true
} >"$secret"

arguments=(
  --tag "$name"
  --secret "id=pip,src=$secret"
  # No build arguments: buildah would use the cached layer of another revision for this one.
  --label "org.opencontainers.image.version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)"
  --label "org.opencontainers.image.revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)"
)
for option in VARIANT TORCH_INDEX BASE RUNTIME EXTRAS; do
  [ -z "${!option:-}" ] || arguments+=(--build-arg "$option=${!option}")
done

if docker info >/dev/null 2>&1; then
  docker build "${arguments[@]}" .
  exit
fi

command -v buildah >/dev/null || { echo "deploy/image.sh needs a docker engine or buildah; neither is here" >&2; exit 1; }
# This way a build needs no user namespace, so it also works inside a container.
export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}
if [ -z "${BASE:-}" ]; then
  base=localhost/polyhead-base
  buildah inspect --type image "$base" >/dev/null 2>&1 || deploy/base.sh "$base"
  arguments+=(--build-arg "BASE=$base" --pull-never)
fi
# Files and folders that the pip configuration names must be visible to the build under the same paths; a local index
# (file:/...) links to packages beside itself, so there it is the folder above.
for path in $(grep -oE '(file:/*)?/[^ =]+' "$secret" | sort -u); do
  case $path in file:*) path=$(dirname "/${path#file:*/}" | sed 's,//*,/,') ;; esac
  [ ! -e "$path" ] || arguments+=(--volume "$path:$path:ro")
done
# The docker format keeps HEALTHCHECK, which the OCI format has no place for.
buildah build --layers --format docker "${arguments[@]}" .
