# SPDX-License-Identifier: Apache-2.0
"""The entry point of ./dev: its help and its table of commands."""

import sys

from . import build, docs, gpu, lint, pack, release, results, run, setup, test, wheel
from .console import Stop
from .libtorch import DEFAULT_TORCH, choose_torch

HELP = """\
usage: ./dev [--torch VERSION] COMMAND [options]

  train [args]           build examples/digits and train it on two processes; args are passed to the
                         program (./dev run digits --help lists them)
  test  [-R REGEX] [-L LABEL] [--all]
                         build everything and run every test that this machine can run; list the
                         skipped tests with their reasons. --all: also the tests that the everyday
                         run leaves out (CONTRIBUTING.md lists them); takes hours
  build [target ...]     build everything, or the named targets
  bench [NAME] [--json FILE]
                         run one bench of profiling/bench; without a name, list them
  soak  transport [-N MESSAGES]
                         long run of the transports: a million messages each way, every byte checked
  soak  rpc [--seconds N]
                         long run of remote calls: random calls of all kinds for 120 s by default,
                         which must leave nothing behind
  fuzz  [TARGET ...] [--seconds N]
                         run libFuzzer on every decoder of a peer's bytes, 60 s each by default
  run   [--nproc-per-node N] PROGRAM [args]
                         build a program and run it; with N, as N ranks under weft-run
  install FOLDER         build the library and Weft's commands and install them in FOLDER, where
                         find_package(weft) finds them
  wheel  [--output DIR]  pack the library, Weft's commands and the Python module torch_weft for pip, in
                         build/wheels; --preset dev packs the everyday build, which is not optimised
  release [--dry-run | --files | --publish]
                         make the wheels, archives and packages of a release and publish them;
                         without an option, only say what would be done
  setup  [--tests]       only install what a build needs; --tests: also programs that some tests run
                         (some of them start services)
  format [--check]       run clang-format over the sources; --check: change nothing, and look for
                         misspellings with codespell
  lint   [FILE ...]      run clang-tidy over the sources; it enforces naming
  pack   [--output DIR] [--without-torch] PROGRAM ...
                         collect programs and the libraries that they need, to run elsewhere
  gpu    [--pack PACK | --prepare] [--only TEXT]
                         on a machine with a GPU: run every test labelled gpu, some also under
                         compute-sanitizer, and the GPU benches; write profiling/results/gpu-….json.
                         --pack: run a pack of ./dev gpu-pack and build nothing; --prepare: only
                         build; --only: run those whose name contains TEXT
  gpu-pack [--output FILE]
                         pack the programs of ./dev gpu, for ./dev gpu --pack on a machine with the
                         torch wheel: at most 60 MB
  docs   [--output DIR]  build the site of documents and API reference in build/docs/html
  results                fill the tables of docs/benchmarks.md from profiling/results/
  clean  [--all]         remove the builds; --all: also the installed packages
  help                   print this text

options of train, test, build, bench, soak, run (in front of PROGRAM), install, wheel, release,
pack, gpu, gpu-pack, setup and lint; fuzz has only --jobs:
  --preset NAME          dev (default of train, test, build, run and setup: builds fast, not
                         optimised), optimized (default of the others), cpu, release, profile, asan,
                         tsan
  --compiler NAME        clang (default of the presets dev, asan and tsan) or gcc (default of the
                         others)
  --cuda WHERE           the source of nvcc: auto (default: the system, else pip), system, pip, off
  --jobs N               compile jobs at a time (default: the number of processors); tests run twice
                         as many, since they mostly wait

  --torch VERSION        in front of COMMAND: the libtorch release, 2.11.0 or newer (default:
                         2.15.0). A release other than the default has its own venv and build
                         folders under build/torch-VERSION

./dev COMMAND --help lists the options of a command.
Everything but system packages and the caches of apt, pip and ccache is under build/;
./dev clean --all removes it.
"""

COMMANDS = {
    "train": run.command_train,
    "test": test.command_test,
    "build": build.command_build,
    "bench": run.command_bench,
    "soak": run.command_soak,
    "fuzz": run.command_fuzz,
    "run": run.command_run,
    "install": build.command_install,
    "wheel": wheel.command_wheel,
    "release": release.command_release,
    "setup": setup.command_setup,
    "format": lint.command_format,
    "lint": lint.command_lint,
    "pack": pack.command_pack,
    "gpu": gpu.command_gpu,
    "gpu-pack": gpu.command_gpu_pack,
    "docs": docs.command_docs,
    "results": results.command_results,
    "clean": build.command_clean,
}


def main():
    words = sys.argv[1:]
    while words and (words[0] == "--torch" or words[0].startswith("--torch=")):
        option, equals, version = words.pop(0).partition("=")
        if not equals and not words:
            raise Stop(f"--torch: give a release, such as --torch {DEFAULT_TORCH}")
        choose_torch(version if equals else words.pop(0))
    if not words or words[0] in ("help", "-h", "--help"):
        print(HELP, end="")
        return
    if words[0] not in COMMANDS:
        raise Stop(f"no command '{words[0]}'; ./dev help lists them")
    COMMANDS[words[0]](words[1:])


def start():
    """Runs main(); turns its failures into messages and exit codes."""
    try:
        main()
    except Stop as stop:
        print(f"dev: {stop}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
