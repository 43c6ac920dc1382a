#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants one violation of each kind in a copy of the folder structure and expects the checker to name it."""

import subprocess
import sys
import tempfile
from pathlib import Path

CHECKER = Path(__file__).parent / "layering.py"
CLEAN = {
    "base/error.h": "#include <string>\n",
    "cuda/stream.h": "#include <weft/base/error.h>\n",
    "transport/tcp/socket.h": "#include <weft/base/error.h>\n",
    "engine/group/group.h": "#include <weft/transport/communicator.h>\n#include <ATen/core/Tensor.h>\n",
    "engine/group/meeting.h": "namespace weft::group {\nclass Meeting;\nstruct Part {\n  struct Meeting {};\n};\n}\n",
    "engine/group/waits.cc": "namespace weft::group {\nnamespace {\nclass Part {};\n}\n}\n",
    "tests/a_test.cc": "#include <weft/weft.h>\n#include <weft/transport/tcp/socket.h>\n",
}
VIOLATIONS = {
    "base/fence.h": "#include <weft/cuda/stream.h>\n",
    "transport/shm/ring.h": "#include <weft/transport/tcp/socket.h>\n",
    "kernels/pack.cc": "#include <ATen/core/Tensor.h>\n",
    "transport/communicator.h": "#include <weft/transport/tcp/socket.h>\n",
    "engine/rpc/agent.h": "#include <weft/group.h>\n",
    "engine/group/group.cc": "#include <weft/engine/rpc/agent.h>\n",
    "cuda/event.h": '#include "base/error.h"\n',
    "engine/group/shares.h": "namespace weft {\nnamespace group {\nclass WEFT_API Part final : public Base {\n};\n}\n}\n",
}


def check(extra):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {**CLEAN, **extra}.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return subprocess.run([sys.executable, CHECKER, folder], capture_output=True, text=True)


clean = check({})
if clean.returncode != 0:
    sys.exit(f"a clean tree was refused:\n{clean.stdout}{clean.stderr}")
for name, text in VIOLATIONS.items():
    result = check({name: text})
    if result.returncode == 0 or name not in result.stdout:
        sys.exit(f"{name} with {text.strip()} was not found:\n{result.stdout}{result.stderr}")
print(f"{len(VIOLATIONS)} planted violations found")
