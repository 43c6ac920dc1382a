#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests a copy of ./dev in a temporary folder. It starts no program unless a test allows that."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

from dev_package import load

SCRIPT = Path(__file__).resolve().parents[2] / "dev"
COMMANDS = ["train", "test", "build", "bench", "soak", "fuzz", "run", "install", "wheel", "release", "setup", "format", "lint", "pack", "gpu", "gpu-pack",
            "docs", "results", "clean"]


def copy_dev(folder):
    """Copies ./dev and its package into a folder, which becomes their checkout."""
    shutil.copy2(SCRIPT, folder / "dev")
    shutil.copytree(SCRIPT.parent / "tools" / "dev", folder / "tools" / "dev", ignore=shutil.ignore_patterns("__pycache__"))


class DevTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve()
        copy_dev(self.root)
        (self.root / "build" / "dev").mkdir(parents=True)
        shutil.copytree(SCRIPT.parent / "cmake" / "requirements", self.root / "cmake" / "requirements")
        shutil.copy2(SCRIPT.parent / "CMakePresets.json", self.root)
        self.dev = load(self.root)

    def call(self, *words):
        """(exit code, output) of ./dev WORDS; starting a program is an error."""
        printed = io.StringIO()
        refused = AssertionError("a program was started")
        with contextlib.ExitStack() as stack:
            for name in ("subprocess.run", "subprocess.Popen", "os.execv", "os.execve"):
                stack.enter_context(mock.patch(name, side_effect=refused))
            stack.enter_context(mock.patch.object(sys, "argv", ["dev", *words]))
            stack.enter_context(contextlib.redirect_stdout(printed))
            stack.enter_context(contextlib.redirect_stderr(printed))
            try:
                self.dev.main()
                code = 0
            except SystemExit as end:
                code = end.code
            except self.dev.Stop as stop:
                print(stop)
                code = 1
        return code, printed.getvalue()


