#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds Weft's library and programs with another compiler, and a user's program against the
# installed result; runs that program. No test runs this script, because it takes minutes.
#
#   tests/install/other_compiler.sh clang++-16
#   tests/install/other_compiler.sh g++ ROOT       in another system, as root: a folder that debootstrap made, such as
#     debootstrap --variant=minbase --include=g++,lld,ninja-build,libspdlog-dev,nlohmann-json3-dev,libcli11-dev,libmsgpack-cxx-dev,libssl-dev trixie ROOT MIRROR
#
# Uses the libtorch of ./dev setup. Without CUDA, because nvcc supports its own range of compilers.
set -euo pipefail
if [ $# -lt 1 ] || [ $# -gt 2 ]; then
  echo "usage: $0 COMPILER [ROOT]   COMPILER: such as clang++-16; ROOT: folder of a system that has it" >&2
  exit 2
fi
compiler=$1
root=${2-}
source=$(cd "$(dirname "$0")/../.." && pwd)
torch=$(echo "$source"/build/venv/lib/python3.*/site-packages/torch)
cmake=$(echo "$source"/build/venv/lib/python3.*/site-packages/cmake/data/bin/cmake)
[ -d "$torch" ] && [ -x "$cmake" ] || { echo "no libtorch or cmake under $source/build/venv: run ./dev setup" >&2; exit 3; }
work=$(mktemp -d "$root/tmp/weft-XXXXXX")
here=${work#"$root"}  # its path inside the other system
inside=()
clean() {
  [ -z "$root" ] || umount "$root$source" || true
  rm -rf --one-file-system "$work"
}
trap clean EXIT
if [ -n "$root" ]; then
  mkdir -p "$root$source"
  mount --bind "$source" "$root$source"
  inside=(chroot "$root")
else
  PATH=$PATH:$source/build/venv/bin  # its ninja
fi
"${inside[@]}" "$compiler" --version | head -n 1
step() { "${inside[@]}" "$@" > "$work/log" 2>&1 || { tail -n 40 "$work/log"; echo "$* failed" >&2; exit 1; }; }
step "$cmake" -G Ninja -S "$source" -B $here/weft "-DCMAKE_CXX_COMPILER=$compiler" -DCMAKE_BUILD_TYPE=Release "-DWEFT_TORCH_ROOT=$torch" \
  -DWEFT_CUDA=OFF -DWEFT_WARNINGS_AS_ERRORS=ON -DWEFT_BUILD_TESTS=OFF -DWEFT_BUILD_EXAMPLES=OFF -DWEFT_BUILD_BENCHES=OFF
step "$cmake" --build $here/weft --target installed
step "$cmake" --install $here/weft --prefix $here/prefix
step "$cmake" -G Ninja -S "$source/tests/install/project" -B $here/user "-DCMAKE_CXX_COMPILER=$compiler" -DCMAKE_PREFIX_PATH=$here/prefix
step "$cmake" --build $here/user
"${inside[@]}" $here/user/user
"${inside[@]}" $here/prefix/bin/weft-run --version
