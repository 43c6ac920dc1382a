# SPDX-License-Identifier: Apache-2.0
"""Measures torch.distributed's calls and training steps over "weft" and over "gloo", in turns.

usage: ./dev bench python [--json FILE] [--case TEXT] [--runs N] [--ranks 2,4] [--seconds S] [--cpp]

Rank r is pinned to core r modulo the number of cores, with one compute thread, and holds groups of
both backends. Each round measures one after the other. The number in a case's name is the bytes of
the tensor that a rank gives; "send and recv" is a message there and back. Rows give rank 0's median
and 99th percentile. Training steps are those of ddp_python.py and fsdp_python.py; "exposed" is the
step's time without that of the same model alone. --cpp measures beside them the same calls of the
C++ library, by the program collectives_bench, and those of PyTorch's backend "fake", which moves
nothing: what torch.distributed itself takes in front of a backend. "over C++" is Python's time
without C++'s, and "over C++ and PyTorch" the part of it that is Weft's.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = [4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
CALLS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send and recv"]
IN_CPP = ["all_reduce", "all_gather", "broadcast"]
# Batch, steps of a round.
RUNS = {"small": (64, 60), "large": (32, 6)}
STEPS_OF_BLOCKS = 4
TRAINING = ["ddp small", "ddp large", "fully_shard blocks"]


def quantile(values, share):
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]


# The part that each rank runs.


class Rank:
    """A worker: reads cases from its environment and gives rank 0's times as lines of JSON."""

    def __init__(self, options):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        torch.set_num_threads(1)
        dist.init_process_group("weft")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.groups = {"weft": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
        self.fake = None
        if options.cpp:
            import torch.testing._internal.distributed.fake_pg  # registers it

            self.fake = dist.new_group(backend="fake")
        self.runs, self.seconds = options.runs, options.seconds

    def tell(self, case, peer, size, times):
        if self.rank == 0:
            row = {"case": case, "peer": peer, "bytes": size, "times": times}
            print(json.dumps(row), flush=True)

    def call(self, name, size, group):
        """A function that makes the call once."""
        torch, dist, ranks = self.torch, self.dist, self.size
        count = max(size // 4, 1)
        if name in ("reduce_scatter", "all_to_all"):
            count = -(-count // ranks) * ranks
        given = torch.zeros(count)
        if name == "all_reduce":
            return lambda: dist.all_reduce(given, group=group)
        if name == "broadcast":
            return lambda: dist.broadcast(given, 0, group=group)
        if name == "all_gather":
            whole = torch.zeros(count * ranks)
            return lambda: dist.all_gather_into_tensor(whole, given, group=group)
        if name == "reduce_scatter":
            part = torch.zeros(count // ranks)
            return lambda: dist.reduce_scatter_tensor(part, given, group=group)
        if name == "all_to_all":
            taken = torch.zeros(count)
            return lambda: dist.all_to_all_single(taken, given, group=group)
        return self.there_and_back(given, group)

    def there_and_back(self, tensor, group):
        dist, rank = self.dist, self.rank
        # Rank 0 and the last one; the others have nothing to do.
        other = {0: self.size - 1, self.size - 1: 0}.get(rank)

        def call():
            if other is None:
                return
            for sender in (0, self.size - 1):
                if rank == sender:
                    dist.send(tensor, other, group=group)
                else:
                    dist.recv(tensor, other, group=group)

        return call

    def agree(self, number):
        value = self.torch.tensor([number])
        self.dist.broadcast(value, 0)
        return int(value)

    def time_calls(self, call, count):
        for _ in range(max(count // 5, 1)):
            call()
        times = []
        clock = time.perf_counter
        for _ in range(count):
            begin = clock()
            call()
            times.append(clock() - begin)
        return times

    def measure_calls(self, name, sizes):
        for size in sizes:
            calls, counts, times = {}, {}, {}
            groups = {**self.groups, "PyTorch alone": self.fake} if self.fake else self.groups
            for peer, group in groups.items():
                calls[peer] = call = self.call(name, size, group)
                begin = time.perf_counter()
                for _ in range(3):
                    call()
                one = (time.perf_counter() - begin) / 3
                most = max(3, min(5000, int(self.seconds / self.runs / max(one, 1e-7))))
                counts[peer], times[peer] = self.agree(most), []
            for _ in range(self.runs):
                for peer, call in calls.items():
                    self.dist.barrier()
                    times[peer] += self.time_calls(call, counts[peer])
            for peer, values in times.items():
                self.tell(f"{name} {self.size} ranks {size}", peer, size, values)

    def step_of_ddp(self, name, group):
        import models
        from torch.nn.parallel import DistributedDataParallel

        self.torch.manual_seed(0)
        net = models.mlp({"small": models.SMALL, "large": models.LARGE}[name])
        model = net
        if group is not None:
            model = DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=True)
        return models.classifying_step(net, model, RUNS[name][0]), size_of(net)

    def step_of_blocks(self, group):
        import models
        from torch.distributed.device_mesh import DeviceMesh

        self.torch.manual_seed(0)
        net, units, inputs = models.blocks()
        size = size_of(net)  # before each rank keeps its part only
        if group is not None:
            models.shard(net, units, DeviceMesh.from_group(group, "cpu"))
        return models.squares_step(net, inputs), size

    def measure_training(self, name):
        kind, model = name.split()
        steps, times, size = {}, {}, 0
        for peer, group in [*self.groups.items(), ("alone", None)]:
            if kind == "ddp":
                steps[peer], size = self.step_of_ddp(model, group)
            else:
                steps[peer], size = self.step_of_blocks(group)
            times[peer] = []
            for _ in range(2):
                steps[peer]()
        count = RUNS[model][1] if kind == "ddp" else STEPS_OF_BLOCKS
        for _ in range(self.runs):
            for peer, step in steps.items():
                self.dist.barrier()
                times[peer] += self.time_calls(step, count)
        for peer, values in times.items():
            self.tell(f"{name} {self.size} ranks step", peer, size, values)


def size_of(net):
    return sum(one.nbytes for one in net.parameters())


def work(options):
    rank = Rank(options)
    for case in json.loads(os.environ["WEFT_BENCH_CASES"]):
        if case["what"] in TRAINING:
            rank.measure_training(case["what"])
        else:
            rank.measure_calls(case["what"], case["sizes"])
    rank.dist.barrier()
    rank.dist.destroy_process_group()


# The part that starts the ranks and reports.


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def run_ranks(command, ranks, more=()):
    """The output of rank 0; exits if a rank fails."""
    port, processes = free_port(), []
    with tempfile.TemporaryFile("w+") as errors:
        for rank in range(ranks):
            environment = {
                **os.environ, **dict(more), "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            }
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            processes.append(
                subprocess.Popen(command, env=environment, stdout=out, stderr=errors, text=True)
            )
        output = processes[0].communicate()[0]
        codes = [process.wait() for process in processes]
        if any(codes):
            errors.seek(0)
            sys.exit(f"python_bench: ranks ended with {codes}:\n{errors.read()[-4000:]}")
    return output


class Report:
    """The table and the rows of JSON, as those of the other benches (report.h)."""

    def __init__(self, file):
        self._file = Path(file).open("w") if file else None
        self._first = {}
        print(f"{'case':42} {'peer':16} {'MiB':>9}  {'p50':>10} {'p99':>10} unit")

    def add(self, case, peer, size, values, unit, metric="time"):
        factor = {"us": 1e6, "ms": 1e3}[unit]
        p50, p99 = (factor * quantile(values, share) for share in (0.5, 0.99))
        self.add_figures(case, peer, size, p50, p99, len(values), unit, metric)

    def add_figures(self, case, peer, size, p50, p99, runs, unit, metric):
        row = {"bench": "python", "case": case, "peer": peer, "bytes": size, "metric": metric,
               "unit": unit, "p50": p50, "p99": p99, "runs": runs}
        first = self._first.setdefault((case, metric), row)
        ratio = f"  {first['peer']} is {p50 / first['p50']:.2f} x" if first is not row else ""
        print(f"{case:42} {peer:16} {size / 2**20:9.2f}  {p50:10.3f} {p99:10.3f} {unit:5}{ratio}", flush=True)
        if self._file:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()


def report_training(report, rows):
    step = {row["peer"]: row for row in rows}
    for row in rows:
        report.add(row["case"], row["peer"], row["bytes"], row["times"], "ms")
    case = rows[0]["case"].removesuffix("step") + "exposed communication"
    alone = quantile(step["alone"]["times"], 0.5)
    for peer in ("weft", "gloo"):
        values = [1e3 * (quantile(step[peer]["times"], share) - alone) for share in (0.5, 0.99)]
        report.add_figures(case, peer, step[peer]["bytes"], *values, len(step[peer]["times"]),
                           "ms", "step - step alone")


def cpp_times(program, name, ranks):
    """{bytes: times in seconds} of the same calls of the C++ library."""
    output = run_ranks([str(program), "--worker", "shm", "group", name], ranks)
    lines = (line.split() for line in output.splitlines())
    return {int(line[0]): [float(one) for one in line[1:]] for line in lines if line}


def report_calls(report, rows, beside):
    for size in sorted({row["bytes"] for row in rows}):
        times = {}
        for row in (row for row in rows if row["bytes"] == size):
            report.add(row["case"], row["peer"], size, row["times"], "us")
            times[row["peer"]], case = row["times"], row["case"]
        if size not in beside:
            continue
        report.add(case, "weft C++", size, beside[size], "us")
        median = {peer: 1e6 * quantile(values, 0.5) for peer, values in times.items()}
        over = median["weft"] - 1e6 * quantile(beside[size], 0.5)
        own = over - median["PyTorch alone"]
        for metric, figure in (("over C++", over), ("over C++ and PyTorch", own)):
            report.add_figures(case, "weft", size, figure, figure, len(times["weft"]), "us", metric)


def cases_of(options, ranks):
    chosen = []
    for name in CALLS:
        sizes = [size for size in SIZES if options.case in f"{name} {ranks} ranks {size}"]
        if sizes:
            chosen.append({"what": name, "sizes": sizes})
    for name in TRAINING:
        if options.case in f"{name} {ranks} ranks step":
            chosen.append({"what": name})
    return chosen


def parse():
    parser = argparse.ArgumentParser(
        prog="./dev bench python", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS,
    )
    parser.add_argument("--json")
    parser.add_argument("--case", default="")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ranks", type=lambda text: [int(one) for one in text.split(",")], default=[2])
    parser.add_argument("--seconds", type=float, default=1.5, help="for each size and peer")
    parser.add_argument("--cpp", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = parse()
    if options.worker:
        return work(options)
    program = Path(os.environ.get("WEFT_BENCH_COLLECTIVES", ""))
    if options.cpp and not program.is_file():
        sys.exit("--cpp: WEFT_BENCH_COLLECTIVES must name the program collectives_bench")
    report, any_case = Report(options.json), False
    for ranks in options.ranks:
        for case in cases_of(options, ranks):
            any_case = True
            command = [sys.executable, __file__, "--worker", "--runs", str(options.runs),
                       "--seconds", str(options.seconds), *(["--cpp"] if options.cpp else [])]
            output = run_ranks(command, ranks, {"WEFT_BENCH_CASES": json.dumps([case])})
            rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
            if case["what"] in TRAINING:
                report_training(report, rows)
                continue
            beside = {}
            if options.cpp and case["what"] in IN_CPP:
                beside = cpp_times(program, case["what"], ranks)
            report_calls(report, rows, beside)
    if not any_case:
        sys.exit(f"python_bench: --case: no case's name contains '{options.case}'")
    return 0


if __name__ == "__main__":
    sys.exit(main())
