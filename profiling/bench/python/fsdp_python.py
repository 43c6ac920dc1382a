# SPDX-License-Identifier: Apache-2.0
"""The peer of fsdp_bench: the same models and steps with Python's fully_shard (FSDP2), on the same
torch.

usage: fsdp_python.py fsdp|alone blocks|mlp, started with RANK, LOCAL_RANK, … as torchrun sets them.
Rank 0 prints the memory in KiB before the model was made, the most during the timed steps, and the
time of each timed step in seconds.
"""

import os
import sys
import time

os.sched_setaffinity(0, {int(os.environ["LOCAL_RANK"])})

import models
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WARM_UP = 2
STEPS = {"blocks": 4, "mlp": 8}


def value(kind):
    """A line of /proc/self/status in KiB."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(kind + ":"))


def wide_mlp():
    net = models.mlp(models.LARGE, last_is_relu=True)
    units = [layer for layer in net if isinstance(layer, nn.Linear)]
    return net, units, torch.randn(32, models.LARGE[0])


setting, name = sys.argv[1:3]
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
base = value("VmRSS")
net, units, inputs = models.blocks() if name == "blocks" else wide_mlp()
if setting == "fsdp":
    models.shard(net, units, init_device_mesh("cpu", (dist.get_world_size(),)))
step = models.squares_step(net, inputs)
for _ in range(WARM_UP):
    step()
with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
    file.write("5")  # VmHWM begins anew
dist.barrier()
times = []
for _ in range(STEPS[name]):
    start = time.monotonic()
    step()
    times.append(time.monotonic() - start)
if dist.get_rank() == 0:
    print(base, value("VmHWM"), *(f"{one:.9f}" for one in times), flush=True)
dist.barrier()
dist.destroy_process_group()
