# SPDX-License-Identifier: Apache-2.0
"""The models of the benches that are programs of Python, and their training steps.

ddp_bench and fsdp_bench train the same ones in C++. The importing program has set its cores and
threads: torch reads them when it is first imported.
"""

import torch
from torch import nn

SMALL, LARGE = (784, 512, 512, 10), (784, 4096, 4096, 1024, 10)
WIDTH, TOKENS, BLOCKS = 512, 32, 8


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, tokens, _ = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, tokens, 3, WIDTH // 64, 64)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def blocks():
    """(net, its units for fully_shard, inputs)"""
    net = nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.LayerNorm(WIDTH))
    return net, list(net[:BLOCKS]), torch.randn(4, TOKENS, WIDTH)


def mlp(widths, last_is_relu=False):
    layers = []
    for width, following in zip(widths, widths[1:]):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*(layers if last_is_relu else layers[:-1]))


def shard(net, units, mesh):
    # Not above: ddp_python.py measures how long a program takes to start.
    from torch.distributed.fsdp import fully_shard

    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(net, mesh=mesh)
    for unit, following in zip(units, units[1:]):
        unit.set_modules_to_forward_prefetch([following])


def classifying_step(net, model, batch):
    """A step of the MLP `net`; `model` is it, or DistributedDataParallel around it."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    inputs, labels = torch.randn(batch, net[0].in_features), torch.randint(10, (batch,))

    def step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def squares_step(net, inputs):
    """A step towards smaller outputs, for the models that are sharded."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)

    def step():
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()

    return step
