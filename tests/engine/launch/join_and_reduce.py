# SPDX-License-Identifier: Apache-2.0
"""The same as join_and_reduce.cc with Python's torch.distributed, for jobs that have ranks of both."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
total = torch.full((1,), rank + 1.0)
dist.all_reduce(total)
received = torch.full((1,), -1.0)
sending = dist.isend(torch.full((1,), float(rank)), (rank + 1) % size)
dist.recv(received, (rank + size - 1) % size)
sending.wait()
dist.barrier()
print(f"rank {rank} of {size}: sum {total.item():g}, from the left {received.item():g}", flush=True)
dist.destroy_process_group()
