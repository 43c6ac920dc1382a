#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Configures small projects against folders that look like libtorch, and reads what CMake says.

usage: find_libtorch_test.py CXX_COMPILER
"""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

COMPILER = sys.argv.pop(1)
ROOT = Path(__file__).resolve().parents[2]
NEW_ABI = "_ZN3c105ErrorC1ENSt7__cxx1112basic_stringIcE"
PROJECT = """\
cmake_minimum_required(VERSION 3.25)
project(user LANGUAGES CXX)
list(APPEND CMAKE_MODULE_PATH "@root@/cmake")
if(WITH_CONFIG)
  set(weft_DIR "@folder@")
  find_package(weft REQUIRED)
else()
  find_package(Libtorch REQUIRED)
endif()
"""


class FindLibtorch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "CMakeLists.txt").write_text(PROJECT.replace("@root@", str(ROOT)).replace("@folder@", str(self.folder)))

    def torch(self, version, symbol=NEW_ABI):
        """Makes a folder with the headers and libraries that FindLibtorch looks for."""
        root = self.folder / f"torch-{version}"
        major, minor, patch = version.split(".")
        for name, text in (("include/torch/csrc/distributed/c10d/Store.hpp", ""), ("lib/libtorch_cpu.so", ""), ("lib/libc10.so", f"{symbol}\0"),
                           ("include/torch/headeronly/version.h", f"#define TORCH_VERSION_MAJOR {major}\n#define TORCH_VERSION_MINOR {minor}\n"
                                                                  f"#define TORCH_VERSION_PATCH {patch}\n")):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return root

    def configure(self, root, *options):
        """(whether it succeeded, the joined lines of its output)."""
        ran = subprocess.run(["cmake", "-S", self.folder, "-B", self.folder / f"build-{root.name}{len(options)}", f"-DCMAKE_CXX_COMPILER={COMPILER}",
                              f"-DWEFT_TORCH_ROOT={root}", *options], capture_output=True, text=True, timeout=100)
        return ran.returncode == 0, " ".join((ran.stdout + ran.stderr).split())

    def test_accepts_the_tested_releases_silently(self):
        for version in ("2.11.0", "2.15.1"):
            succeeded, said = self.configure(self.torch(version))
            self.assertTrue(succeeded, said)
            self.assertNotIn("Warning", said)

    def test_refuses_an_older_release(self):
        succeeded, said = self.configure(self.torch("2.10.0"))
        self.assertFalse(succeeded)
        self.assertIn("is too old: Weft needs 2.11 or newer (tested with 2.11 to 2.15)", said)

    def test_warns_of_a_newer_release(self):
        succeeded, said = self.configure(self.torch("2.16.0"))
        self.assertTrue(succeeded, said)
        self.assertIn("libtorch 2.16.0 is newer than those that Weft is tested with (2.11 to 2.15)", said)

    def test_refuses_a_libtorch_of_another_abi(self):
        succeeded, said = self.configure(self.torch("2.15.0", "_ZN3c105ErrorC1ESs"))
        self.assertFalse(succeeded)
        self.assertIn("was built with another C++ ABI", said)

    def test_refuses_a_program_of_another_abi(self):
        succeeded, said = self.configure(self.torch("2.15.0"), "-DCMAKE_CXX_FLAGS=-D_GLIBCXX_USE_CXX11_ABI=0")
        self.assertFalse(succeeded)
        self.assertIn("this compiler, with these flags, uses another C++ ABI than libtorch", said)

    def test_refuses_another_minor_release_than_wefts_own(self):
        text = (ROOT / "cmake" / "weftConfig.cmake.in").read_text()
        checked = text[text.index("find_dependency(Libtorch)") :].partition("endif()\n")
        config = ("include(CMakeFindDependencyMacro)\n" + checked[0] + checked[1]).replace("@Libtorch_MINOR_RELEASE@", "2.15").replace(
            "@Libtorch_VERSION@", "2.15.0")
        (self.folder / "weftConfig.cmake").write_text(config)
        succeeded, said = self.configure(self.torch("2.13.0"), "-DWITH_CONFIG=ON")
        self.assertFalse(succeeded)
        self.assertIn("this Weft was built with libtorch 2.15.0", said)
        self.assertIn("has 2.13.0, whose classes are laid out differently", said)
        succeeded, said = self.configure(self.torch("2.15.1"), "-DWITH_CONFIG=ON")
        self.assertTrue(succeeded, said)


if __name__ == "__main__":
    unittest.main()
