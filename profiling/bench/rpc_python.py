"""The peer of rpc_bench: the same calls by Python's torch.distributed.rpc, on the same torch.

usage: rpc_python.py number|tensor BYTES CALLS SAMPLES AT_ONCE, started with RANK, LOCAL_RANK, … as torchrun sets them. Rank 0
prints the seconds that each call took, one value a sample.
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


torch.set_num_threads(1)
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
if rank == 0:
    function, arguments = (add, (1, 2)) if kind == "number" else (give_back, (torch.zeros(size // 4),))
    for sample in range(-2, samples):
        start = time.monotonic()
        if at_once == 1:
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
