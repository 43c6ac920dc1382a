# SPDX-License-Identifier: Apache-2.0
"""One job over "weft" with a rank in Python and a rank in C++. Takes the folder of the programs."""

import shlex
import subprocess
import sys
import unittest
from pathlib import Path

PROGRAMS = Path(sys.argv.pop(1)) if len(sys.argv) > 1 and "/" in sys.argv[1] else None
PROGRAM = Path(__file__).resolve().parents[1] / "engine" / "launch" / "join_and_reduce.py"


def mixed(rank):
    """Runs Python as this rank, and C++ as the other."""
    python = shlex.join([sys.executable, str(PROGRAM), "weft"])
    cpp = shlex.join(["env", "WEFT_BACKEND=cpu:weft", str(PROGRAMS / "join_and_reduce")])
    script = f"if [ $RANK = {rank} ]; then exec {python}; else exec {cpp}; fi"
    command = [str(PROGRAMS / "weft-run"), "--no-prefix", "--nproc-per-node", "2", "sh", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@unittest.skipUnless(PROGRAMS, "takes the folder of the programs")
class Mixed(unittest.TestCase):
    def test_ranks_meet_wherever_the_store_is(self):
        for rank in [0, 1]:
            ended = mixed(rank)
            self.assertEqual(ended.returncode, 0, ended.stderr)
            self.assertEqual(
                sorted(ended.stdout.splitlines()), ["rank 0 of 2: sum 3, from the left 1", "rank 1 of 2: sum 3, from the left 0"]
            )


if __name__ == "__main__":
    unittest.main()
