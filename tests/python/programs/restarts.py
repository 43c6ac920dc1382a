# SPDX-License-Identifier: Apache-2.0
"""Trains on after torchrun has started its ranks again: rank 1 is killed in the first life.

usage: torchrun --nproc-per-node 2 --max-restarts 1 restarts.py BACKEND FOLDER; each rank saves what it ends with to FOLDER.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

backend, folder = sys.argv[1:]
dist.init_process_group(backend)
rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(0)
net = nn.Linear(9, 3)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
saved, begin = f"{folder}/training.pt", 0
if os.path.exists(saved):
    at = torch.load(saved)
    begin = at["step"]
    net.load_state_dict(at["model"])
for step in range(begin, 6):
    torch.manual_seed(10 * step + rank)
    optimizer.zero_grad()
    model(torch.randn(4, 9)).square().mean().backward()
    if life == 0 and step == 3 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    dist.barrier()
    if rank == 0:
        torch.save({"step": step + 1, "model": net.state_dict()}, saved + ".new")
        os.replace(saved + ".new", saved)
torch.save({**net.state_dict(), "life": torch.tensor(life), "begin": torch.tensor(begin)}, f"{folder}/{rank}.pt")
dist.destroy_process_group()