class Start(DevTest):
    def help_of(self, program):
        """The output of `./dev help`, started from / without variables of Python."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run([program, "help"], cwd="/", env=environment, capture_output=True, text=True, check=True).stdout

    def test_starts_elsewhere_and_through_a_symlink(self):
        before = sorted(self.root.rglob("*"))
        self.assertEqual(self.help_of(self.root / "dev"), self.dev.HELP)
        self.assertEqual(sorted(self.root.rglob("*")), before)
        folder = self.root / "bin"
        folder.mkdir()
        (folder / "weft-dev").symlink_to("../dev")
        self.assertEqual(self.help_of(folder / "weft-dev"), self.dev.HELP)

    def test_starts_in_a_read_only_checkout(self):
        for path in (self.root / "tools" / "dev", self.root / "tools", self.root):
            path.chmod(0o555)
            self.addCleanup(path.chmod, 0o755)
        self.assertEqual(self.help_of(self.root / "dev"), self.dev.HELP)

    def test_every_command_has_a_function(self):
        self.assertEqual(sorted(self.dev.COMMANDS), sorted(COMMANDS))


class Arguments(DevTest):
    def test_command_help_only_prints(self):
        for command in COMMANDS:
            with self.subTest(command):
                code, printed = self.call(command, "--help")
                self.assertEqual(code, 0, printed)
                self.assertIn(f"usage: ./dev {command}", printed)
        self.assertTrue((self.root / "build" / "dev").exists())

    def test_help_lists_all_commands(self):
        for command in COMMANDS:
            self.assertRegex(self.dev.HELP, rf"(?m)^  {command} ")

    def test_unknown_arguments_are_errors(self):
        for words in ["clean --al", "results now", "docs now", "setup --nvcc x", "format --chek", "format --jobs 2", "build --al", "test x",
                      "install", "fuzz --preset asan", "fuzz --cuda pip", "bench --runs", "run --nproc 2 digits"]:
            with self.subTest(words):
                code, printed = self.call(*words.split())
                self.assertEqual(code, 2, printed)
                self.assertIn(f"usage: ./dev {words.split()[0]} [", printed)

    def started(self, *words):
        """The command that ./dev WORDS replaces itself with; programs count as built."""
        with mock.patch.object(self.dev, "build") as built, mock.patch.object(self.dev, "program", lambda options, name: Path(name)):
            with mock.patch("os.execve") as started, mock.patch.object(sys, "argv", ["dev", *words]):
                self.dev.main()
        self.built = built.call_args.args[1]
        self.assertIn("tsan.supp", started.call_args.args[2]["TSAN_OPTIONS"])
        return started.call_args.args[1]

    def test_options_after_a_program_are_passed_to_it(self):
        self.assertEqual(self.started("run", "weft-run", "--nproc-per-node", "2", "./x", "--jobs", "3"),
                         ["weft-run", "--nproc-per-node", "2", "./x", "--jobs", "3"])
        self.assertEqual(self.started("run", "--jobs", "3", "--nproc-per-node", "2", "digits", "--help"),
                         ["weft-run", "--nproc-per-node", "2", "digits", "--help"])
        self.assertEqual(self.started("train", "--epochs", "1", "--nproc-per-node", "3", "--cuda", "off"),
                         ["weft-run", "--no-prefix", "--nproc-per-node", "3", "digits", "--epochs", "1"])

    def test_run_with_timeline_builds_its_reader(self):
        for environment, wanted in (({}, ["digits", "weft-run"]), ({"WEFT_TIMELINE": "run.json"}, ["digits", "weft-run", "weft-timeline"])):
            with mock.patch.dict(os.environ, environment, clear=True):
                self.started("train")
            self.assertEqual(self.built, wanted)


class Test(DevTest):
    def outcome(self, first, second):
        """(exit code, output) of ./dev test with two runs of ctest: {test: its status} each."""
        def write(command, run):
            cases = "".join(f'<testcase name="{name}" status="{status}"><system-out>output of {name}</system-out></testcase>'
                            for name, status in run.items())
            Path(command[command.index("--output-junit") + 1]).write_text(f"<testsuite>{cases}</testsuite>")
            return 8 if "fail" in run.values() else 0

        def start(command, **_):
            code = write(command, first)
            return mock.Mock(stdout=iter([f"{len(first)} tests\n", "90% tests passed\n"]), returncode=code)

        def run(command, **_):
            self.assertIsNotNone(second, "ctest was run again")
            self.assertIn("--rerun-failed", command)
            return subprocess.CompletedProcess(command, write(command, second))

        printed = io.StringIO()
        with contextlib.ExitStack() as stack:
            for name in ("build", "fetch_programs", "install_system_packages"):
                stack.enter_context(mock.patch.object(self.dev, name))
            stack.enter_context(mock.patch.object(self.dev, "build_folder", lambda options: self.root / "build" / "dev"))
            stack.enter_context(mock.patch.object(self.dev, "tools", dict))
            stack.enter_context(mock.patch("subprocess.Popen", start))
            stack.enter_context(mock.patch("subprocess.run", run))
            stack.enter_context(contextlib.redirect_stdout(printed))
            with self.assertRaises(SystemExit) as end:
                self.dev.command_test(["--jobs", "1"])
        return end.exception.code, printed.getvalue()

    def test_last_line_counts_tests_that_passed_alone(self):
        code, printed = self.outcome({"A.b": "fail", "C.d": "run"}, {"A.b": "run"})
        self.assertEqual(code, 0)
        self.assertIn("output of A.b", printed)
        self.assertEqual(printed.splitlines()[-1], "1 test failed and then passed alone (a defect to report): A.b")
        code, printed = self.outcome({"A.b": "fail", "C.d": "fail"}, {"A.b": "run", "C.d": "run"})
        self.assertEqual(code, 0)
        self.assertEqual(printed.splitlines()[-1], "2 tests failed and then passed alone (a defect to report): A.b, C.d")

    def test_repeated_failures_are_listed_apart(self):
        code, printed = self.outcome({"A.b": "fail", "C.d": "fail"}, {"A.b": "fail", "C.d": "run"})
        self.assertEqual(code, 8)
        self.assertEqual(printed.splitlines()[-2:], ["1 test failed again: A.b",
                                                     "1 test failed and then passed alone (a defect to report): C.d"])

    def test_only_few_failures_are_run_again(self):
        code, printed = self.outcome({"A.b": "run"}, None)
        self.assertEqual((code, printed.splitlines()[-1]), (0, "90% tests passed"))
        code, printed = self.outcome({"A.b": "fail", "C.d": "fail", "E.f": "fail"}, None)
        self.assertEqual(code, 8)
        self.assertNotIn("passed alone", printed)


class Install(DevTest):
    def test_install_builds_only_its_target(self):
        with mock.patch.object(self.dev, "build") as build, mock.patch.object(self.dev, "run") as run:
            code, printed = self.call("install", "--preset", "release", "~/we ft")
        self.assertEqual(code, 0, printed)
        self.assertEqual(build.call_args.args[1], ["installed"])
        folder = Path("~/we ft").expanduser()
        self.assertEqual(run.call_args.args[0], ["cmake", "--install", self.root / "build" / "release", "--prefix", folder])
        with mock.patch.object(self.dev, "build") as build, mock.patch.object(self.dev, "run"):
            self.call("install", "~/weft")
        self.assertEqual(build.call_args.args[0].preset, "optimized")
        self.assertIn(f"-DCMAKE_PREFIX_PATH='{folder}'", printed)


class Wheel(DevTest):
    def test_wheel_is_packed_from_an_optimised_build(self):
        packed = self.root / "weft.whl"
        packed.write_bytes(b"")
        with mock.patch.object(self.dev, "build") as build, mock.patch.object(self.dev, "pack_wheel", return_value=packed) as pack:
            code, printed = self.call("wheel")
            self.assertEqual(code, 0, printed)
            self.assertEqual(build.call_args.args[1], ["installed", "weft_python"])
            self.assertEqual(pack.call_args.args, (self.root / "build" / "optimized", self.root / "build" / "wheels"))
            self.call("wheel", "--preset", "dev", "--output", "/there")
            self.assertEqual(pack.call_args.args, (self.root / "build" / "dev", Path("/there")))

    def test_build_that_cannot_be_packed_is_refused(self):
        shutil.copytree(SCRIPT.parent / "base", self.root / "base")
        include = self.root / "torch"
        (include / "torch" / "headeronly").mkdir(parents=True)
        header = "".join(f"#define TORCH_VERSION_{part} {number}\n" for part, number in (("MAJOR", 2), ("MINOR", 15), ("PATCH", 1)))
        (include / "torch" / "headeronly" / "version.h").write_text(header)
        cache = f"Libtorch_INCLUDE_DIR:PATH={include}\nCMAKE_BUILD_TYPE:STRING=Release\nCMAKE_CXX_FLAGS_RELEASE:STRING=-O3 -DNDEBUG\n"
        folder = self.root / "build" / "dev"
        (folder / "CMakeCache.txt").write_text(cache)
        self.assertEqual(self.dev.Built(folder).name, f"torch_weft-{self.dev.weft_version()}+torch215")
        (folder / "CMakeCache.txt").write_text(cache.replace("-O3", "-O0"))
        self.assertTrue(self.dev.Built(folder).name.endswith("+debug.torch215"))
        for wrong in ("WEFT_SANITIZE:STRING=thread", "WEFT_SHARED:BOOL=OFF"):
            (folder / "CMakeCache.txt").write_text(cache + wrong + "\n")
            with self.assertRaises(self.dev.Stop):
                self.dev.Built(folder)


class Setup(DevTest):
    def test_setup_installs_programs_of_tests_on_request(self):
        for words, wanted in (([], []), (["--tests"], [mock.call("apt-services.txt", required=False)])):
            with mock.patch.object(self.dev, "setup"), mock.patch.object(self.dev, "install_system_packages") as installed, \
                    contextlib.redirect_stdout(io.StringIO()):
                self.dev.command_setup(words)
            self.assertEqual(installed.call_args_list, wanted)
        named = self.dev.lines_of(SCRIPT.parent / "cmake" / "requirements" / "apt-services.txt")
        self.assertLessEqual({"slurm-wlm", "munge", "buildah"}, set(named))


class Docs(DevTest):
    def test_docs_installs_doxygen_and_builds_the_site(self):
        for words, folder in (([], self.root / "build" / "docs" / "html"), (["--output", "site"], "site")):
            with mock.patch.object(self.dev, "install_system_packages") as installed, mock.patch.object(self.dev, "run") as ran:
                code, printed = self.call("docs", *words)
            self.assertEqual(code, 0, printed)
            self.assertEqual(installed.call_args_list, [mock.call("apt-docs.txt")])
            self.assertEqual(ran.call_args_list, [mock.call([sys.executable, self.root / "tools" / "docs" / "build.py", folder])])
            self.assertIn(f"open {folder}/index.html", printed)
        self.assertEqual(self.dev.lines_of(SCRIPT.parent / "cmake" / "requirements" / "apt-docs.txt"), ["doxygen"])


class Sources(DevTest):
    def test_missing_repository_is_an_error(self):
        with self.assertRaisesRegex(self.dev.Stop, r"git finds no \*.h in (?!.*the list is empty)"):
            self.dev.sources("*.h")

    def test_no_matching_files_is_an_error(self):
        self.assertEqual(subprocess.run(["git", "init", "-q", self.root]).returncode, 0)
        with self.assertRaisesRegex(self.dev.Stop, "the list is empty"):
            self.dev.sources("*.h")
        (self.root / "a.h").touch()
        self.assertEqual(self.dev.sources("*.h"), ["a.h"])

    def test_format_uses_pinned_versions(self):
        (self.root / "a.h").touch()
        with mock.patch.object(self.dev, "install_system_packages"), mock.patch.object(self.dev, "sources", return_value=["a.h"]):
            with mock.patch.object(self.dev, "install_venv") as installed, mock.patch.object(self.dev, "run") as ran:
                self.dev.command_format(["--check"])
        packages = [" ".join(call.args[1]) for call in installed.call_args_list]
        self.assertEqual([re.sub("==[0-9.]+$", "", package) for package in packages], ["clang-format", "codespell"])
        programs = [call.args[0][0] for call in ran.call_args_list]
        self.assertEqual(programs, [*(self.root / "build" / "venv" / "bin" / name for name in ("clang-format", "codespell")),
                                    self.root / "tools" / "prose.py"])


class Venv(DevTest):
    def test_broken_venv_is_made_again(self):
        programs = self.dev.venv() / "bin"
        made = []

        def run(command):
            made.append(command)
            if "venv" in command:
                programs.mkdir(parents=True)
                for name in ("python", "pip"):
                    (programs / name).write_text("#!/bin/sh\n")
                    (programs / name).chmod(0o755)

        with mock.patch.object(self.dev, "run", run), mock.patch.object(self.dev, "say"):
            for broken in ("python", "pip"):
                self.dev.install_venv("base", ["a==1"])
                made.clear()
                (self.dev.venv() / ".weft-cuda-0").touch()
                self.dev.install_venv("base", ["a==1"])
                self.assertEqual(made, [])
                (programs / broken).write_text("#!/moved/python\n")
                self.dev.install_venv("base", ["a==1"])
                self.assertEqual(len(made), 2)  # the venv, and what goes into it
                self.assertFalse((self.dev.venv() / ".weft-cuda-0").exists())


class Torch(DevTest):
    def test_each_libtorch_has_its_venv_and_builds(self):
        options = mock.Mock(preset="dev", compiler=None)
        self.assertEqual(self.dev.venv(), self.root / "build" / "venv")
        self.assertEqual(self.dev.build_folder(options), self.root / "build" / "dev")
        self.assertIn(f"torch=={self.dev.DEFAULT_TORCH}", self.dev.requirements("pip.txt"))
        with mock.patch.object(self.dev, "build") as build:
            code, printed = self.call("--torch", "2.11.0", "build", "x")
        self.assertEqual((code, build.call_args.args[1]), (0, ["x"]), printed)
        self.assertEqual(self.dev.venv(), self.root / "build" / "torch-2.11.0" / "venv")
        self.assertEqual(self.dev.build_folder(options), self.root / "build" / "torch-2.11.0" / "dev")
        self.assertIn("torch==2.11.0", self.dev.requirements("pip.txt"))

    def test_unusable_libtorch_is_refused(self):
        for version, wrong in (("2.10.0", "Weft needs libtorch 2.11 or newer"), ("2.15", "give all three numbers, such as --torch 2.15.0")):
            code, printed = self.call(f"--torch={version}", "build")
            self.assertEqual(code, 1)
            self.assertIn(wrong, printed)
        self.assertEqual(self.call("--torch")[0], 1)

    def test_nvcc_has_the_cuda_release_of_torch(self):
        packages = self.dev.venv() / "lib" / "python3.11" / "site-packages"
        (packages / "nvidia" / "cu13" / "lib").mkdir(parents=True)
        (packages / "nvidia" / "cu13" / "lib" / "libcudart.so.13").touch()
        for toolkit, wanted in (("13.2.2", "cuda-toolkit[nvcc,cudart,cccl,nvtx]==13.2.2"), ("13.0.2", "cuda-toolkit[nvcc,cudart,cccl,nvtx]==13.0.2")):
            found = packages / f"cuda_toolkit-{toolkit}.dist-info"
            found.mkdir()
            with mock.patch.object(self.dev, "install_venv") as installed:
                self.dev.pip_nvcc()
            self.assertEqual(installed.call_args.args[1][0], wanted)
            found.rmdir()
        with self.assertRaisesRegex(self.dev.Stop, "torch 2.15.0 depends on no CUDA toolkit"):
            self.dev.pip_nvcc()
        (packages / "cuda_toolkit-13.9.0.dist-info").mkdir()
        with self.assertRaisesRegex(self.dev.Stop, "there is no cmake/requirements/pip-cuda-13.9.txt: --cuda system"):
            self.dev.pip_nvcc()

    def test_clean_keeps_installed_packages(self):
        for path in ("venv/x", "dev/x", "torch-2.11.0/venv/x", "torch-2.11.0/dev/x"):
            (self.root / "build" / path).mkdir(parents=True)
        self.call("clean")
        left = sorted(str(path.relative_to(self.root / "build")) for path in (self.root / "build").rglob("x"))
        self.assertEqual(left, ["torch-2.11.0/venv/x", "venv/x"])
        self.call("clean", "--all")
        self.assertEqual(list((self.root / "build").iterdir()), [])

    def test_release_dependent_sources_are_found(self):
        for name, text in (("engine/tensor/torch_releases.h", ""), ("engine/a/a.h", "#include <weft/engine/tensor/torch_releases.h>\n"),
                           ("engine/a/a.cc", "#include <weft/engine/a/a.h>\n"), ("engine/b.cc", "#include <weft/engine/c.h>\n")):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)
        self.assertEqual(self.dev.sources_that_see_torch_releases(), [self.root / "engine" / "a" / "a.cc"])


class Compiler(DevTest):
    def folder_and_compiler(self, *words):
        options = self.dev.parser_of("build", *self.dev.BUILDING).parse_args(words)
        return self.dev.build_folder(options).name, self.dev.compiler_of(options)

    def test_dev_preset_uses_clang_and_optimized_gcc(self):
        self.assertEqual(self.folder_and_compiler(), ("dev", "clang"))
        self.assertEqual(self.folder_and_compiler("--compiler", "gcc"), ("dev-gcc", "gcc"))
        self.assertEqual(self.folder_and_compiler("--preset", "optimized"), ("optimized", "gcc"))
        self.assertEqual(self.folder_and_compiler("--preset", "optimized", "--compiler", "clang"), ("optimized-clang", "clang"))

    def test_old_or_missing_clang_is_an_error(self):
        for version, wrong in (("14.0.6", r"no clang\+\+ 16 or newer is installed \(clang\+\+ is 14\): install the package clang-19"), (None, "no clang")):
            said = subprocess.CompletedProcess([], 0, f"Debian clang version {version}\n", "")
            with mock.patch("shutil.which", lambda name: "/bin/clang++" if name == "clang++" and version else None), \
                    mock.patch("subprocess.run", return_value=said), self.assertRaisesRegex(self.dev.Stop, wrong):
                self.dev.newest_clang()
        with mock.patch("shutil.which", lambda name: f"/bin/{name}" if name in ("clang++-16", "clang++-18", "clang++") else None):
            self.assertEqual(self.dev.newest_clang(), Path("/bin/clang++-18"))


class Configure(DevTest):
    def test_only_complete_configurations_are_kept(self):
        folder = self.root / "build" / "dev"
        arguments, ends, found = [], [], []  # what is asked for; how each run of cmake ends; whether it found a cache

        def run(command, **_):
            found.append((folder / "CMakeCache.txt").exists())
            (folder / "CMakeCache.txt").touch()  # as CMake does, also where it fails
            end = ends.pop(0)
            if end:
                raise end
            (folder / "build.ninja").touch()

        def configure(argument, *ends_of_cmake):
            arguments[:], ends[:] = [argument], ends_of_cmake
            self.dev.configure(mock.Mock(preset="dev", compiler=None))
            self.assertEqual(ends, [])

        with mock.patch.multiple(self.dev, setup=lambda options: arguments, compiler_arguments=lambda options: [], tools=dict, run=run):
            configure("one", None)
            configure("one")
            for end in (self.dev.Stop("cmake exited with 1"), KeyboardInterrupt()):
                with self.assertRaises(type(end)):
                    configure("other", end)
                self.assertFalse((folder / ".weft-arguments").exists())
                configure("one", None)
                configure("one")
            with open(self.root / "CMakePresets.json", "a") as presets:
                presets.write("\n")
            configure("one", None)
        self.assertEqual(found, [False] * 6)


class Lock(DevTest):
    def test_foreign_build_folder_names_its_owner(self):
        (self.root / "build").chmod(0o555)
        self.addCleanup((self.root / "build").chmod, 0o755)
        self.root.chmod(0o755)
        owner = self.dev.user_name(os.getuid())
        if os.getuid() == 0:  # whom permissions do not bind
            os.seteuid(65534)
            self.addCleanup(os.seteuid, 0)
        with self.assertRaisesRegex(self.dev.Stop, rf"build belongs to {owner}: sudo chown -R \S+ {self.root}/build, or use sudo again"):
            with self.dev.lock("setup"):
                pass


class Spaces(DevTest):
    def test_sanitizer_options_quote_spaces(self):
        folder = self.root / "a b"
        folder.mkdir()
        copy_dev(folder)
        self.assertIn(f"suppressions='{folder}/tests/harness/tsan.supp':", load(folder).SANITIZERS["TSAN_OPTIONS"])
        presets = json.loads((SCRIPT.parent / "CMakePresets.json").read_text())["testPresets"]
        tsan = next(preset for preset in presets if preset["name"] == "tsan")["environment"]["TSAN_OPTIONS"]
        self.assertIn("suppressions='${sourceDir}/tests/harness/tsan.supp':", tsan)

    def test_library_paths_may_contain_spaces(self):
        def listing(text):
            return mock.patch("subprocess.run", return_value=subprocess.CompletedProcess([], 0, text, ""))

        with listing("\tlinux-vdso.so.1 (0x00007ffd)\n\tlibtorch.so => /a b/lib/libtorch.so (0x00007f01)\n"
                     "\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f02)\n"):
            self.assertEqual(list(self.dev.needed_libraries("x")), [("libtorch.so", Path("/a b/lib/libtorch.so"))])
        with listing("\tlibtorch.so => not found\n"), self.assertRaisesRegex(self.dev.Stop, "libtorch.so, which is not"):
            list(self.dev.needed_libraries("x"))
        with listing("2.11.0+cu130\n13.0\n/a b/torch/lib\n"):
            self.assertEqual(self.dev.torch_libraries("python3", "2.11.0"), ["/a b/torch/lib"])


class Releases(DevTest):
    """The documents on releases agree with what is built."""

    def test_compatibility_names_the_supported_releases(self):
        page = (SCRIPT.parent / "docs" / "compatibility.md").read_text()
        newest = self.dev.DEFAULT_TORCH.rpartition(".")[0]
        self.assertIn(f"| {self.dev.DEFAULT_TORCH} (default) |", page)
        self.assertRegex(page, rf"older than {self.dev.OLDEST_TORCH} [\s\S]*newer than\s{newest}\.")
        self.assertIn(f"`./dev --torch {self.dev.OLDEST_TORCH}.0 test`", page)
        self.assertIn(f"| clang | {self.dev.OLDEST_CLANG}.0 |", page)

    def test_changelog_names_the_version_of_the_headers(self):
        header = (SCRIPT.parent / "base" / "version.h").read_text()
        version = ".".join(re.findall(r"#define WEFT_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))
        changelog = (SCRIPT.parent / "CHANGELOG.md").read_text()
        self.assertRegex(changelog, rf"This will be {re.escape(version)}\b|## \[{re.escape(version)}\]")


class Release(DevTest):
    def prepare(self, changelog, tags):
        """Makes the checkout's changelog and tags; {0} in them is the version."""
        shutil.copytree(SCRIPT.parent / "base", self.root / "base")
        self.version = self.dev.weft_version()
        (self.root / "CHANGELOG.md").write_text(changelog.format(self.version))
        said = {"status": "", "tag": tags.format(self.version)}
        replaced = mock.patch.object(self.dev, "git", side_effect=lambda *words: said[words[0]])
        replaced.start()
        self.addCleanup(replaced.stop)

    def test_release_only_says_what_it_would_do(self):
        self.prepare("## [{0}] - 2027-01-02\n\nNew.\n\n## [0.0.1] - 2026-01-01\n\nOld.\n", tags="")
        code, output = self.call("release")
        self.assertEqual(code, 0)
        self.assertNotIn("not ready", output)
        self.assertIn(f"would run: gh release create v{self.version}", output)
        self.assertEqual(self.dev.notes_of(self.version), "New.")

    def test_unfinished_release_is_not_published(self):
        self.prepare("## [Unreleased]\n", tags="v{0}")
        code, output = self.call("release", "--publish")
        self.assertEqual(code, 1)
        self.assertIn("has no section", output)
        self.assertIn(f"the tag v{self.version} exists", output)


