# SPDX-License-Identifier: Apache-2.0
"""./dev bench python measures both backends and writes rows as the other benches do."""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "profiling" / "bench" / "python" / "python_bench.py"


class Bench(unittest.TestCase):
    def run_bench(self, *arguments):
        return subprocess.run(
            [sys.executable, BENCH, *arguments], capture_output=True, text=True, timeout=120
        )

    def test_both_backends_have_a_row(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.json"
            done = self.run_bench(
                "--case", "all_reduce 2 ranks 4", "--runs", "2", "--seconds", "0.05",
                "--json", str(file),
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            rows = [json.loads(line) for line in file.read_text().splitlines()]
        self.assertEqual([row["peer"] for row in rows], ["weft", "gloo"])
        for row in rows:
            self.assertEqual(
                list(row),
                ["bench", "case", "peer", "bytes", "metric", "unit", "p50", "p99", "runs"],
            )
            self.assertEqual((row["bench"], row["case"]), ("python", "all_reduce 2 ranks 4"))
            self.assertGreater(row["p50"], 0)
        self.assertIn("weft is", done.stdout)

    def test_unknown_case_is_an_error(self):
        done = self.run_bench("--case", "nothing")
        self.assertEqual(done.returncode, 1)
        self.assertIn("no case's name contains 'nothing'", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
