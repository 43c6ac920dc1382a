# SPDX-License-Identifier: Apache-2.0
"""Commands that build a program and run it: train, run, bench, soak, fuzz."""

import argparse
import os

from .build import build, build_folder, program
from .checkout import ROOT, lock
from .console import Stop, run, say
from .environment import SANITIZERS, tools
from .libtorch import venv
from .options import BUILDING, add_nproc, parser_of
from .setup import install_system_packages


def command_train(arguments):
    parser = parser_of(
        "train",
        *BUILDING,
        epilog="Other options are passed to the program: ./dev run digits --help lists them.",
    )
    add_nproc(parser, "2")
    options, rest = parser.parse_known_args(arguments)
    readers = ["weft-timeline"] if "WEFT_TIMELINE" in os.environ else []  # reads the timeline
    build(options, ["digits", "weft-run", *readers])
    digits = program(options, "digits")
    launcher = [program(options, "weft-run"), "--no-prefix"]
    command = [*launcher, "--nproc-per-node", options.nproc_per_node, digits, *rest]
    os.execve(command[0], [str(part) for part in command], {**SANITIZERS, **os.environ})


def command_run(arguments):
    parser = parser_of("run", *BUILDING)
    add_nproc(parser, None)
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed to the program")
    options = parser.parse_args(arguments)
    build(options, [options.program, "weft-run"])
    command = [program(options, options.program), *options.arguments]
    if options.nproc_per_node:
        launcher = [program(options, "weft-run"), "--nproc-per-node", options.nproc_per_node]
        command = [*launcher, *command]
    os.execve(command[0], [str(part) for part in command], {**SANITIZERS, **os.environ})


def command_bench(arguments):
    files = (ROOT / "profiling" / "bench").glob("*_bench.cc")
    names = sorted([*(path.stem.removesuffix("_bench") for path in files), "python"])
    # Without its own --help, since `./dev bench NAME --help` is the bench's.
    parser = parser_of("bench", *BUILDING, preset="optimized", add_help=False)
    parser.add_argument(
        "--untraced",
        action="store_true",
        help="for the bench timeline: also measure digits built with WEFT_TRACE=OFF",
    )
    parser.add_argument("name", nargs="?")
    options, rest = parser.parse_known_args(arguments)
    if options.name is None:
        unknown = [word for word in rest if word not in ("-h", "--help")]
        if unknown:
            parser.error(f"name a bench in front of {unknown[0]}: {', '.join(names)}")
        print(
            f"{parser.format_usage()}benches: {', '.join(names)}\n"
            "Other options are passed to the bench: ./dev bench NAME --help lists them."
        )
        return
    if options.name not in names:
        raise Stop(f"no bench '{options.name}'; the benches are {', '.join(names)}")
    if options.untraced and (options.name != "timeline" or options.preset != "optimized"):
        raise Stop(
            "--untraced works only for ./dev bench timeline with the preset optimized: "
            "the preset untraced differs from that only in WEFT_TRACE"
        )
    if options.name == "python":
        return bench_python(options, rest)
    name = f"{options.name}_bench"
    with lock("setup"):
        # A bench reports the peers that it did not find.
        install_system_packages("apt-bench.txt", required=False)
    build(options, [name])
    path = program(options, name)
    environment = bench_environment()
    if options.untraced:
        untraced = argparse.Namespace(**{**vars(options), "preset": "untraced"})
        build(untraced, ["digits"])
        environment["WEFT_BENCH_UNTRACED"] = str(program(untraced, "digits"))
    os.execve(path, [str(path), *rest], environment)


def bench_environment():
    # The last variables silence warnings of Python peers, which would stand between the rows.
    return {
        **tools(),
        "WEFT_BENCH_PYTHON": str(venv() / "bin" / "python"),
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def bench_python(options, rest):
    """Runs the bench that is a program of Python, with the package of this build."""
    beside = ["collectives_bench"] if "--cpp" in rest else []
    build(options, ["weft_python", *beside])
    environment = {**bench_environment(), "PYTHONPATH": str(build_folder(options) / "python")}
    for name in beside:
        environment["WEFT_BENCH_COLLECTIVES"] = str(program(options, name))
    command = [
        environment["WEFT_BENCH_PYTHON"],
        ROOT / "profiling" / "bench" / "python" / "python_bench.py",
        *rest,
    ]
    os.execve(command[0], [str(part) for part in command], environment)


def command_soak(arguments):
    parser = parser_of("soak", *BUILDING, preset="optimized")
    parser.add_argument("what", choices=["transport", "rpc"])
    parser.add_argument(
        "-N", "--messages", type=int, default=1_000_000, help="in each direction (transport)"
    )
    parser.add_argument("--seconds", type=int, default=120, help="for each transport (rpc)")
    options = parser.parse_args(arguments)
    test = {"transport": "connection_soak_test", "rpc": "rpc_soak_test"}[options.what]
    build(options, [test])
    lengths = {
        "WEFT_SOAK_MESSAGES": str(options.messages),
        "WEFT_SOAK_SECONDS": str(options.seconds),
    }
    environment = {**tools(), **lengths}
    path = build_folder(options) / "tests" / test
    os.execve(path, [str(path)], environment)


def command_fuzz(arguments):
    parser = parser_of("fuzz", "jobs")
    parser.add_argument("targets", nargs="*", help="default: all of tests/fuzz")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    options = parser.parse_intermixed_args(arguments)
    options.preset, options.cuda = "fuzz", "off"
    build(options, options.targets or ["fuzz_targets"])
    folder = build_folder(options) / "fuzz"
    names = options.targets or sorted(
        path.name.removesuffix(".cc") for path in (ROOT / "tests/fuzz").glob("*_fuzz.cc")
    )
    for name in names:
        found = folder / "found" / name  # inputs that reached new code, kept for the next run
        found.mkdir(parents=True, exist_ok=True)
        say(f"fuzzing {name} for {options.seconds} s")
        limits = [f"-max_total_time={options.seconds}", "-print_final_stats=1", "-max_len=4096"]
        crashes = f"-artifact_prefix={folder}/{name}-"
        corpus = ROOT / "tests/fuzz/corpus" / name
        run([folder / name, *limits, crashes, found, corpus], env=tools())