class Lint(DevTest):
    def test_clang_tidy_gets_no_options_of_gcc(self):
        command = "c++ -O2 --param ggc-min-heapsize=1 -Winvalid-pch -include '/a b/cmake_pch.hxx' -o x.o -c x.cc"
        self.assertEqual(self.dev.clangs_view([{"file": "x.cc", "command": command}]), [{"file": "x.cc", "command": "c++ -O2 -o x.o -c x.cc"}])
        command = "clang++-19 -O0 -Xclang -fno-pch-timestamp -Winvalid-pch -Xclang -include-pch -Xclang a.pch -Xclang -include -Xclang a.hxx -c x.cc"
        self.assertEqual(self.dev.clangs_view([{"file": "x.cc", "command": command}]), [{"file": "x.cc", "command": "clang++-19 -O0 -c x.cc"}])


class Gpu(DevTest):
    def setUp(self):
        super().setUp()
        self.folder = self.root / "weft-gpu"
        self.folder.mkdir()
        (self.folder / "tests.txt").write_text("a_gpu_test\n")
        (self.folder / "COMMIT").write_text("abc1234\n")
        (self.folder / "TORCH").write_text("2.15.0\n")
        self.file = self.root / "weft-gpu.tar.xz"
        subprocess.run(["tar", "-C", self.root, "-cJf", self.file, "weft-gpu"], check=True)

    def test_pack_is_a_file_or_its_folder(self):
        self.assertEqual(self.dev.unpacked(self.folder), self.folder)
        self.assertEqual((self.dev.unpacked(self.file) / "tests.txt").read_text(), "a_gpu_test\n")
        with self.assertRaisesRegex(self.dev.Stop, "is not a pack of ./dev gpu-pack"):
            self.dev.unpacked(self.root)

    def run_gpu(self, run, checker=None, options=()):
        """(output, result, error or None) of ./dev gpu, with `run` in place of its programs."""
        printed, stopped = io.StringIO(), None
        with mock.patch.multiple(self.dev, describe_gpu=lambda: [{"name": "NVIDIA H200"}], torch_libraries=lambda python, wanted: [],
                                 run_gpu_program=run), mock.patch("shutil.which", return_value=checker):
            with contextlib.redirect_stdout(printed):
                try:
                    self.dev.command_gpu(["--pack", str(self.file), "--output", str(self.root / "results"), *options])
                except self.dev.Stop as error:
                    stopped = str(error)
        return printed.getvalue(), json.loads(next((self.root / "results").glob("gpu-nvidia-h200-*.json")).read_text()), stopped

    @staticmethod
    def measured(path, arguments, *_):
        if "--json" in arguments:
            row = {"case": arguments[arguments.index("--case") + 1], "peer": "weft", "metric": "time", "unit": "us", "p50": 1, "bytes": 0}
            Path(arguments[arguments.index("--json") + 1]).write_text(json.dumps(row) + "\n")
        return 0, ""

    def test_result_has_commit_of_pack(self):
        printed, result, stopped = self.run_gpu(self.measured)
        why = result["not_run"][f"{self.dev.SANITIZED} under compute-sanitizer"]
        self.assertIn("no compute-sanitizer on PATH", why)
        self.assertIn(why, printed)
        self.assertIsNone(stopped)
        self.assertEqual(result["commit"], "abc1234")
        self.assertEqual([row["case"] for row in result["rows"]], [case for _, case in self.dev.GPU_BENCHES])
        self.assertEqual(self.dev.commit(), "unknown")

    def test_failed_bench_keeps_other_figures(self):
        def run(path, arguments, *rest):
            if "training step" in arguments:
                return 2, "it could not"
            return (0, "# no GPU cases") if "cuda_ipc" in arguments else self.measured(path, arguments, *rest)
        printed, result, stopped = self.run_gpu(run)
        self.assertIn("it could not", printed)
        self.assertIn("gpu_bench --case 'training step'", stopped)
        self.assertIn("transport_bench --case 'cuda_ipc'", stopped)
        self.assertEqual(result["failed_benches"], {"gpu_bench --case 'training step'": "ended with 2: it could not",
                                                    "transport_bench --case 'cuda_ipc'": "gave no figure: # no GPU cases"})
        self.assertEqual(len(result["rows"]), len(self.dev.GPU_BENCHES) - 2)

    def test_options_and_seconds_reach_programs(self):
        given, limits = {}, []
        def run(path, arguments, environment, seconds):
            limits.append(seconds)
            if "--case" in arguments:
                given[arguments[arguments.index("--case") + 1]] = arguments
            return self.measured(path, arguments)
        self.run_gpu(run, options=["--seconds", "200"])
        self.assertEqual(given["cuda_ipc"][2:4], ["--runs", "2"])
        self.assertNotIn("--runs", given["gpu"])
        self.assertLessEqual(max(limits), 200)

    def test_unfinished_programs_are_named_with_reason(self):
        limits = []
        def run(path, arguments, environment, seconds):
            limits.append(seconds)
            if "gpu pack" in arguments or Path(path).name == "a_gpu_test":
                return None, "ended after 90 s, its share of the time\nnothing comes"
            return (None, "not run: the time for all programs was over") if "cuda_ipc" in arguments else self.measured(path, arguments)
        printed, result, stopped = self.run_gpu(run)
        self.assertEqual(result["not_run"]["a_gpu_test"], "ended after 90 s, its share of the time")
        self.assertEqual(result["not_run"]["transport_bench --case 'cuda_ipc'"], "not run: the time for all programs was over")
        self.assertIn("not run: transport_bench --case 'cuda_ipc'", printed)
        self.assertIn("a_gpu_test", stopped)
        self.assertIn("transport_bench --case 'cuda_ipc'", stopped)
        self.assertEqual(len(limits), 1 + len(self.dev.GPU_BENCHES))
        self.assertTrue(all(limit >= self.dev.LEAST_GPU_SECONDS - 1 for limit in limits), limits)

    def test_pack_refuses_another_torch(self):
        for said, wrong in (("2.10.0+cu130\n13.0\n", "has torch 2.10.0.cu130; the pack was built for 2.11.0"),
                            ("2.11.0+cpu\nNone\n", "has torch 2.11.0.cpu, of no CUDA; the pack was built for CUDA 13"),
                            ("2.11.0+cu126\n12.6\n", "has torch 2.11.0.cu126, of CUDA 12.6; the pack was built for CUDA 13")):
            with mock.patch("subprocess.run", return_value=subprocess.CompletedProcess([], 0, f"{said}/torch/lib\n", "")), \
                    self.assertRaisesRegex(self.dev.Stop, wrong):
                self.dev.torch_libraries("python3", "2.11.0")

    def test_skipping_all_tests_is_a_failure(self):
        def ran(passed, **skipped):
            return {"tests": [{"program": "rpc_gpu_test", "exit_code": 0, "passed": passed, "failed": [], "skipped": skipped}], "sanitizer": None,
                    "failed_benches": {}, "not_run": {}}
        self.assertEqual(self.dev.failures_of(ran(0, a="no GPU", b="no GPU")), ["rpc_gpu_test, which skipped all its tests: no GPU"])
        self.assertEqual(self.dev.failures_of(ran(1, a="needs two GPUs")), [])

    def test_hanging_program_leaves_time_for_others(self):
        now = [1000.0]
        with mock.patch("time.monotonic", lambda: now[0]), mock.patch.multiple(self.dev, GPU_SECONDS=480, LEAST_GPU_SECONDS=20, MOST_GPU_SECONDS=180):
            time_left = self.dev.GpuTime(12)
            self.assertEqual([time_left.share() for _ in range(2)], [180, 180])  # the first took no time
            now[0] += 180  # the second hangs
            self.assertEqual(time_left.share(), 300 - 9 * 20)
            now[0] += 120  # so does the third
            for following in range(8, 0, -1):  # and everyone behind them
                self.assertEqual(time_left.share(), 20, following)
                now[0] += 20
            self.assertEqual(time_left.share(), 20)
            late = self.dev.GpuTime(2)
            now[0] += 500
            self.assertEqual([late.share(), late.share()], [0, 0])
            quick = self.dev.GpuTime(2)
            self.assertEqual([quick.share(), quick.share()], [180, 480])  # nothing follows the last
            quick = self.dev.GpuTime(2)
            now[0] += 400
            self.assertEqual([quick.share(), quick.share()], [60, 80])

    def test_slowest_program_runs_last(self):
        ran = []
        def run(path, arguments, environment, seconds):
            ran.append(Path(path).name)
            return self.measured(path, arguments)
        with mock.patch.object(self.dev, "SLOWEST", "a_gpu_test"), mock.patch.object(self.dev, "run_gpu_program", run):
            result = self.dev.gpu_results([Path("a_gpu_test"), Path("b_gpu_test")], Path("bin"), None, {}, 480)
        self.assertEqual([ran[0], *ran[-2:]], ["b_gpu_test", "fsdp_bench", "a_gpu_test"])
        self.assertEqual([one["program"] for one in result["tests"]], ["b_gpu_test", "a_gpu_test"])

    def test_only_runs_matching_programs(self):
        ran = []
        def run(path, arguments, environment, seconds):
            ran.append(Path(path).name)
            return self.measured(path, arguments)
        tests = [Path("a_gpu_test"), Path("b_gpu_test")]
        with mock.patch.object(self.dev, "run_gpu_program", run):
            result = self.dev.gpu_results(tests, Path("bin"), None, {}, 480, "b_gpu")
            self.assertEqual((ran, result["only"], result["not_run"]), (["b_gpu_test"], "b_gpu", {}))
            ran.clear()
            self.dev.gpu_results(tests, Path("bin"), None, {}, 480, "gpu step")
            self.assertEqual(ran, ["optim_bench"])
            with self.assertRaisesRegex(self.dev.Stop, "'c_gpu' in its name; it runs a_gpu_test, b_gpu_test, .*optim_bench --case 'gpu step'"):
                self.dev.gpu_results(tests, Path("bin"), None, {}, 480, "c_gpu")

    def test_later_part_replaces_its_figures(self):
        def row(case, p50):
            return {"bench": "gpu", "case": case, "metric": "time", "peer": "weft", "unit": "us", "bytes": 0, "p50": p50}
        def result(day, only=None, **more):
            return {"date": f"2026-01-0{day}", "commit": f"c{day}", "devices": [{"name": "X"}], "sanitizer": None, "tests": [], "rows": [], "not_run": {},
                    **({"only": only} if only else {}), **more}
        folder = self.root / "profiling" / "results"
        folder.mkdir(parents=True, exist_ok=True)
        one = {"program": "a_gpu_test", "passed": 1}
        for name, content in {
                "z": result(1, rows=[row("old", 1)]),
                "y": result(2, rows=[row("kept", 2), row("again", 3)], tests=[{**one, "program": "b_gpu_test"}, one], not_run={"a_gpu_test": "late", "b": "why"}),
                "x": result(3, "a_gpu", tests=[{**one, "passed": 9}]),
                "w": result(4, "again", rows=[row("again", 4)])}.items():
            (folder / f"gpu-{name}.json").write_text(json.dumps(content))
        shown = self.dev.newest_gpu_results()["X"]
        self.assertEqual({each["case"]: each["p50"] for each in shown["rows"]}, {"kept": 2, "again": 4})
        self.assertEqual([(each["program"], each["passed"]) for each in shown["tests"]], [("b_gpu_test", 1), ("a_gpu_test", 9)])
        self.assertEqual(shown["not_run"], {"b": "why"})
        self.assertEqual((shown["commit"], [part["commit"] for part in shown["parts"]]), ("c2", ["c3", "c4"]))

    def test_gpu_tests_need_plain_names(self):
        self.assertIn("zero_overlap_gpu_test", load().gpu_targets())
        folder = self.root / "tests"
        folder.mkdir(exist_ok=True)
        (folder / "CMakeLists.txt").write_text("foreach(one a b)\n  weft_test(${one}_test SOURCES a.cc LABELS gpu)\nendforeach()\n")
        with self.assertRaisesRegex(self.dev.Stop, "_test is not a plain name"):
            self.dev.gpu_targets()

    def test_overdue_program_ends_with_its_children(self):
        begun = time.monotonic()
        code, output = self.dev.run_gpu_program("bash", ["-c", "echo it begins; sleep 300 & sleep 300"], dict(os.environ), 0.5)
        self.assertIsNone(code)
        self.assertRegex(output, r"^ended after \d+ s, its share of the time\nit begins\n$")
        self.assertLess(time.monotonic() - begun, 30)
        self.assertEqual(self.dev.run_gpu_program("bash", ["-c", "echo a; echo b >&2; exit 3"], dict(os.environ), 60), (3, "a\nb\n"))
        self.assertEqual(self.dev.run_gpu_program("bash", [], {}, 0), (None, "not run: the time for all programs was over"))
        code, output = self.dev.run_gpu_program(self.root / "nothing", [], {}, 60)
        self.assertEqual(code, 127)
        self.assertIn("cannot be started", output)

    def test_compute_sanitizer_is_found_in_all_places(self):
        def made(folder):
            folder.mkdir(parents=True)
            (folder / "compute-sanitizer").write_text("#!/bin/sh\n")
            (folder / "compute-sanitizer").chmod(0o755)
            return str(folder / "compute-sanitizer")
        toolkit = made(self.root / "cuda" / "compute-sanitizer")
        package = made(self.root / "site-packages" / "nvidia" / "cu13" / "bin")
        on_path = made(self.root / "somewhere")
        with mock.patch.dict(os.environ, {"PATH": str(self.root / "somewhere"), "CUDA_HOME": str(self.root / "cuda")}):
            self.assertEqual(self.dev.compute_sanitizer(self.root / "site-packages"), on_path)
            os.environ["PATH"] = str(self.root)
            self.assertEqual(self.dev.compute_sanitizer(self.root / "site-packages"), package)
            self.assertEqual(self.dev.compute_sanitizer(self.root / "others"), toolkit)

    def test_preset_without_ranges_is_refused(self):
        shutil.copy2(SCRIPT.parent / "CMakePresets.json", self.root)
        self.assertTrue(self.dev.records_ranges("dev"))
        self.assertTrue(self.dev.records_ranges("profile"))
        with mock.patch.object(self.dev, "build", side_effect=AssertionError("it builds")):
            for command in (["gpu-pack"], ["gpu", "--prepare"]):
                function = getattr(self.dev, "command_" + command[0].replace("-", "_"))
                with self.assertRaisesRegex(self.dev.Stop, "release compiles the ranges away"):
                    function([*command[1:], "--preset", "release"])

    def test_prepare_installs_missing_sanitizer(self):
        shutil.copy2(SCRIPT.parent / "CMakePresets.json", self.root)
        for found, installs in ((None, [self.dev.requirements("pip-gpu.txt")]), ("/usr/bin/compute-sanitizer", [])):
            with mock.patch.object(self.dev, "build") as built, mock.patch.object(self.dev, "install_venv") as installed, \
                    mock.patch.object(self.dev, "compute_sanitizer", return_value=found), \
                    mock.patch.object(self.dev, "program", lambda options, name: Path("bin") / name), contextlib.redirect_stdout(io.StringIO()):
                self.dev.command_gpu(["--prepare"])
            self.assertEqual(built.call_args.args[1], [*self.dev.gpu_targets(), *self.dev.GPU_PROGRAMS])
            self.assertEqual([call.args[1] for call in installed.call_args_list], installs)

    def test_ended_program_counts_finished_tests(self):
        lines = ["[ RUN      ] Gpu/Claims.Sum/Nccl", "[       OK ] Gpu/Claims.Sum/Nccl (3 ms)", "[  SKIPPED ] Gpu/Claims.Any/Nccl (0 ms)",
                 "[  FAILED  ] Gpu/Claims.Max/Nccl, where GetParam() = Nccl (12 ms)", "[       OK ] Alone.One (0 ms)", "[ RUN      ] Gpu/Claims.Min/Nccl"]
        output = "\n".join(["ended after 9 s, its share of the time", *lines, "x" * 5000])
        with mock.patch.object(self.dev, "run_gpu_program", lambda *arguments: (None, output)):
            figures = self.dev.test_figures("some_gpu_test", [], {}, 9)
        self.assertEqual((figures["passed"], figures["passed_by_setting"]), (2, {"Nccl": 1}))
        self.assertEqual((figures["failed"], list(figures["skipped"])), (["Gpu/Claims.Max/Nccl"], ["Gpu/Claims.Any/Nccl"]))
        self.assertEqual(figures["output"].splitlines()[0], "ended after 9 s, its share of the time")
        self.assertLess(len(figures["output"]), 4100)

    def test_settings_are_counted_separately(self):
        cases = "".join(f'<testcase name="{name}" classname="Gpu/Claims" status="run" result="{result}">{inside}</testcase>'
                        for name, result, inside in [("Sum/NcclProcesses", "completed", ""), ("Min/NcclProcesses", "completed", ""),
                                                     ("Max/NcclProcesses", "completed", '<failure message="wrong"/>'), ("Sum/GlooOnGpu", "completed", ""),
                                                     ("Any/GlooOnGpu", "skipped", '<skipped message="no way"/>'), ("Alone", "completed", "")])
        def run(path, arguments, environment, seconds):
            Path(arguments[0].removeprefix("--gtest_output=xml:")).write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
            return 1, "one failed"
        with mock.patch.object(self.dev, "run_gpu_program", run):
            figures = self.dev.test_figures("communicator_gpu_test", [], {}, 60)
        self.assertEqual(figures["passed_by_setting"], {"NcclProcesses": 2, "GlooOnGpu": 1})
        self.assertEqual(figures["passed"], 4)
        result = {"tests": [figures], "sanitizer": {"exit_code": 0, "passed": 30, "failed": []}}
        read = {what: reads(result) for what, _, reads in self.dev.GPU_CHECKS}
        self.assertEqual(read["two ranks on one GPU: tests of NCCL in two processes"], "2 passed, 1 failed")
        self.assertEqual(read["two ranks on one GPU: tests through pinned memory, two threads"], "1 passed, 0 failed, 1 skipped")
        self.assertEqual(read[f"{self.dev.SANITIZED} under compute-sanitizer"], "30 passed, 0 failed, no error")
        unfinished = {"tests": [{**figures, "exit_code": None}], "sanitizer": None}
        read = {what: reads(unfinished) for what, _, reads in self.dev.GPU_CHECKS}
        self.assertEqual(read["two ranks on one GPU: tests of NCCL in two processes"], "2 passed, 1 failed, not all were run")
        older = {"tests": [{"failed": [], "skipped": {}, "passed": 3}], "sanitizer": None}
        self.assertTrue(all(reads(older) is None for _, _, reads in self.dev.GPU_CHECKS))
        ended = {"tests": [], "sanitizer": {"exit_code": None, "passed": 0, "failed": []}}
        self.assertTrue(all(reads(ended) is None for _, _, reads in self.dev.GPU_CHECKS))

    def packed(self):
        """(output, names in the pack) of ./dev gpu-pack, with fake programs."""
        folder = self.root / "tests" / "some"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "CMakeLists.txt").write_text("weft_test(b_gpu_test SOURCES b.cc LABELS gpu TIMEOUT 9)\nweft_test(cpu_test SOURCES c.cc)\n"
                                               "weft_test(a_gpu_test\n  SOURCES a.cc\n  LABELS procs gpu)\nweft_test(g2_test SOURCES d.cc LABELS gpu2)\n")
        shutil.copy2(SCRIPT.parent / "CMakePresets.json", self.root)
        def pack(programs, folder, with_torch):
            self.assertFalse(with_torch)
            for program in programs:
                (folder / "bin").mkdir(parents=True, exist_ok=True)
                (folder / "bin" / program.name).write_bytes(os.urandom(1000))
        printed = io.StringIO()
        with mock.patch.object(self.dev, "build") as built, mock.patch.object(self.dev, "pack", pack), \
                mock.patch.object(self.dev, "program", lambda options, name: Path("bin") / name), contextlib.redirect_stdout(printed):
            self.dev.command_gpu_pack(["--output", str(self.root / "pack.tar.xz")])
        self.assertEqual(built.call_args.args[1], ["a_gpu_test", "b_gpu_test", *self.dev.GPU_PROGRAMS])
        listed = subprocess.run(["tar", "-tf", self.root / "pack.tar.xz"], capture_output=True, text=True, check=True).stdout
        return printed.getvalue(), {name for name in listed.splitlines() if not name.endswith("/")}

    def test_pack_holds_tests_benches_and_dev(self):
        printed, names = self.packed()
        programs = {"a_gpu_test", "b_gpu_test", "gpu_bench", "transport_bench", "kernels_bench", "optim_bench", "fsdp_bench", "fsdp_gpu_worker", "weft-timeline"}
        modules = {f"weft-gpu/tools/dev/{path.name}" for path in (SCRIPT.parent / "tools" / "dev").glob("*.py")}
        self.assertEqual(names, {f"weft-gpu/bin/{name}" for name in programs} | modules | {"weft-gpu/dev", "weft-gpu/COMMIT", "weft-gpu/TORCH", "weft-gpu/tests.txt"})
        self.assertIn(f"for torch {self.dev.DEFAULT_TORCH}", printed)
        self.assertIn("weft-gpu/dev gpu --pack weft-gpu", printed)
        folder = self.dev.unpacked(self.root / "pack.tar.xz")
        self.assertEqual((folder / "tests.txt").read_text().split(), ["a_gpu_test", "b_gpu_test"])
        help_of_pack = subprocess.run([folder / "dev", "help"], capture_output=True, text=True, check=True).stdout
        self.assertEqual(help_of_pack, self.dev.HELP)

    def test_large_pack_is_refused_and_removed(self):
        self.assertEqual(self.dev.PACK_BYTES, 60_000_000)
        with mock.patch.object(self.dev, "PACK_BYTES", 5000), self.assertRaisesRegex(self.dev.Stop, r"the limit is 0\.0\. Its largest files, unpacked: (bin/|dev|tools/dev/)"):
            self.packed()
        self.assertFalse((self.root / "pack.tar.xz").exists())

    def test_sanitizer_findings_fail_the_command(self):
        (self.folder / "tests.txt").write_text(self.dev.SANITIZED + "\n")
        subprocess.run(["tar", "-C", self.root, "-cJf", self.file, "weft-gpu"], check=True)
        checked = lambda path, *rest: (9, "") if "compute-sanitizer" in str(path) else self.measured(path, *rest)
        self.assertIn("under compute-sanitizer", self.run_gpu(checked, "/a b/compute-sanitizer")[2])

    def test_test_image_knows_its_commit(self):
        image = (SCRIPT.parent / "docker" / "gpu.Dockerfile").read_text()
        self.assertRegex(image, r"AS test\n(?:(?!FROM ).*\n)*ARG COMMIT=unknown\nRUN echo .* > COMMIT\n")

    def test_figures_come_from_the_largest_case(self):
        def row(case, peer, metric, p50, size=0, unit="us"):
            return {"case": case, "peer": peer, "metric": metric, "unit": unit, "p50": p50, "bytes": size}
        rows = [row("gpu pack a 6Mi", "weft", "bandwidth", 1.0, 6, "GB/s"), row("gpu pack a 6Mi", "device copy", "bandwidth", 2.0, 6, "GB/s"),
                row("gpu pack a 64Mi", "weft", "bandwidth", 9.0, 64, "GB/s"), row("gpu pack a 64Mi", "device copy", "bandwidth", 10.0, 64, "GB/s"),
                row("gpu unpack a 64Mi", "weft", "bandwidth", 5.0, 64, "GB/s"),
                row("nccl all_reduce of one rank", "NCCL", "time", 1.5), row("nccl all_reduce of one rank", "weft communicator", "time", 3.0),
                row("stream to stream", "weft", "time", 4.0), row("stream to stream", "host function", "time", 20.0),
                row("training step", "captured", "host time", 50.0), row("training step", "eager", "host time", 500.0),
                row("training step", "captured", "time", 900.0), row("training step", "eager", "time", 1000.0),
                row("cuda_ipc stream 1048576", "weft", "bandwidth", 400.0, 1 << 20, "GiB/s"),
                row("cuda_ipc stream 1048576", "floor: device copy", "bandwidth", 500.0, 1 << 20, "GiB/s")]
        figures = {what: read(rows) for what, _, read in self.dev.GPU_FIGURES}
        self.assertEqual(figures["bucket pack, share of a copy's bandwidth"], "90 % (9 GB/s)")
        self.assertIsNone(figures["bucket unpack, share of a copy's bandwidth"])
        self.assertEqual(figures["NCCL with one rank, a communicator's call over raw NCCL"], "1.5 us (3 over 1.5)")
        self.assertEqual(figures["stream to stream, stream memory operations"], "4 us")
        self.assertEqual(figures["stream to stream, times faster than host callbacks"], "5 (20 against 4 us)")
        self.assertEqual(figures["captured training step, host time over eager"], "0.1 (50 against 500 us)")
        self.assertEqual(figures["CUDA IPC, 1 MiB, bandwidth over a copy's"], "0.8 (400 against 500 GiB/s)")
        self.assertIsNone(figures["CUDA IPC, 256 MiB, bandwidth over a copy's"])
        self.assertTrue(all(read([]) is None for _, _, read in self.dev.GPU_FIGURES))


