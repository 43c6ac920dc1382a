# SPDX-License-Identifier: Apache-2.0
"""Reads a folder that save_async() wrote, by Python's safetensors and PyTorch's
HuggingFaceStorageReader, and writes folders that weft::checkpoint::load() reads.

python_exchange.py CHECKPOINT WHOLE SLICES; ends with 77 where Python's safetensors is missing.
"""

import glob
import json
import sys

try:
    import safetensors
    import safetensors.torch
except ImportError:
    print("Python's safetensors is not installed")
    sys.exit(77)

import torch
import torch.distributed.checkpoint as dcp

checkpoint, whole, slices = sys.argv[1:]

expected = {
    "model.first.weight": torch.arange(5 * 6, dtype=torch.float64).reshape(5, 6),
    "sharded.first.weight": torch.arange(5 * 6, dtype=torch.float64).reshape(5, 6),
    "large": torch.arange(800_000, dtype=torch.float32).reshape(400, 2_000),
    "bits": torch.tensor([True, False, True]),
    "epoch": torch.tensor(7, dtype=torch.int64),
    "half": torch.full((2, 2), 1.5, dtype=torch.bfloat16),
}


def check(name, tensor):
    if tensor.dtype != expected[name].dtype or not torch.equal(tensor, expected[name]):
        sys.exit(f"{name} is {tensor}, not {expected[name]}")


# The files alone: every slice is a part of the tensor at its offsets.
seen = dict.fromkeys(expected, 0)
for file in glob.glob(checkpoint + "/*.safetensors"):
    with safetensors.safe_open(file, framework="pt") as opened:
        sharding = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
        for name in opened.keys():
            if name not in expected:
                continue
            tensor = opened.get_tensor(name)
            seen[name] += tensor.numel()
            offsets = sharding[name]["saved_offsets"]
            part = expected[name]
            for dimension, offset in enumerate(offsets):
                part = part.narrow(dimension, offset, tensor.shape[dimension])
            if not torch.equal(part, tensor):
                sys.exit(f"{name} at {offsets} of {file} is {tensor}, not {part}")
for name, elements in seen.items():
    if elements != expected[name].numel():
        sys.exit(f"{name} has {elements} elements in the files")

# PyTorch's reader.
state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(checkpoint), no_dist=True)
for name, tensor in state.items():
    check(name, tensor)

# PyTorch's writer.
dcp.save(expected, storage_writer=dcp.HuggingFaceStorageWriter(whole), no_dist=True)

# Slices as that writer's ranks write them, one tensor along its second dimension.
for rank in range(2):
    columns = expected["model.first.weight"][:, 3 * rank : 3 * rank + 3]
    own = {
        "model.first.weight": columns.contiguous(),
        "sharded.first.weight": columns.contiguous(),
        "large": expected["large"][200 * rank : 200 * rank + 200],
    }
    offsets = {
        "model.first.weight": {"saved_offsets": [0, 3 * rank]},
        "sharded.first.weight": {"saved_offsets": [0, 3 * rank]},
        "large": {"saved_offsets": [200 * rank, 0]},
    }
    if rank == 0:
        for name in ("bits", "epoch", "half"):
            own[name] = expected[name]
            offsets[name] = {"saved_offsets": [0] * expected[name].dim()}
    safetensors.torch.save_file(
        own,
        f"{slices}/shard-{rank:05}-model-00001-of-00001.safetensors",
        metadata={"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)},
    )
