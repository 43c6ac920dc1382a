# SPDX-License-Identifier: Apache-2.0
"""The peer of ddp_bench: the same model and step with Python's DistributedDataParallel, on the same torch.

usage: ddp_python.py ddp|alone small|large, started with RANK, LOCAL_RANK, … as torchrun sets them. Rank 0 prints the time of
the first step's end and of each timed step, in seconds.
"""

import os
import sys
import time

os.sched_setaffinity(0, {int(os.environ["LOCAL_RANK"])})

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

MODELS = {
    "small": ([784, 512, 512, 10], 64, 20, 150),
    "large": ([784, 4096, 4096, 1024, 10], 32, 4, 12),
}

setting, name = sys.argv[1:3]
widths, batch, warm_up, steps = MODELS[name]
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group(os.environ["WEFT_BENCH_BACKEND"])
layers = []
for i in range(len(widths) - 1):
    layers.append(torch.nn.Linear(widths[i], widths[i + 1]))
    if i + 2 < len(widths):
        layers.append(torch.nn.ReLU())
net = torch.nn.Sequential(*layers)
model = DistributedDataParallel(net, gradient_as_bucket_view=True) if setting == "ddp" else net
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
inputs = torch.randn(batch, widths[0])
labels = torch.randint(10, (batch,))


def step():
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


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
