# SPDX-License-Identifier: Apache-2.0
"""The peer of fsdp_bench: the same models and steps with Python's fully_shard (FSDP2), on the same torch.

usage: fsdp_python.py fsdp|alone blocks|mlp, started with RANK, LOCAL_RANK, … as torchrun sets them. Rank 0 prints the memory
in KiB before the model was made, the most during the timed steps, and the time of each timed step in seconds.
"""

import os
import sys
import time

os.sched_setaffinity(0, {int(os.environ["LOCAL_RANK"])})

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WARM_UP = 2
WIDTH, TOKENS = 512, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, WIDTH // 64, 64).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def value(kind):
    """A line of /proc/self/status in KiB."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(kind + ":"))


setting, name = sys.argv[1:3]
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
base = value("VmRSS")
if name == "blocks":
    net = nn.Sequential(*(Block() for _ in range(8)), nn.LayerNorm(WIDTH))
    units = list(net[:8])
    inputs, steps = torch.randn(4, TOKENS, WIDTH), 4
else:
    widths = (784, 4096, 4096, 1024, 10)
    layers = [nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)]
    net = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    units = layers
    inputs, steps = torch.randn(32, widths[0]), 8
if setting == "fsdp":
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(net, mesh=mesh)
    for unit, following in zip(units, units[1:], strict=False):
        unit.set_modules_to_forward_prefetch([following])
optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)


def step():
    optimizer.zero_grad()
    net(inputs).square().mean().backward()
    optimizer.step()


for _ in range(WARM_UP):
    step()
with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
    file.write("5")  # VmHWM begins anew
dist.barrier()
times = []
for _ in range(steps):
    start = time.monotonic()
    step()
    times.append(time.monotonic() - start)
if dist.get_rank() == 0:
    print(base, value("VmHWM"), *(f"{one:.9f}" for one in times), flush=True)
dist.barrier()
dist.destroy_process_group()
