#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs a program under Nsight Systems, with the options that show Weft's and NCCL's NVTX ranges, CUDA, and the waits of the OS; then
# prints how much of the communication was hidden. To get all ranks of a machine in one report, give weft-run as the program.
#
#   profiling/nsight/nsys.sh run1 build/profile/bin/weft-run --nproc-per-node 2 build/profile/bin/digits --epochs 1
set -euo pipefail
usage="usage: $0 NAME PROGRAM [args]

Runs PROGRAM under nsys, which writes NAME.nsys-rep (for Nsight Systems), exports that to NAME.sqlite, and prints, for each process
and GPU, how much of the communication compute has hidden (overlap.py NAME.sqlite prints it again; its --help defines the terms).
Ends with PROGRAM's exit code, or 1 if PROGRAM succeeded and there is nothing to show."
case ${1-} in -h | --help) echo "$usage"; exit 0 ;; esac
if [ $# -lt 2 ]; then
  echo "$usage" >&2
  exit 2
fi
here=$(dirname "$(readlink -f "$0")")
name=$1
shift
command -v nsys > /dev/null || { echo "no nsys: install Nsight Systems (cuda-nsight-systems-13-0)" >&2; exit 3; }
code=0
nsys profile --output "$name" --force-overwrite true --trace cuda,nvtx,osrt --cuda-graph-trace node --wait all \
  --sample none --cpuctxsw none "$@" || code=$?  # shows what was recorded before a failure, too
if nsys export --type sqlite --force-overwrite true --output "$name.sqlite" "$name.nsys-rep" && "$here/overlap.py" "$name.sqlite"; then
  exit $code
fi
exit $((code != 0 ? code : 1))
