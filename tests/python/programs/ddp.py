# SPDX-License-Identifier: Apache-2.0
"""Trains a small network with DistributedDataParallel.

usage: torchrun --nproc-per-node 2 ddp.py BACKEND FOLDER; each rank saves what it ends with to FOLDER.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

backend, folder = sys.argv[1:]
dist.init_process_group(backend)
rank = dist.get_rank()
torch.manual_seed(rank)  # DDP's constructor gives all ranks the first one's parameters
net = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 32), nn.Tanh(), nn.Linear(32, 10)
)
model = DistributedDataParallel(net, bucket_cap_mb=0.01)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
losses = []


def backward(step):
    inputs = torch.randn(8, 1, 8, 8)
    loss = nn.functional.cross_entropy(model(inputs), torch.randint(10, (8,)))
    loss.backward()
    losses.append(loss.detach())


for step in range(6):
    optimizer.zero_grad()
    if step % 2:
        with model.no_sync():
            backward(step)
    backward(step)
    optimizer.step()
mean = torch.stack(losses).mean()
dist.all_reduce(mean)
torch.save({**net.state_dict(), "losses": torch.stack(losses), "mean": mean}, f"{folder}/{rank}.pt")
dist.destroy_process_group()
