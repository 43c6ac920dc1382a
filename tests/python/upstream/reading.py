# SPDX-License-Identifier: Apache-2.0
"""Lets PyTorch's own tests, as they are installed or checked out, run with another backend than Gloo.

While PyTorch's test modules are imported, the literal "gloo" in them is read as the backend's name
("cpu:gloo,cuda:nccl" as "cpu:BACKEND,cuda:nccl"), and the name Backend.GLOO as Backend.BACKEND. So
every table, condition, decorator and parameter of theirs treats the backend as it treats Gloo. No
file is changed. The backend is also made the default of CPU tensors, and ranks are forked from the
process that has imported the module, not started anew. With the backend "gloo" only the last holds.
"""

import ast
import importlib.machinery
import os
import sys
from pathlib import Path


def in_place_of_gloo(text, backend):
    """The text with `backend` for Gloo, if the text is the name of a backend or of several."""
    if text in ("gloo", "GLOO"):
        return backend if text == "gloo" else backend.upper()
    parts = text.split(",")
    if not all(device and name for device, colon, name in (part.partition(":") for part in parts)):
        return text
    return ",".join(
        f"{part.removesuffix('gloo')}{backend}" if part.endswith(":gloo") else part for part in parts
    )


class _Reader(ast.NodeTransformer):
    def __init__(self, backend):
        self._backend = backend

    def visit_Constant(self, node):
        if isinstance(node.value, str):
            return ast.copy_location(
                ast.Constant(in_place_of_gloo(node.value, self._backend), node.kind), node
            )
        return node

    def visit_JoinedStr(self, node):
        # The parts of an f-string are no whole names, but its expressions contain literals.
        node.values = [
            self.visit(value) if isinstance(value, ast.FormattedValue) else value
            for value in node.values
        ]
        return node

    def visit_Attribute(self, node):
        self.generic_visit(node)
        owner = node.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if node.attr == "GLOO" and name in ("Backend", "backend"):
            node.attr = self._backend.upper()
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    backend = "gloo"

    def get_code(self, fullname):
        # Nothing is read from __pycache__ or written there.
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        return compile(
            ast.fix_missing_locations(_Reader(self.backend).visit(tree)), path, "exec",
            dont_inherit=True,
        )


class _Finder:
    def __init__(self, backend, folders):
        self._loader = type("_Loader", (_Loader,), {"backend": backend})
        self._folders = folders

    def find_spec(self, name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        if not any(Path(spec.origin).is_relative_to(folder) for folder in self._folders):
            return None
        spec.loader = self._loader(name, spec.origin)
        return spec


def _note_groups(backend):
    """Lets each group of the backend that is made leave a file: a test may make none."""
    import torch.distributed as dist

    plugin = dist.Backend._plugins[backend.upper()]

    def make(*arguments):
        if "WEFT_UPSTREAM_MADE" in os.environ:
            Path(os.environ["WEFT_UPSTREAM_MADE"]).touch()
        return plugin.creator_fn(*arguments)

    dist.Backend._plugins[backend.upper()] = plugin._replace(creator_fn=make)


def _fork_ranks(self):
    import torch.multiprocessing

    self._start_processes(torch.multiprocessing.get_context("fork").Process)


def install(backend, checkout=None):
    """Sets up the import of PyTorch's test modules for the backend, in this process."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    folders = [Path(torch.__file__).parent / "testing" / "_internal"]
    if checkout:
        folders.append(Path(checkout) / "test")
    if backend != "gloo":
        if not dist.is_backend_available(backend):
            raise SystemExit(
                f"torch.distributed has no backend '{backend}': build it, and add the folder of its "
                "package to PYTHONPATH"
            )
        dist.Backend.default_device_backend_map["cpu"] = backend
        _note_groups(backend)
        sys.meta_path.insert(0, _Finder(backend, folders))
    from torch.testing._internal import common_distributed

    common_distributed.MultiProcessTestCase._spawn_processes = _fork_ranks


def install_from_environment():
    """As install(), for this process and for those that it starts with the method "spawn"."""
    install(os.environ["WEFT_UPSTREAM_BACKEND"], os.environ.get("WEFT_UPSTREAM_CHECKOUT"))
