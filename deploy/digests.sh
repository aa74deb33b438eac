#!/bin/bash
# Looks up the digests of the base images and writes them into the Dockerfile and compose.yaml.
#   deploy/digests.sh            after the version of an image was changed there, or to take a rebuilt image
#   deploy/digests.sh --check    writes nothing; exits with 1 if the registry has another digest for a version
# Needs a registry, and docker with buildx, or skopeo.  A digest is that of the index of all platforms.
set -euo pipefail
cd "$(dirname "$0")/.."
files=(Dockerfile compose.yaml)

digest() {
  if docker buildx version >/dev/null 2>&1; then
    docker buildx imagetools inspect "$1" --format '{{.Manifest.Digest}}'
  elif command -v skopeo >/dev/null; then
    skopeo inspect --raw "docker://$1" | sha256sum | sed 's/^\([0-9a-f]*\).*/sha256:\1/'
  else
    echo "deploy/digests.sh needs docker with buildx, or skopeo; neither is here" >&2
    return 1
  fi
}

changed=0
for pinned in $(grep -ohE '[a-z0-9./-]+:[A-Za-z0-9._-]+@sha256:[0-9a-f]{64}' "${files[@]}" | sort -u); do
  image=${pinned%@*}
  found=$(digest "$image")
  [[ $found =~ ^sha256:[0-9a-f]{64}$ ]] || { echo "$image: no digest, but: $found" >&2; exit 1; }
  [ "$pinned" != "$image@$found" ] || { echo "$image: as it was"; continue; }
  echo "$image: $found"
  changed=1
  [ "${1:-}" = --check ] || sed -i "s|$pinned|$image@$found|" "${files[@]}"
done
[ "${1:-}" != --check ] || exit "$changed"