class FiguresOfGpus(DevTest):
    """GPU_FIGURES and GPU_BENCHES use the names in the benches' sources."""

    @staticmethod
    def sources_of(program, run):
        """(string literals, numbers) in a bench's headers, in its sources with such cases, and in the
        sources that all benches share."""
        folder = SCRIPT.parent / "profiling" / "bench"
        files = [file for name in (program.removesuffix("bench"), "report.") for file in sorted(folder.glob(f"{name}*"))]
        code = {file: re.sub(r"^#include.*$|//.*$", "", file.read_text(), flags=re.MULTILINE) for file in files}
        text = "".join(code[file] for file in files if file.suffix == ".h" or file.stem == "report" or f'"{run}' in code[file])
        numbers = {int(value) << int(shift or 0) for value, shift in re.findall(r"\b(\d+)\b(?: << (\d+)\b)?", text)}
        return set(re.findall(r'"((?:[^"\\\n]|\\.)+)"', text)), numbers

    @classmethod
    def is_made_of(cls, case, literals, numbers):
        """True if `case` is a sequence of literals, spaces and numbers; the last literal may be cut off."""
        if not case or any(literal.startswith(case) for literal in literals):
            return True
        number = re.match(r"\d+", case)
        if number and int(number.group()) in numbers and cls.is_made_of(case[number.end():], literals, numbers):
            return True
        return any(case.startswith(literal) and cls.is_made_of(case[len(literal):], literals, numbers) for literal in {*literals, " "})

    def test_each_figure_names_a_bench_that_runs(self):
        wanted = []  # (what, case, metric, peer)
        for what, _, read in self.dev.GPU_FIGURES:
            def row(rows, case, metric, peer, what=what):
                wanted.append((what, case, metric, peer))
                return {"case": case, "metric": metric, "peer": peer, "p50": 1.0, "bytes": 0, "unit": "us"}
            with mock.patch.object(self.dev, "largest_row", row):
                read([])
        self.assertEqual({what for what, *_ in wanted}, {what for what, _, _ in self.dev.GPU_FIGURES})
        for what, case, metric, peer in wanted:
            found = []
            for program, run in self.dev.GPU_BENCHES:
                literals, numbers = self.sources_of(program, run)
                if run in case and self.is_made_of(case, literals, numbers) and {peer, metric} <= literals:
                    found.append(program)
            self.assertTrue(found, f"{what}: no bench of GPU_BENCHES gives {metric} of '{peer}' in a case '{case}…'")
        for program, run in self.dev.GPU_BENCHES:
            self.assertTrue(self.is_made_of(run, *self.sources_of(program, run)), f"{program} has no case '{run}…'")
            self.assertTrue(any(run in case for _, case, _, _ in wanted), f"{program} --case '{run}' is run, and no figure is read of it")

    def test_foreign_names_are_found(self):
        literals, numbers = {"gpu ", "unpack ", "stream", "nccl all_reduce of one rank"}, {64, 1 << 20}
        for case in ("gpu unpack", "stream 1048576", "stream 64", "nccl all_reduce", "gpu unpack 64"):
            self.assertTrue(self.is_made_of(case, literals, numbers), case)
        for case in ("gpu pack", "stream 65536", "nccl broadcast", "stream to stream", "gpus"):
            self.assertFalse(self.is_made_of(case, literals, numbers), case)


