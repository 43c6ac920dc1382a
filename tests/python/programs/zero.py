# SPDX-License-Identifier: Apache-2.0
"""Trains with DistributedDataParallel and ZeroRedundancyOptimizer.

usage: torchrun --nproc-per-node 2 zero.py BACKEND FOLDER; each rank saves what it ends with to FOLDER.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

backend, folder = sys.argv[1:]
dist.init_process_group(backend)
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4))
model = DistributedDataParallel(net)
optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
torch.manual_seed(1 + rank)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 20)).square().mean().backward()
    optimizer.step()
optimizer.consolidate_state_dict(to=0)
moments = {}
if rank == 0:
    for number, one in optimizer.state_dict()["state"].items():
        moments.update({f"{number} {key}": torch.as_tensor(value) for key, value in one.items()})
torch.save({**net.state_dict(), **moments}, f"{folder}/{rank}.pt")
dist.destroy_process_group()
