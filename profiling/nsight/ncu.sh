#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs a program under Nsight Compute and prints, for each of Weft's kernels, the share of the memory's bandwidth it reached.
#
#   profiling/nsight/ncu.sh build/profile/bin/kernels_bench --runs 1
set -euo pipefail
usage="usage: $0 PROGRAM [args]

Runs PROGRAM under ncu, which measures the first 50 launches of Weft's kernels, and prints a line for each kernel (kernels.py): how
often it was launched, the median of its time, the bytes of device memory that it moved, and the share of the memory's bandwidth
that it reached. \$NCU_CSV, if set, names a file for ncu's own figures. Ends with PROGRAM's exit code."
case ${1-} in -h | --help) echo "$usage"; exit 0 ;; esac
if [ $# -lt 1 ]; then
  echo "$usage" >&2
  exit 2
fi
here=$(dirname "$(readlink -f "$0")")
command -v ncu > /dev/null || { echo "no ncu: install Nsight Compute (cuda-nsight-compute-13-0)" >&2; exit 3; }
if [ -n "${NCU_CSV-}" ]; then
  csv=$NCU_CSV
else
  csv=$(mktemp)
  trap 'rm -f "$csv"' EXIT
fi
code=0
ncu --target-processes all --kernel-name-base demangled --kernel-name 'regex:weft' --launch-count 50 --print-units base \
  --metrics gpu__time_duration.sum,dram__bytes.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed --csv --log-file "$csv" "$@" || code=$?
"$here/kernels.py" "$csv" || code=$((code != 0 ? code : 1))
exit $code
