# SPDX-License-Identifier: Apache-2.0
"""./dev gpu and ./dev gpu-pack: builds or packs programs for a GPU and records their results."""

import dataclasses
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from . import libtorch
from .build import build, build_folder, program
from .checkout import BUILD, ROOT, lock
from .console import Stop, run, say
from .gpu_run import GPU_PROGRAMS, GPU_SECONDS, failures_of, gpu_results
from .libtorch import site_packages, venv
from .options import BUILDING, parser_of
from .pack import pack
from .setup import install_venv, requirements

PACK_BYTES = 60_000_000


def gpu_targets():
    """The targets of tests labelled gpu.

    They are read from the CMake files, since ctest knows a program's tests only after it is built.
    """
    names = set()
    for file in (ROOT / "tests").rglob("CMakeLists.txt"):
        for call in re.finditer(r"weft_test\((\S+)([^)]*)\)", file.read_text()):
            if re.search(r"LABELS[^)]*\bgpu\b", call.group(2)):
                names.add(call.group(1))
    for name in names:
        if not re.fullmatch(r"\w+", name):
            raise Stop(
                f"./dev gpu reads the name of a test labelled gpu from weft_test(…): "
                f"{name} is not a plain name"
            )
    return sorted(names)


def describe_gpu():
    fields = [
        "name",
        "driver_version",
        "clocks.sm",
        "clocks.max.sm",
        "clocks.mem",
        "memory.total",
        "mig.mode.current",
    ]
    if not shutil.which("nvidia-smi"):
        return None
    query = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    )
    if query.returncode != 0 or not query.stdout.strip():
        return None
    return [
        dict(zip(fields, (value.strip() for value in line.split(","))))
        for line in query.stdout.strip().splitlines()
    ]


def commit(folder=ROOT):
    """The commit of a checkout; packs and images have it in the file COMMIT."""
    if not (folder / ".git").exists():
        return (
            (folder / "COMMIT").read_text().strip() if (folder / "COMMIT").exists() else "unknown"
        )
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


def unpacked(pack):
    """The folder of a pack that ./dev gpu-pack made; `pack` is the file or that folder."""
    folder = pack.resolve()
    if folder.is_file():
        folder = BUILD / "gpu-unpacked" / "weft-gpu"
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        run(["tar", "-C", folder.parent, "-xf", pack.resolve()])
    if not (folder / "tests.txt").exists() or not (folder / "TORCH").exists():
        raise Stop(f"{pack} is not a pack of ./dev gpu-pack, nor the folder weft-gpu in one")
    return folder


def torch_libraries(python, wanted):
    """The folders of the libraries of Python's torch wheel and of its CUDA wheels.

    It stops if the wheel is not of the release `wanted`.
    """
    script = (
        "import torch, pathlib; root = pathlib.Path(torch.__file__).parent; "
        "print(torch.__version__); print(torch.version.cuda); print(root / 'lib'); "
        "[print(p) for p in root.parent.glob('nvidia/*/lib')]"
    )
    found = subprocess.run([python, "-c", script], capture_output=True, text=True)
    if found.returncode != 0:
        raise Stop(
            f"{python} has no torch: pip install torch=={wanted} (of CUDA 13), "
            "or name another Python with --python"
        )
    version, cuda, *folders = found.stdout.splitlines()
    if version.partition("+")[0] != wanted:
        raise Stop(
            f"{python} has torch {version}; the pack was built for {wanted} "
            f"(./dev --torch {version.partition('+')[0]} gpu-pack makes one for it)"
        )
    if not cuda.startswith("13."):
        raise Stop(
            f"{python} has torch {version}, of {'no CUDA' if cuda == 'None' else f'CUDA {cuda}'}; "
            "the pack was built for CUDA 13"
        )
    return folders


def records_ranges(preset):
    """False if a preset compiles the ranges of threads away, which the timeline's summary reads."""
    presets = {
        one["name"]: one
        for one in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
    }
    one = presets[preset]
    while "WEFT_TRACE" not in one.get("cacheVariables", {}) and "inherits" in one:
        one = presets[one["inherits"]]
    return one.get("cacheVariables", {}).get("WEFT_TRACE", "AUTO") != "OFF"


def build_for_gpu(options):
    if not records_ranges(options.preset):
        raise Stop(
            f"the preset {options.preset} compiles the ranges away that the bench "
            "'exposed communication' reads; use optimized or profile"
        )
    build(options, [*gpu_targets(), *GPU_PROGRAMS])


def command_gpu_pack(arguments):
    parser = parser_of("gpu-pack", *BUILDING, preset="optimized")
    parser.add_argument("--output", type=Path, default=BUILD / "weft-gpu.tar.xz")
    options = parser.parse_args(arguments)
    build_for_gpu(options)
    folder = BUILD / "gpu-pack" / "weft-gpu"
    fill_gpu_pack(folder, options)
    run(["tar", "-C", folder.parent, "-cJf", options.output, folder.name])
    refuse_large_pack(options.output, folder)
    size = options.output.stat().st_size / 1e6
    say(
        f"{options.output}: {size:.1f} MB, for torch {libtorch.torch_version}. On the machine with "
        f"the GPU: tar xf {options.output.name} && weft-gpu/dev gpu --pack weft-gpu"
    )


