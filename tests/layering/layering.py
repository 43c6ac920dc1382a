#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails when an include points the wrong way. Rules (docs/architecture.md):

  base < profiling/trace < cuda < kernels < transport < engine < python < examples, tests, profiling/bench
  inside engine: tensor < future < codec < store < membership < rendezvous < instruments < group < call < rref <
  autograd < rpc < mesh < ddp < shard < zero < training < checkpoint < optim < launch
  no two files define a class of one qualified name
  a transport backend never includes another backend (cuda_ipc, mesh, staged, stream and tls in transport/ are no backends)
  only engine/, transport/gloo/, python/, examples/, tests/ and profiling/bench/ include libtorch
  python/ is a program of a user: of Weft it includes the public headers only (<weft/group.h>), and its own; no layer includes it
  Weft's own headers are written #include <weft/…>
"""

import re
import sys
from pathlib import Path

LAYERS = ["base", "profiling/trace", "cuda", "kernels", "transport", "engine", "python"]
ENGINE = [
    *["tensor", "future", "codec", "store", "membership", "rendezvous", "instruments", "group", "call", "rref"],
    *["autograd", "rpc", "mesh", "ddp", "shard", "zero", "training", "checkpoint", "optim", "launch"],
]
PUBLIC = len(LAYERS)  # include/weft, examples, tests, benches: may include everything
NO_BACKENDS = ("cuda_ipc", "mesh", "staged", "stream", "tls")
SOURCES = {".h", ".cc", ".cu", ".cuh"}
TORCH = re.compile(r"^(torch|ATen|c10)/|^gloo/")
TORCH_ALLOWED = ("engine/", "transport/gloo/", "python/", "examples/", "tests/", "profiling/bench/", "include/")


def layer_of(path):
    for index, layer in enumerate(LAYERS):
        if path == layer or path.startswith(layer + "/"):
            return index
    return PUBLIC


def engine_folder_of(path):
    """The index in ENGINE of a file below engine/; None for other files."""
    parts = path.split("/")
    if parts[0] != "engine" or len(parts) < 3:
        return None
    if parts[1] not in ENGINE:
        sys.exit(f"layering: engine/{parts[1]}/ has no place in the order of engine's folders; add it to ENGINE in {__file__}")
    return ENGINE.index(parts[1])


def backend_of(path, root):
    parts = path.split("/")
    if parts[0] == "transport" and len(parts) > 2 and parts[1] not in NO_BACKENDS and (root / "transport" / parts[1]).is_dir():
        return parts[1]
    return None


def violations_of(root, file):
    path = file.relative_to(root).as_posix()
    mine = layer_of(path)
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
        if not match:
            continue
        quote, included = match.groups()
        where = f"{path}:{number}"
        if quote == '"' and not (file.parent / included).exists() and (root / included).exists():
            yield f'{where}: write #include <weft/{included}>'
        if TORCH.match(included) and not path.startswith(TORCH_ALLOWED):
            yield f"{where}: libtorch ({included}) belongs in engine/ and transport/gloo/ only"
        if not included.startswith("weft/"):
            continue
        target = included.removeprefix("weft/")
        if path.startswith("python/") and "/" in target and not target.startswith("python/"):
            yield f"{where}: python/ includes public headers of Weft only, not {target}"
            continue
        if mine < PUBLIC and "/" not in target and not path.startswith("python/"):
            yield f"{where}: a layer includes the layers' own headers, not the public {included}"
            continue
        theirs = layer_of(target)
        if "/" in target and theirs > mine:
            yield f"{where}: {LAYERS[mine]}/ includes {target}, which is above it"
        mine_folder, their_folder = engine_folder_of(path), engine_folder_of(target)
        if mine_folder is not None and their_folder is not None and their_folder > mine_folder:
            yield f"{where}: engine/{ENGINE[mine_folder]}/ includes {target}, which is above it"
        mine_backend, their_backend = backend_of(path, root), backend_of(target, root)
        if their_backend and mine < PUBLIC and their_backend != mine_backend:
            yield f"{where}: includes the backend {their_backend}; go through transport/registry.h"


SCOPE = re.compile(
    r"\bnamespace\s*(?P<namespace>[\w:]*)\s*\{|\b(?:class|struct)\s+(?:WEFT_\w+(?:\([^)]*\))?\s+)*(?P<type>\w+)(?:\s+final)?\s*(?::\s[^{;()]*)?\{|[{}]"
)


def types_of(file):
    """The qualified names of the classes that the file defines in named namespaces."""
    depth, namespaces = 0, []  # of each open namespace, the depth inside of it and its name
    for match in SCOPE.finditer(re.sub(r"//[^\n]*", "", file.read_text(errors="replace"))):
        if match[0] == "}":
            depth -= 1
            while namespaces and namespaces[-1][0] > depth:
                namespaces.pop()
            continue
        depth += 1
        names = [name for _, name in namespaces]
        if match["type"] and depth == len(names) + 1 and "" not in names:
            yield "::".join([*names, match["type"]])
        if match["namespace"] is not None:
            namespaces.append((depth, match["namespace"]))


def repeated_types_of(root, files):
    """Two classes of one name link without an error, and the program runs the functions of either."""
    found = {}
    for file in files:
        path = file.relative_to(root).as_posix()
        if layer_of(path) == PUBLIC:
            continue
        for name in types_of(file):
            if found.setdefault(name, path) != path:
                yield f"{path}: {name} is defined in {found[name]} too; give one of them another name"


def main(root):
    files = [
        file
        for folder in ["base", "profiling", "cuda", "kernels", "transport", "engine", "python", "examples", "tests", "include"]
        for file in sorted((root / folder).rglob("*"))
        if file.suffix in SOURCES and "fixtures" not in file.parts
    ]
    if not files:
        sys.exit(f"layering: no sources under {root}")
    violations = [violation for file in files for violation in violations_of(root, file)]
    violations += repeated_types_of(root, files)
    for violation in violations:
        print(violation)
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
