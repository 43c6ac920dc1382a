#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The digits under Slurm: one task a rank. Weft's env:// reads SLURM_PROCID and SLURM_NTASKS by itself.
#
#   sbatch --nodes=2 --ntasks-per-node=2 docker/slurm.sh ./build/dev/bin/digits --epochs 1
#
#SBATCH --job-name=weft-digits
#SBATCH --output=weft-%j.out
set -euo pipefail
if [ $# -eq 0 ]; then
  echo "usage: sbatch --nodes=N --ntasks-per-node=R $0 PROGRAM [args]" >&2
  exit 2
fi
# The first node hosts the store; the port depends on the job, so that two jobs of one node do not meet.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${nodes%%$'\n'*} MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
ulimit -l unlimited 2>/dev/null || echo "memlock is limited to $(ulimit -l) KiB; RDMA may need more" >&2
exec srun --kill-on-bad-exit=1 "$@"
