# SPDX-License-Identifier: Apache-2.0
"""The peer of rpc_bench: the same calls by Python's torch.distributed.rpc, on the same torch.

usage: rpc_python.py KIND BYTES CALLS SAMPLES AT_ONCE; KIND is number, tensor or the name of a chain. Started with RANK,
LOCAL_RANK, … as torchrun sets them. Rank 0 prints the seconds that each call took, one value a sample.
"""

import os
import sys
import time

rank = int(os.environ["RANK"])
os.sched_setaffinity(0, {rank % os.cpu_count()})

import torch
import torch.distributed.rpc as rpc

kind = sys.argv[1]
size, calls, samples, at_once = (int(text) for text in sys.argv[2:6])


def add(a, b):
    return a + b


def give_back(tensor):
    return tensor


def plus(held, more):
    return held.to_here() + more


def chain():
    """Eight calls, each with the reference that the call before has made; on one worker or on four."""
    workers = 1 if kind.endswith("one worker") else 4
    value = rpc.remote("worker1", add, (0, 1))
    for i in range(1, 8):
        value = rpc.remote(f"worker{1 + i % workers}", plus, (value, 1))
    assert value.to_here() == 8


torch.set_num_threads(1)
delayed = kind.startswith("delayed")
# Between hosts no other transport works; TensorPipe would try others, and wait.
options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"]) if delayed else None
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]), rpc_backend_options=options)
if rank == 0:
    is_number = kind == "number" or delayed
    function, arguments = (add, (1, 2)) if is_number else (give_back, (torch.zeros(size // 4),))
    for sample in range(-2, samples):
        start = time.monotonic()
        if "chain" in kind:
            chain()
        elif at_once == 1:
            for _ in range(calls):
                rpc.rpc_sync("worker1", function, arguments)
        else:
            waiting = []
            for _ in range(calls):
                if len(waiting) == at_once:
                    waiting.pop(0).wait()
                waiting.append(rpc.rpc_async("worker1", function, arguments))
            for call in waiting:
                call.wait()
        if sample >= 0:
            print(f"{(time.monotonic() - start) / calls:.9f}", end=" ", flush=True)
    print(flush=True)
rpc.shutdown()
