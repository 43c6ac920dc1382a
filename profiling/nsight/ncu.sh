#!/bin/bash
# Runs a program under Nsight Compute and prints, for each of Weft's kernels, the share of the memory's bandwidth it reached.
#
#   profiling/nsight/ncu.sh build/release/bin/kernels_bench --runs 1
set -euo pipefail
usage="usage: $0 PROGRAM [args]"
case ${1-} in -h | --help) echo "$usage"; exit 0 ;; esac
if [ $# -lt 1 ]; then
  echo "$usage" >&2
  exit 2
fi
command -v ncu > /dev/null || { echo "no ncu: install Nsight Compute (cuda-nsight-compute-13-0)" >&2; exit 3; }
exec ncu --target-processes all --kernel-name-base demangled --kernel-name 'regex:weft' --launch-count 50 \
  --metrics gpu__time_duration.sum,dram__bytes.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed --csv "$@"
