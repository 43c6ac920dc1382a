# SPDX-License-Identifier: Apache-2.0
"""The peer of ddp_bench: the same model and step with Python's DistributedDataParallel, on the same
torch.

usage: ddp_python.py ddp|alone small|large, started with RANK, LOCAL_RANK, … as torchrun sets them.
Rank 0 prints the time of the first step's end and of each timed step, in seconds.
"""

import os
import sys
import time

os.sched_setaffinity(0, {int(os.environ["LOCAL_RANK"])})

import models
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RUNS = {"small": (models.SMALL, 64, 20, 150), "large": (models.LARGE, 32, 4, 12)}

setting, name = sys.argv[1:3]
widths, batch, warm_up, steps = RUNS[name]
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group(os.environ["WEFT_BENCH_BACKEND"])
net = models.mlp(widths)
model = DistributedDataParallel(net, gradient_as_bucket_view=True) if setting == "ddp" else net
step = models.classifying_step(net, model, batch)
step()
first = time.monotonic()
for _ in range(warm_up):
    step()
dist.barrier()
times = []
for _ in range(steps):
    start = time.monotonic()
    step()
    times.append(time.monotonic() - start)
if dist.get_rank() == 0:
    print(f"{first:.6f}", *(f"{value:.9f}" for value in times), flush=True)
dist.destroy_process_group()
