#!/bin/bash
# Makes the base image from Debian packages, for machines that reach a package mirror but no image registry.
#   deploy/base.sh NAME      needs root, debootstrap and buildah; DEBIAN names the release (its Python must be >= 3.11),
#                            MIRROR the address of a package mirror (debootstrap has a default)
# Files that a server never opens are removed: manuals, translations, package lists.  Licences stay.
set -euo pipefail
name=${1:?usage: deploy/base.sh NAME}
release=${DEBIAN:-bookworm}
root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root"' EXIT  # debootstrap may leave /proc mounted in it

debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$release" "$root" ${MIRROR:-}

find "$root/usr/share/doc" ! -type d ! -name copyright -delete
rm -rf "$root"/usr/share/{man,info,locale,lintian} "$root"/var/cache/apt "$root"/var/lib/apt/lists "$root"/var/log/*
mkdir -p "$root"/var/lib/apt/lists/partial

container=$(buildah from scratch)
buildah add --quiet "$container" "$root" / >/dev/null
buildah commit --quiet --rm "$container" "$name"
