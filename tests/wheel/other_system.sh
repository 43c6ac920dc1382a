#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Installs a wheel in another system and uses it as README.md says. No test runs this script, because it needs root and a folder
# that debootstrap made, such as
#   debootstrap --variant=minbase --include=g++,cmake,make,ca-certificates,libffi8,libssl3t64 trixie ROOT MIRROR
#
#   tests/wheel/other_system.sh ROOT WHEEL
#
# The system's Python may be of another release than the wheel's: the venv of ./dev setup, its Python and torch are shown there.
set -euo pipefail
if [ $# -ne 2 ]; then
  echo "usage: $0 ROOT WHEEL" >&2
  exit 2
fi
if [ -z "${WEFT_OWN_MOUNTS-}" ]; then
  WEFT_OWN_MOUNTS=1 exec unshare --mount "$0" "$(realpath "$1")" "$(realpath "$2")"
fi
root=$1
wheel=$2
source=$(cd "$(dirname "$0")/../.." && pwd)
python=$("$source/build/venv/bin/python" -c 'import sys; print(sys.base_prefix)')
mount --make-rprivate /
for folder in "$source" "$python"; do
  mkdir -p "$root$folder"
  mount --rbind "$folder" "$root$folder"
done
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
touch "$root/etc/hosts"
mount --bind /etc/hosts "$root/etc/hosts"  # debootstrap makes none, and jobs meet at localhost
work=$(mktemp -d "$root/tmp/weft-XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT
here=${work#"$root"}
mkdir "$work/wheel"
cp "$wheel" "$work/wheel"
chroot "$root" env -i HOME=/tmp PATH=/usr/bin:/bin LC_ALL=C.UTF-8 "$source/build/venv/bin/python" \
  "$source/tests/wheel/wheel_test.py" installed "$here"
