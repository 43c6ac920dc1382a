# SPDX-License-Identifier: Apache-2.0
"""./dev bench python measures both backends and writes rows as the other benches do."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "profiling" / "bench" / "python" / "python_bench.py"


class Bench(unittest.TestCase):
    def run_bench(self, *arguments, **variables):
        return subprocess.run(
            [sys.executable, BENCH, *arguments],
            capture_output=True, text=True, timeout=120, env={**os.environ, **variables},
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

    def test_cpp_splits_the_overhead_of_python(self):
        with tempfile.TemporaryDirectory() as folder:
            # In place of collectives_bench, which the everyday build does not have.
            program, file = Path(folder) / "program", Path(folder) / "rows.json"
            program.write_text('#!/bin/sh\n[ "$RANK" != 0 ] || echo "4 0.000001 0.000002 0.000002"\n')
            program.chmod(0o755)
            done = self.run_bench(
                "--case", "all_reduce 2 ranks 4", "--runs", "1", "--seconds", "0.05", "--cpp",
                "--json", str(file), WEFT_BENCH_COLLECTIVES=str(program),
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            rows = [json.loads(line) for line in file.read_text().splitlines()]
        times = {row["peer"]: row["p50"] for row in rows if row["metric"] == "time"}
        self.assertEqual(set(times), {"weft", "gloo", "PyTorch alone", "weft C++"})
        self.assertAlmostEqual(times["weft C++"], 2)
        over = {row["metric"]: row["p50"] for row in rows if row["metric"] != "time"}
        self.assertAlmostEqual(over["over C++"], times["weft"] - 2)
        self.assertAlmostEqual(
            over["over C++ and PyTorch"], times["weft"] - 2 - times["PyTorch alone"]
        )

    def test_unknown_case_is_an_error(self):
        done = self.run_bench("--case", "nothing")
        self.assertEqual(done.returncode, 1)
        self.assertIn("no case's name contains 'nothing'", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
