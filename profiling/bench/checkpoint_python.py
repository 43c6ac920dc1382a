# SPDX-License-Identifier: Apache-2.0
"""The peer of checkpoint_bench: the same values with torch.distributed.checkpoint.

usage: checkpoint_python.py plain|sharded MIB FOLDER, started with RANK, … as torchrun sets them. Rank 0 prints names and times
in seconds. "sharded": the model is under fully_shard (FSDP2).
"""

import os
import shutil
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH = 1024

setting, mib, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()


def show(what, seconds):
    if rank == 0:
        print(what, f"{seconds:.9f}", flush=True)


def make_net(size):
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, size // 12))]
    return torch.nn.Sequential(*layers)


net = make_net(mib)
if setting == "sharded":
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
optimizer = torch.optim.Adam(net.parameters())
for parameter in net.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
optimizer.zero_grad()
small = make_net(24)
small_optimizer = torch.optim.SGD(small.parameters(), lr=0.01)
inputs = torch.randn(32, WIDTH)


def step():
    start = time.monotonic()
    small_optimizer.zero_grad()
    small(inputs).square().mean().backward()
    small_optimizer.step()
    return time.monotonic() - start


def state():
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


for _ in range(20):
    step()
for _ in range(20):
    show("step", step())
for i in range(3):
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    start = time.monotonic()
    saving = dcp.async_save(state(), storage_writer=dcp.FileSystemWriter(folder))
    show("stand-still" if i else "first stand-still", time.monotonic() - start)
    if i < 2:
        saving.result()
    if i == 1:
        show("write", time.monotonic() - start)
    while not saving.done():
        show("step while writing", step())
    saving.result()
if rank == 0:
    for name in os.listdir(folder):
        file = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
dist.barrier()
start = time.monotonic()
loaded = state()
dcp.load(loaded, storage_reader=dcp.FileSystemReader(folder))
dist.barrier()
show("load", time.monotonic() - start)
dist.destroy_process_group()