class Bench(DevTest):
    def test_untraced_builds_digits_without_tracing(self):
        (self.root / "profiling" / "bench").mkdir(parents=True)
        (self.root / "profiling" / "bench" / "timeline_bench.cc").touch()
        (self.root / "profiling" / "bench" / "ddp_bench.cc").touch()
        built = []
        presets = json.loads((SCRIPT.parent / "CMakePresets.json").read_text())["configurePresets"]
        with mock.patch.object(self.dev, "build", lambda options, targets: built.append((options.preset, targets))), \
                mock.patch.object(self.dev, "program", lambda options, name: self.root / options.preset / name), \
                mock.patch.object(self.dev, "install_system_packages"), mock.patch("os.execve") as started, \
                mock.patch.object(sys, "argv", ["dev", "bench", "--untraced", "timeline", "--runs", "3"]):
            self.dev.main()
        self.assertEqual(built, [("optimized", ["timeline_bench"]), ("untraced", ["digits"])])
        path, command, environment = started.call_args.args
        self.assertEqual(command, [str(self.root / "optimized" / "timeline_bench"), "--runs", "3"])
        self.assertEqual(environment["WEFT_BENCH_UNTRACED"], str(self.root / "untraced" / "digits"))
        untraced = next(preset for preset in presets if preset["name"] == "untraced")
        self.assertEqual((untraced["inherits"], untraced["cacheVariables"]["WEFT_TRACE"]), ("optimized", "OFF"))
        for words in (["--untraced", "ddp"], ["--untraced", "--preset", "release", "timeline"]):
            code, printed = self.call("bench", *words)
            self.assertEqual(code, 1)
            self.assertIn("--untraced works only for ./dev bench timeline", printed)


