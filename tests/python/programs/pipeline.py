# SPDX-License-Identifier: Apache-2.0
"""Trains two stages of a network with torch.distributed.pipelining's Schedule1F1B.

usage: torchrun --nproc-per-node 2 pipeline.py BACKEND FOLDER; each rank saves what it ends with to FOLDER.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

backend, folder = sys.argv[1:]
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
part = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12))
stage = PipelineStage(part, rank, size, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(5)
losses = []
for _ in range(3):
    optimizer.zero_grad()
    inputs, target = torch.randn(16, 12), torch.randn(16, 12)
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=target, losses=losses)
    optimizer.step()
values = {"losses": torch.stack(losses).detach()} if losses else {}
torch.save({**part.state_dict(), **values}, f"{folder}/{rank}.pt")
dist.destroy_process_group()
