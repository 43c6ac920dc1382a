# SPDX-License-Identifier: Apache-2.0
"""What the site shows: the pages, and the topics of the reference with their headers."""

import fnmatch
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The reference has a topic for each public header, in this order.
TOPICS = {
    "group": "Process groups",
    "mesh": "Meshes of ranks",
    "parallel": "Data parallel training",
    "training": "Parts of a training step",
    "fully_shard": "Sharded models",
    "optim": "Optimizers and averaging",
    "checkpoint": "Checkpoints",
    "functional": "Collectives that autograd sees",
    "objects": "Collectives of values",
    "rpc": "Remote calls",
    "future": "Futures",
    "autograd": "Distributed autograd",
    "codec": "Values as bytes",
    "debug": "Looking inside",
    "error": "Errors",
    "version": "Version",
}
# A topic shows these headers first, and then the others that its public header includes.
HEADERS = {
    "group": ["engine/group/process_group.h", "engine/group/work.h", "kernels/reduce_op.h", "base/patience.h"],
    "parallel": ["engine/ddp/ddp.h", "engine/ddp/ddp_options.h"],
    "fully_shard": ["engine/shard/fully_shard.h", "engine/shard/fully_shard_options.h", "engine/training/materialize.h", "engine/training/checkpointed.h"],
    "rpc": ["engine/rpc/agent.h", "engine/call/types.h", "engine/rref/rref.h", "engine/rpc/operators.h", "engine/rpc/script.h", "engine/call/function.h", "engine/call/wait_all.h"],
    "codec": ["engine/codec/codec.h", "engine/codec/values.h"],
}
# They only make a compiler's error short.
NOT_SHOWN = ["engine/codec/refusals.h", "engine/call/refusals.h"]
# Names that are not public, though public headers declare them, by reason. A pattern hides what is inside of it too. Below these
# rules, headers.py leaves out deleted functions and what a comment "For Weft's own use" is above.
HIDDEN = {
    "details, by their namespace": ["*::detail"],
    "the layers of the engine": [
        "weft::autograd", "weft::call", "weft::codec", "weft::group", "weft::kernels", "weft::optim", "weft::shard", "weft::tensor", "weft::trace", "weft::training",
    ],
    "specialisations for other libraries": ["std", "std::hash", "msgpack", "torch", "c10"],
    "waits, as the parts of the engine pass them on": ["weft::Patience", "weft::describe_wait"],
}
# Other pages than README.md and docs/*.md, with their names in the site.
MORE_PAGES = {
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "SECURITY.md": "security",
    "examples/README.md": "example_programs",
}
# The navigation's groups of pages. Pages of docs/ that none of them names stand under "More".
GROUPS = {
    "Guides": ["index", "start", "python", "data_parallel", "large_models", "launching", "rpc", "autograd", "backends", "environment", "cuda_graphs", "rdma"],
    "From PyTorch": ["differences_from_pytorch"],
    "In operation": ["looking_inside", "errors", "faults", "benchmarks"],
    "Inside": ["architecture", "tour", "thread_model", "cuda_notes", "wire", "adding_a_transport", "decisions", "glossary"],
    "Project": ["compatibility", "packaging", "releases", "changelog", "contributing", "security", "example_programs"],
}
INCLUDE = re.compile(r"^#include <weft/([^>]+)>", re.MULTILINE)


@dataclass
class Topic:
    name: str
    title: str
    headers: list = field(default_factory=list)  # paths in the repository

    @property
    def id(self):
        return f"topic_{self.name}"

    @property
    def public_header(self):
        return f"include/weft/{self.name}.h"


def is_hidden(name):
    """True if a rule hides the qualified name, or a scope that it is in."""
    parts = name.split("::")
    scopes = ["::".join(parts[: end + 1]) for end in range(len(parts))]
    return any(fnmatch.fnmatchcase(scope, pattern) for patterns in HIDDEN.values() for pattern in patterns for scope in scopes)


def topics(root=ROOT):
    """The topics, with all headers that they show. A header belongs to the first that names it."""
    result, taken = [], set(NOT_SHOWN)
    for name, title in TOPICS.items():
        topic = Topic(name, title)
        included = INCLUDE.findall((root / topic.public_header).read_text())
        for path in HEADERS.get(name, []) + [path for path in included if (root / path).exists()]:
            if not (root / path).exists():
                raise FileNotFoundError(f"tools/docs/site_map.py names {path}, which does not exist")
            if path not in taken:
                taken.add(path)
                topic.headers.append(path)
        result.append(topic)
    return result


def topic_of(path, root=ROOT):
    """The topic that shows the header, or None."""
    return next((topic for topic in topics(root) if path in topic.headers), None)


def pages(root=ROOT):
    """{path: name in the site} of all pages."""
    documents = sorted((root / "docs").glob("*.md"))
    return {
        "README.md": "index",
        **{str(path.relative_to(root)): path.stem.replace("-", "_") for path in documents},
        **{path: name for path, name in MORE_PAGES.items() if (root / path).exists()},
    }