class Results(DevTest):
    ROW = {"bench": "rpc", "case": "8 B", "bytes": 8, "metric": "time", "unit": "us", "p99": 9000.0, "runs": 3}

    def setUp(self):
        super().setUp()
        self.results = self.root / "profiling" / "results"
        self.results.mkdir(parents=True)
        self.page = self.root / "docs" / "benchmarks.md"
        self.page.parent.mkdir()

    def measured(self, name, *rows):
        (self.results / name).write_text("".join(json.dumps({**self.ROW, **row}) + "\n" for row in rows))

    def results_of(self, *markers):
        """The page with these markers after ./dev results."""
        self.page.write_text("# Benchmarks\n" + "".join(f"before\n<!-- results: {marker} -->\nold\n<!-- end of results -->\nbehind\n" for marker in markers))
        with contextlib.redirect_stdout(io.StringIO()):
            self.dev.command_results([])
            first = self.page.read_text()
            self.dev.command_results([])
        self.assertEqual(self.page.read_text(), first)  # what is filled is filled again
        return first

    def test_marker_is_replaced_by_table_of_rows(self):
        self.measured("cpu-2026-01-02-abc-rpc.json", {"peer": "weft", "p50": 2.94}, {"peer": "gRPC", "p50": 114.0}, {"case": "64 B", "peer": "gRPC", "p50": 1150.0},
                      {"case": "1 B", "peer": "weft", "p50": 1}, {"metric": "messages", "unit": "msgs", "peer": "weft", "p50": 12})
        self.assertEqual(self.results_of('bench=rpc options="--runs 2" cases="^(8|64) B" peers="gRPC|weft" ratios="gRPC / weft"'),
                         "# Benchmarks\nbefore\n"
                         '<!-- results: bench=rpc options="--runs 2" cases="^(8|64) B" peers="gRPC|weft" ratios="gRPC / weft" -->\n'
                         "p50 of `./dev bench rpc --runs 2`, in `cpu-2026-01-02-abc-rpc.json`:\n\n"
                         "| case | gRPC | weft | gRPC / weft |\n|---|---|---|---|\n"
                         "| 8 B | 114 µs | 2.94 µs | 38.8 |\n| 64 B | 1.15 ms |  |  |\n| 8 B: messages |  | 12 msgs |  |\n"
                         "<!-- end of results -->\nbehind\n")
        self.assertIn("| case | weft | gRPC |\n", self.results_of("bench=rpc"))

    def test_bench_without_rows_is_not_measured(self):
        self.measured("cpu-2026-01-02-abc-rpc.json", {"peer": "weft", "p50": 2.94})
        self.assertIn("-->\nNot measured on this machine: `./dev bench ddp --runs 4`.\n<!-- end", self.results_of('bench=ddp options="--runs 4"', "bench=rpc"))

    def test_table_uses_newest_file_with_its_cases(self):
        for day, figure in (("2026-01-31", 1), ("2026-02-01", 2), ("2025-12-31", 3)):
            self.measured(f"cpu-{day}-abc-rpc.json", {"peer": "weft", "p50": figure})
        self.assertIn("| 8 B | 2 µs |", self.results_of("bench=rpc"))
        self.measured("cpu-2026-02-01T0930-abc-rpc.json", {"peer": "weft", "p50": 4})
        self.measured("cpu-2026-03-01-abc-rpc.json", {"case": "number", "peer": "weft", "p50": 5})
        self.measured("cpu-2026-03-02-abc-ddp.json", {"bench": "ddp", "peer": "weft", "p50": 6})
        self.assertIn("| 8 B | 4 µs |", self.results_of('bench=rpc cases="8 B"'))

    def test_wrong_marker_keeps_the_page(self):
        self.measured("cpu-2026-01-02-abc-rpc.json", {"peer": "weft", "p50": 2.94})
        for marker, said in (("bench=rpc case=x", "cannot be parsed"), ("peers=weft", "cannot be parsed"), ("bench", "cannot be parsed"),
                             ('bench=rpc cases="8 ("', "cannot be parsed"), ('bench=rpc ratios="weft"', "cannot be parsed"),
                             ("bench=rpc cases=16", "has rows of that bench, but none of such a case"),
                             ("bench=rpc peers=wefd", "shows 'wefd' in a table of rpc; cpu-2026-01-02-abc-rpc.json has weft"),
                             ('bench=rpc ratios="weft / gRPC"', "shows 'gRPC'")):
            with self.subTest(marker), self.assertRaisesRegex(self.dev.Stop, said):
                self.results_of(marker)
            self.assertIn("-->\nold\n<!--", self.page.read_text())
        self.page.write_text("<!-- results: bench=rpc -->\n<!-- results: gpu -->\n<!-- end of results -->\n")
        with self.assertRaisesRegex(self.dev.Stop, "no '<!-- end of results -->' after '<!-- results: bench=rpc -->'"):
            self.dev.command_results([])

    def test_ambiguous_file_names_are_errors(self):
        self.measured("cpu-2026-01-02-abc-rpc.json", {"peer": "weft", "p50": 1})
        self.measured("cpu-2026-01-02-bcd-rpc.json", {"peer": "weft", "p50": 2})
        with self.assertRaisesRegex(self.dev.Stop, "cpu-2026-01-02-abc-rpc.json and cpu-2026-01-02-bcd-rpc.json"):
            self.results_of("bench=rpc")
        self.measured("rows.json", {"bench": "ddp", "peer": "weft", "p50": 1})
        with self.assertRaisesRegex(self.dev.Stop, "rows.json: its name contains no date"):
            self.results_of("bench=ddp")

    def test_figures_have_three_digits(self):
        shown = [self.dev.shown(*figure) for figure in ((0.0294, "us"), (17940, "us"), (999.7, "us"), (0.1651, "s"), (2.118, "s"), (12.22, "M/s"), (3710.4, "B"), (0, "ms"), (0.0752,), (None, "s"))]
        self.assertEqual(shown, ["29.4 ns", "17.9 ms", "1000 µs", "165 ms", "2.12 s", "12.2 M/s", "3710 B", "0 ms", "0.0752", ""])

    def test_page_matches_the_results(self):
        """./dev results changes nothing in docs/benchmarks.md, which has no other tables."""
        shutil.copytree(SCRIPT.parent / "profiling" / "results", self.results, dirs_exist_ok=True)
        committed = (SCRIPT.parent / "docs" / "benchmarks.md").read_text()
        self.page.write_text(committed)
        with contextlib.redirect_stdout(io.StringIO()):
            self.dev.command_results([])
        self.assertEqual(self.page.read_text(), committed, "run ./dev results")
        made = re.compile(self.dev.RESULTS.pattern + r"(?:.*\n)*?" + self.dev.END_OF_RESULTS)
        self.assertGreater(len(made.findall(committed)), 5)
        self.assertNotRegex(made.sub("", committed), r"(?m)^\|")

    def test_gpu_result_shows_checks_and_omissions(self):
        self.assertIn("No run of `./dev gpu`", self.results_of("gpu"))
        tests = [{"program": "communicator_gpu_test", "exit_code": 0, "passed": 7, "passed_by_setting": {"NcclProcesses": 3}, "failed": [], "skipped": {}}]
        result = {"date": "2026-01-02T03:04:05+00:00", "commit": "abc1234", "tests": tests, "sanitizer": None, "rows": [],
                  "devices": [{"name": "NVIDIA H200", "driver_version": "580", "clocks.max.sm": "1980 MHz"}],
                  "not_run": {"gpu_bench --case 'training step'": "ended after 90 s, its share of the time"}}
        (self.results / "gpu-nvidia-h200-2026-01-02-abc1234.json").write_text(json.dumps(result))
        text = self.results_of("gpu")
        self.assertIn("| two ranks on one GPU: tests of NCCL in two processes | all pass | 3 passed, 0 failed |", text)
        self.assertIn("under compute-sanitizer | no error | not measured |", text)
        self.assertIn("Not run: gpu_bench --case 'training step': ended after 90 s, its share of the time.", text)
        later = {**result, "date": "2026-01-02T04:00:00+00:00", "commit": "0000123", "not_run": {}}
        other = {**later, "devices": [{**result["devices"][0], "name": "NVIDIA L4"}]}
        (self.results / "gpu-nvidia-h200-2026-01-02-0000123.json").write_text(json.dumps(later))
        (self.results / "gpu-nvidia-l4-2026-01-02-0000123.json").write_text(json.dumps(other))
        text = self.results_of("gpu")
        self.assertNotIn("abc1234", text)
        self.assertEqual([text.count(name) for name in ("NVIDIA H200", "NVIDIA L4", "commit 0000123")], [1, 1, 2])


if __name__ == "__main__":
    unittest.main()
