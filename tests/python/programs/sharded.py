# SPDX-License-Identifier: Apache-2.0
"""Trains blocks with fully_shard (FSDP2) and AdamW, clipping gradients by the norm over all shards.

usage: torchrun --nproc-per-node 2 sharded.py BACKEND FOLDER; each rank saves what it ends with to FOLDER.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

backend, folder = sys.argv[1:]
dist.init_process_group(backend)
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(
    *(nn.Sequential(nn.LayerNorm(33), nn.Linear(33, 33), nn.GELU()) for _ in range(3)), nn.Linear(33, 5)
)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for block in net[:3]:
    fully_shard(block, mesh=mesh)
fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
torch.manual_seed(1 + rank)
norms = []
for _ in range(4):
    optimizer.zero_grad()
    net(torch.randn(4, 33)).square().mean().backward()
    norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5).full_tensor().detach())
    optimizer.step()
whole = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
shards = {f"shard {name}": value.to_local() for name, value in net.state_dict().items()}
torch.save({**whole, **shards, "norms": torch.stack(norms)}, f"{folder}/{rank}.pt")
dist.destroy_process_group()
