#!/bin/bash
# Puts prometheus and promtool for the tests into a folder: those of Debian's package, unpacked, not installed.
#   deploy/tools.sh FOLDER        fetches nothing if both are on the PATH
# Needs no root and changes nothing outside of the folder: apt gets its own state, lists and cache.
set -euo pipefail
folder=${1:?usage: deploy/tools.sh FOLDER}

if command -v prometheus >/dev/null && command -v promtool >/dev/null; then exit; fi
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || { echo "deploy/tools.sh: apt is not here" >&2; exit 1; }

own=$(mktemp -d)
trap 'rm -rf "$own"' EXIT
mkdir -p "$own/lists/partial" "$own/cache/archives/partial"
apt=(apt-get -qq -o "Dir::State=$own" -o "Dir::State::lists=$own/lists" -o "Dir::Cache=$own/cache"
  -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::Retries=3 -o Acquire::http::Timeout=30)

"${apt[@]}" update || true  # a source that fails need not be the one that has the package
(cd "$own" && "${apt[@]}" download prometheus)
dpkg-deb --extract "$own"/prometheus_*.deb "$own/files"
mkdir -p "$folder"
mv "$own"/files/usr/bin/prom* "$folder"
