#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Makes the base image for docker_test.py's builds of the images of docker/, for machines without
# access to a registry: Debian 12 by debootstrap, in buildah's storage. Run it as root.
#
#   tests/docker/base_image.sh MIRROR && WEFT_TEST_IMAGE_BASE=localhost/weft-base ./dev test --cuda off -R Docker
#
# (docker_test.py describes the other settings of the builds.)
set -euo pipefail
usage="usage: $0 MIRROR [NAME]   MIRROR: where debootstrap finds Debian; NAME: of the image (weft-base)"
case ${1-} in -h | --help) echo "$usage"; exit 0 ;; esac
if [ $# -lt 1 ] || [ $# -gt 2 ]; then
  echo "$usage" >&2
  exit 2
fi
mirror=$1
name=${2-weft-base}
for program in debootstrap buildah; do
  command -v $program > /dev/null || { echo "no $program: install it (./dev setup --tests)" >&2; exit 3; }
done
buildah=(buildah --storage-driver vfs)
folder=$(mktemp -d)
container=
clean() {
  [ -z "$container" ] || "${buildah[@]}" rm "$container" > /dev/null
  rm -rf --one-file-system "$folder"
}
trap clean EXIT
debootstrap --variant=minbase bookworm "$folder/root" "$mirror"
# As an archive, which keeps the files' owners.
tar -C "$folder/root" --numeric-owner --exclude='./dev/*' --exclude='./proc/*' --exclude='./sys/*' --exclude='./var/cache/apt/archives/*.deb' \
  -cf "$folder/root.tar" .
container=$("${buildah[@]}" from scratch)
"${buildah[@]}" add "$container" "$folder/root.tar" / > /dev/null
"${buildah[@]}" config --cmd bash --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
"${buildah[@]}" commit "$container" "$name" > /dev/null
echo "made localhost/$name"