def fill_gpu_pack(folder, options):
    shutil.rmtree(folder, ignore_errors=True)
    tests = [build_folder(options) / "tests" / name for name in gpu_targets()]
    pack([*tests, *(program(options, name) for name in GPU_PROGRAMS)], folder, with_torch=False)
    shutil.copy2(ROOT / "dev", folder / "dev")
    shutil.copytree(
        ROOT / "tools" / "dev",
        folder / "tools" / "dev",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (folder / "COMMIT").write_text(commit() + "\n")
    (folder / "TORCH").write_text(libtorch.torch_version + "\n")
    (folder / "tests.txt").write_text("\n".join(path.name for path in tests) + "\n")


def refuse_large_pack(file, folder):
    size = file.stat().st_size
    if size <= PACK_BYTES:
        return
    files = sorted(
        (path for path in folder.rglob("*") if path.is_file()),
        key=lambda path: -path.stat().st_size,
    )
    largest = ", ".join(
        f"{path.relative_to(folder)} {path.stat().st_size / 1e6:.1f} MB" for path in files[:3]
    )
    file.unlink()  # so that nobody hands it on
    raise Stop(
        f"{file.name} has {size / 1e6:.1f} MB; the limit is {PACK_BYTES / 1e6:.1f}. "
        f"Its largest files, unpacked: {largest}"
    )


def compute_sanitizer(*packages):
    """The path of compute-sanitizer: on PATH, in these folders of Python packages or a CUDA toolkit.

    None if it is in none of them.
    """
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [
        os.environ.get("PATH", ""),
        *(str(Path(one) / "nvidia" / "cu13" / "bin") for one in packages),
    ]
    for toolkit in filter(None, toolkits):
        folders += [f"{toolkit}/bin", f"{toolkit}/compute-sanitizer"]
    return shutil.which("compute-sanitizer", path=":".join(folders))


def prepare_gpu(options):
    """Builds the programs of ./dev gpu and installs compute-sanitizer.

    Returns (tests, folder of the benches).
    """
    build_for_gpu(options)
    if compute_sanitizer(site_packages()) is None:
        with lock("setup"):
            install_venv("gpu", requirements("pip-gpu.txt"))
    tests = [build_folder(options) / "tests" / name for name in gpu_targets()]
    return tests, program(options, GPU_PROGRAMS[0]).parent


def command_gpu(arguments):
    parser = parser_of("gpu", *BUILDING, preset="optimized")
    parser.add_argument(
        "--prepare",
        action="store_true",
        help="only build and install what it needs; that needs no GPU",
    )
    parser.add_argument(
        "--pack",
        type=Path,
        help="build nothing; run the programs of this pack of ./dev gpu-pack or of its folder",
    )
    parser.add_argument(
        "--python", default=sys.executable, help="the Python with the torch wheel, for --pack"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "profiling" / "results")
    parser.add_argument(
        "--seconds",
        type=int,
        default=GPU_SECONDS,
        help=f"for all programs together (default: {GPU_SECONDS}); programs beyond it are not run",
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        help="only programs and cases whose name contains it, such as "
        "\"gpu_bench --case 'nccl all_reduce'\"",
    )
    options = parser.parse_args(arguments)
    if options.prepare:
        if options.pack:
            parser.error("a pack needs no --prepare")
        prepare_gpu(options)
        say("what ./dev gpu needs is built and installed")
        return
    devices = describe_gpu()
    if devices is None:
        raise Stop("no GPU here: nvidia-smi lists none")
    programs = (
        packed_programs(options.pack, options.python) if options.pack else built_programs(options)
    )
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": programs.commit,
        "devices": devices,
        **gpu_results(
            programs.tests,
            programs.folder,
            programs.checker,
            programs.environment,
            options.seconds,
            options.only,
        ),
    }
    file = write_result(result, options.output)
    passed = sum(one["passed"] for one in result["tests"])
    say(f"{file}: {passed} tests passed, {len(result['rows'])} figures")
    for what, why in result["not_run"].items():
        say(f"not run: {what}: {why}")
    if failed := failures_of(result):
        raise Stop(f"failed: {', '.join(failed)}")


@dataclasses.dataclass
class GpuPrograms:
    """The programs of ./dev gpu, built here or taken from a pack."""

    tests: list  # paths
    folder: Path  # holds the benches and weft-timeline
    checker: str  # compute-sanitizer, or None
    environment: dict
    commit: str


def built_programs(options):
    tests, folder = prepare_gpu(options)
    environment = gpu_environment(venv() / "bin" / "python")
    return GpuPrograms(tests, folder, compute_sanitizer(site_packages()), environment, commit())


def packed_programs(pack, python):
    folder = unpacked(pack)
    torch = torch_libraries(python, (folder / "TORCH").read_text().strip())
    environment = gpu_environment(python)
    before = filter(None, [os.environ.get("LD_LIBRARY_PATH")])
    environment["LD_LIBRARY_PATH"] = ":".join([str(folder / "lib"), *torch, *before])
    tests = [folder / "bin" / name for name in (folder / "tests.txt").read_text().split()]
    packages = [Path(libraries).parents[1] for libraries in torch[:1]]
    return GpuPrograms(
        tests, folder / "bin", compute_sanitizer(*packages), environment, commit(folder)
    )


def gpu_environment(python):
    return {**os.environ, "CUDA_MODULE_LOADING": "EAGER", "WEFT_BENCH_PYTHON": str(python)}


def write_result(result, folder):
    """Writes the result to a file named after the GPU, day and commit; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9]+", "-", result["devices"][0]["name"]).strip("-").lower()
    file = folder / f"gpu-{name}-{result['date'][:10]}-{result['commit']}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    return file
