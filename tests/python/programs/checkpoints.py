# SPDX-License-Identifier: Apache-2.0
"""Saves a sharded model and its optimizer with torch.distributed.checkpoint, at once and behind the
training, and goes on from what it loads.

usage: torchrun --nproc-per-node 2 checkpoints.py BACKEND FOLDER; each rank saves what it ends with to FOLDER.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

backend, folder = sys.argv[1:]
dist.init_process_group(backend)
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


def model():
    net = nn.Sequential(nn.Linear(17, 30), nn.ReLU(), nn.Linear(30, 3))
    fully_shard(net, mesh=mesh)
    return net, torch.optim.Adam(net.parameters(), lr=0.01)


def train(net, optimizer, steps):
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        net(torch.randn(4, 17)).square().mean().backward()
        optimizer.step()


def state(net, optimizer):
    parameters, optimizer_state = get_state_dict(net, optimizer)
    return {"model": parameters, "optimizer": optimizer_state}


torch.manual_seed(0)
net, optimizer = model()
train(net, optimizer, 2)
dcp.save(state(net, optimizer), checkpoint_id=f"{folder}/first")
saving = dcp.async_save(
    state(net, optimizer),
    checkpoint_id=f"{folder}/second",
    process_group=dist.new_group(backend=backend),  # since it meets the others in a thread of its own
)
train(net, optimizer, 2)  # changes nothing of what is being saved
saving.result()

results = {}
for name in ("first", "second"):
    torch.manual_seed(7)
    net, optimizer = model()
    loaded = state(net, optimizer)
    dcp.load(loaded, checkpoint_id=f"{folder}/{name}")
    set_state_dict(
        net, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    train(net, optimizer, 2)
    results.update({f"{name} {key}": value.full_tensor() for key, value in net.state_dict().items()})
for key in net.state_dict():
    assert torch.equal(results[f"first {key}"], results[f"second {key}"]), key
torch.save(results, f"{folder}/{rank}.pt")
dist.destroy_process_group()
