#!/bin/bash
# Runs a program under Nsight Systems, with the options that show Weft: its NVTX ranges and NCCL's, CUDA, and the OS's waits.
# For all ranks of a machine in one report: put weft-run behind it.
#
#   profiling/nsight/nsys.sh run1 build/profile/bin/weft-run --nproc-per-node 2 build/profile/bin/digits --epochs 1
#   profiling/nsight/overlap.py run1.sqlite
set -euo pipefail
usage="usage: $0 NAME PROGRAM [args]   writes NAME.nsys-rep and NAME.sqlite"
case ${1-} in -h | --help) echo "$usage"; exit 0 ;; esac
if [ $# -lt 2 ]; then
  echo "$usage" >&2
  exit 2
fi
name=$1
shift
command -v nsys > /dev/null || { echo "no nsys: install Nsight Systems (cuda-nsight-systems-13-0)" >&2; exit 3; }
nsys profile --output "$name" --force-overwrite true --trace cuda,nvtx,osrt --cuda-graph-trace node --wait all \
  --sample none --cpuctxsw none "$@"
nsys export --type sqlite --force-overwrite true --output "$name.sqlite" "$name.nsys-rep"
