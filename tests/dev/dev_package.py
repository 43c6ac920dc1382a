# SPDX-License-Identifier: Apache-2.0
"""Loads the package behind ./dev for tests that call or replace its functions."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]


class Package:
    """All modules of one copy of tools/dev as one namespace: a name is read from any module that has it, and set in each.

    mock.patch.object() on it replaces a function for every module that calls it, wherever the function is defined.
    """

    def __init__(self, modules):
        holders = {}
        for module in modules:
            for name, value in vars(module).items():
                if not isinstance(value, ModuleType):
                    holders.setdefault(name, []).append(module)
        vars(self)["holders"] = holders

    def __getattr__(self, name):
        for module in self.holders.get(name, []):
            if name in vars(module):
                return vars(module)[name]
        raise AttributeError(name)

    def __setattr__(self, name, value):
        for module in self.holders[name]:
            setattr(module, name, value)

    def __delattr__(self, name):
        for module in self.holders[name]:
            delattr(module, name)


def load(root=ROOT):
    """The package of the checkout at `root`, independent of those loaded before."""

    def loaded():
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "dev"}

    before = loaded()
    for name in before:
        del sys.modules[name]
    try:
        with (
            mock.patch.object(sys, "dont_write_bytecode", True),
            mock.patch.object(sys, "path", [str(root / "tools"), *sys.path]),
        ):
            importlib.import_module("dev.main")
        return Package(loaded().values())
    finally:
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(before)
