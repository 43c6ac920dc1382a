# SPDX-License-Identifier: Apache-2.0
"""Trains a network whose layers are split over a DeviceMesh by columns, rows and the sequence.

usage: torchrun --nproc-per-node 2 tensor_parallel.py BACKEND FOLDER; each rank saves what it ends with to FOLDER.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

backend, folder = sys.argv[1:]
dist.init_process_group(backend)
rank = dist.get_rank()
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
net = nn.Sequential(Block(), Block())
for block in net:
    parallelize_module(
        block,
        mesh,
        {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        },
    )
parallelize_module(
    net, mesh, PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
losses = []
for _ in range(4):
    optimizer.zero_grad()
    loss = net(torch.randn(2, 8, 16)).square().mean()
    loss.backward()
    losses.append(loss.detach())
    optimizer.step()
rows = distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(0)])
moved = rows.redistribute(mesh, [Shard(1)])
kept = {name: value.full_tensor().detach() for name, value in net.named_parameters()}
torch.save(
    {**kept, "losses": torch.stack(losses), "moved": moved.to_local(), "sum": rows.sum().full_tensor()},
    f"{folder}/{rank}.pt",
)
dist.destroy_process_group()
