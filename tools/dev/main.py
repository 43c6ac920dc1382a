"""The entry point of ./dev: chooses the command and tells what went wrong."""

import sys

from . import build, gpu, lint, pack, results, run, setup, test
from .console import Stop
from .libtorch import DEFAULT_TORCH, choose_torch

HELP = """\
usage: ./dev [--torch VERSION] COMMAND [options]

  train [args]           build and train examples/digits on two processes (args go to the program: ./dev run digits --help)
  test  [-R REGEX] [-L LABEL] [--all]   build and run every test this machine can run; lists what was skipped and why. --all: also
                         what the everyday run leaves out (CONTRIBUTING.md lists it); takes hours
  build [target ...]     build everything, or the named targets
  bench [NAME] [--json FILE]    run one bench of profiling/bench (without a name: list them)
  soak  transport [-N MESSAGES]   the long run of the transports: a million messages each way, every byte checked
  soak  rpc [--seconds N]   the long run of remote calls: random calls of all kinds (default 120 s), nothing left behind
  fuzz  [TARGET ...] [--seconds N]   libFuzzer on every decoder of a peer's bytes, N seconds each (default 60)
  run   [--nproc-per-node N] PROGRAM [args]   build one program and run it, with N below weft-run
  install FOLDER         build the library and Weft's commands and put them there, for find_package(weft) of a program of yours
  setup  [--tests]       install what a build needs, and stop; --tests: also programs that some tests run (services of some start)
  format [--check]       clang-format over the sources
  lint   [FILE ...]      clang-tidy over the sources (naming is enforced there)
  pack   [--output DIR] [--without-torch] PROGRAM ...   programs with the libraries that they need, to run elsewhere
  gpu    [--pack PACK | --prepare] [--only TEXT]   on a machine with a GPU: every test labelled gpu, some under compute-sanitizer, the
                         GPU benches; writes profiling/results/gpu-….json. With a pack of ./dev gpu-pack nothing is built; --prepare
                         only builds; --only runs those whose name has TEXT
  gpu-pack [--output FILE]   what ./dev gpu --pack needs on a machine with the torch wheel: at most 60 MB
  results                fills the tables of docs/benchmarks.md, of benches and of GPUs, from profiling/results/
  clean  [--all]         remove the builds (--all: the installed packages as well)
  help                   this text

options of train, test, build, bench, soak, run (in front of PROGRAM), install, pack, gpu, gpu-pack, setup, lint; of fuzz --jobs only:
  --preset NAME          dev (default of train, test, build, run, setup: fast to build, not optimised), optimized (default of bench,
                         soak, install, pack, gpu, gpu-pack, lint), cpu, release, profile, asan, tsan
  --compiler NAME        clang (default of the presets dev, asan and tsan) or gcc (default of the others)
  --cuda WHERE           where nvcc comes from: auto (default: the system's, else pip), system, pip, off
  --jobs N               parallel compile jobs (default: the number of processors); tests: twice as many, since they mostly wait

  --torch VERSION        in front of COMMAND: libtorch's release, 2.11.0 or newer (default: 2.15.0). A release other than the
                         default has a venv and build folders of its own, under build/torch-VERSION

./dev COMMAND --help says what a command takes.
Everything but system packages and the caches of apt, pip and ccache lives under build/; ./dev clean --all undoes it.
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
    "setup": setup.command_setup,
    "format": lint.command_format,
    "lint": lint.command_lint,
    "pack": pack.command_pack,
    "gpu": gpu.command_gpu,
    "gpu-pack": gpu.command_gpu_pack,
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
    """main(), whose failures become texts and exit codes."""
    try:
        main()
    except Stop as stop:
        print(f"dev: {stop}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
