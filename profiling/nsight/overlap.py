#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints how much of the communication on a GPU was hidden behind compute, from an export of nsys (profiling/nsight/nsys.sh).

Communication, for every transport:
  NCCL's kernels, and Weft's own kernels except the optimizers' (pack, unpack, cast, scale, reduce), recognized by their names
  copies between GPUs (peer to peer)
  copies by calls of CUDA's driver (cuMemcpy…): Weft makes them, for CUDA IPC and for staging; libtorch calls the runtime instead
  all work launched inside a range of Weft that stands for communication: all ranges of the NVTX domain weft.transport, and the
  gradients, buckets and groups of weft.engine. For a CUDA graph: work that was captured inside such a range
Compute: all other kernels. Other copies, such as those of a program's input, are neither. Exposed: communication while nothing
computes on the same device. Times are the unions of the intervals, for each process and device.
"""

import argparse
import bisect
import re
import sqlite3
import sys
from pathlib import Path

PEER_TO_PEER = 10  # CUpti_ActivityMemcpyKind
PUSH_POP_RANGE, DOMAIN_CREATED = 59, 75  # NVTX_EVENTS.eventType

# Whether work launched in a range of Weft is communication. Other ranges do not decide; the innermost range that does, decides.
COMMUNICATING = {"weft.transport": None, "weft.engine": {"gradient", "bucket", "gradients", "make a group"}}  # None: all of them
COMPUTING = {"weft.engine": {"run", "backward of a gradient", "backward of the roots"}}  # a program's own functions
OPTIMIZERS = re.compile(r"weft_(sgd|adam)")


class Unreadable(Exception):
    """The export lacks a table or column that this script needs."""


def union(intervals):
    merged = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return merged


def length(intervals):
    return sum(end - begin for begin, end in intervals)


def common(first, second):
    """The length of the time that both unions cover."""
    total, i, j = 0, 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        total += max(0, end - begin)
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


def process_of(global_id):
    """The process of a globalPid or globalTid."""
    return global_id >> 24 & 0xFFFFFF


class Export:
    """The tables of an export, which has only tables with events."""

    def __init__(self, database):
        self.database = database
        self.tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "StringIds" not in self.tables:
            raise Unreadable("it has no table StringIds")
        self.texts = dict(database.execute("SELECT id, value FROM StringIds"))

    def rows(self, table, needed, optional=()):
        """The columns of a table, None for optional ones that this version of nsys does not write; nothing if there is no such table."""
        if table not in self.tables:
            return
        present = {row[1] for row in self.database.execute(f"PRAGMA table_info({table})")}
        missing = [column for column in needed if column not in present]
        if missing:
            raise Unreadable(f"its table {table} has no column {', '.join(missing)}: a version of nsys that this script does not know")
        columns = [*needed, *(column if column in present else "NULL" for column in optional)]
        yield from self.database.execute(f"SELECT {', '.join(columns)} FROM {table}")


class Ranges:
    """Weft's ranges: whether a thread communicated at a given time."""

    def __init__(self, export):
        domains, events = {}, []
        for begin, end, kind, thread, domain, text, text_id in export.rows(
                "NVTX_EVENTS", ["start", "end", "eventType", "globalTid", "domainId", "text"], ["textId"]):
            text = text if text is not None else export.texts.get(text_id)
            if kind == DOMAIN_CREATED:
                domains[process_of(thread), domain] = text
            elif kind == PUSH_POP_RANGE:
                events.append((begin, end, thread, domain, text))
        self.domains = {name for name in domains.values() if name and name.startswith("weft.")}
        self.threads = {}
        for begin, end, thread, domain, text in events:
            name = domains.get((process_of(thread), domain))
            if name in COMMUNICATING and (COMMUNICATING[name] is None or text in COMMUNICATING[name]):
                verdict = True
            elif text in COMPUTING.get(name, ()):
                verdict = False
            else:
                continue
            self.threads.setdefault(thread, []).append((begin, end if end is not None else float("inf"), verdict))
        self.outer = {}
        for thread, ranges in self.threads.items():
            ranges.sort(key=lambda one: (one[0], -one[1]))
            self.outer[thread] = self.parents(ranges)

    @staticmethod
    def parents(ranges):
        """The index of the range around each range; -1 without one. Ranges of a thread nest."""
        around, parents = [], []
        for place, (begin, _, _) in enumerate(ranges):
            while around and ranges[around[-1]][1] <= begin:
                around.pop()
            parents.append(around[-1] if around else -1)
            around.append(place)
        return parents

    def communicating(self, thread, moment):
        """Whether the innermost range that decides stands for communication; False without one."""
        ranges = self.threads.get(thread, [])
        place = bisect.bisect_right(ranges, (moment, float("inf"), True)) - 1
        while place >= 0 and ranges[place][1] < moment:
            place = self.outer[thread][place]
        return place >= 0 and ranges[place][2]


class Launches:
    """Where and by which CUDA call work was launched: (thread, time, name of the call)."""

    def __init__(self, export):
        self.calls = {}
        for begin, thread, correlation, name in export.rows("CUPTI_ACTIVITY_KIND_RUNTIME", ["start", "globalTid", "correlationId"], ["nameId"]):
            self.calls[process_of(thread), correlation] = (thread, begin, export.texts.get(name) or "")
        self.nodes, self.originals = {}, {}
        for begin, thread, node, original in export.rows("CUDA_GRAPH_NODE_EVENTS", ["start", "globalTid", "graphNodeId"], ["originalGraphNodeId"]):
            if thread is None:
                continue
            if original:
                self.originals[process_of(thread), node] = original
            else:
                self.nodes[process_of(thread), node] = (thread, begin, "")

    def of(self, process, correlation, node):
        """None if it is not known. For a graph's node: where it was captured; copies of a node refer to the original."""
        if not node:
            return self.calls.get((process, correlation))
        for _ in range(8):
            if (process, node) in self.nodes:
                return self.nodes[process, node]
            node = self.originals.get((process, node))
        return None


def why_communication(kind, name, call, ranges):
    """Why a kernel (by its name) or a copy (by its kind) is communication; None if it is not."""
    inside = call is not None and ranges.communicating(call[0], call[1])
    if kind is None:
        if "nccl" in name.lower():
            return "NCCL's kernels"
        if name.startswith("weft_"):
            return None if OPTIMIZERS.match(name) else "Weft's kernels"
        return "other kernels in Weft's ranges" if inside else None
    if kind == PEER_TO_PEER:
        return "copies between GPUs"
    if call is not None and call[2].startswith(("cuMemcpy", "cuMemset")):
        return "copies by Weft"
    return "other copies in Weft's ranges" if inside else None


def intervals_of(export, ranges, launches):
    """({(process, device): (communication, compute)}, {why communication: nanoseconds}); intervals are (begin, end) in nanoseconds."""
    found, reasons = {}, {}

    def add(begin, end, device, process, correlation, node, kind, name):
        why = why_communication(kind, name, launches.of(process, correlation, node), ranges)
        if why is None and kind is not None:
            return
        sides = found.setdefault((process, device), ([], []))
        sides[1 if why is None else 0].append((begin, end))
        if why is not None:
            reasons[why] = reasons.get(why, 0) + end - begin

    needed, optional = ["start", "end", "deviceId", "globalPid"], ["correlationId", "graphNodeId"]
    for begin, end, device, process, name, correlation, node in export.rows("CUPTI_ACTIVITY_KIND_KERNEL", [*needed, "demangledName"], optional):
        add(begin, end, device, process_of(process), correlation, node, None, export.texts.get(name) or "")
    for begin, end, device, process, kind, correlation, node in export.rows("CUPTI_ACTIVITY_KIND_MEMCPY", [*needed, "copyKind"], optional):
        add(begin, end, device, process_of(process), correlation, node, kind, "")
    for begin, end, device, process, correlation, node in export.rows("CUPTI_ACTIVITY_KIND_MEMSET", needed, optional):
        add(begin, end, device, process_of(process), correlation, node, 0, "")
    return found, reasons


def notes_on(export, ranges):
    """Notes on what the export lacks, and on what the figures leave out therefore."""
    if "NVTX_EVENTS" not in export.tables:
        yield "it has no ranges (nsys --trace nvtx): work launched inside Weft's ranges is recognized only by its name or kind"
    elif not ranges.domains:
        yield "none of its ranges are Weft's (a build with WEFT_TRACE=OFF?): work launched inside them is recognized only by its name or kind"
    if "CUPTI_ACTIVITY_KIND_RUNTIME" not in export.tables:
        yield "it has no calls of CUDA (nsys --trace cuda): copies on one GPU and to the host cannot be distinguished from a program's own, and are left out"


def main(path):
    if not path.exists():
        sys.exit(f"overlap: there is no {path}; profiling/nsight/nsys.sh makes it")
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            export = Export(database)
            ranges = Ranges(export)
            found, reasons = intervals_of(export, ranges, Launches(export))
    except (sqlite3.DatabaseError, Unreadable) as error:
        sys.exit(f"overlap: {path} is not an export of nsys: {error}")
    if not found:
        sys.exit(f"overlap: {path} holds no kernel of a GPU")
    for note in notes_on(export, ranges):
        print(f"overlap: {path}: {note}", file=sys.stderr)
    print(f"{'process':>8} {'device':>6} {'compute ms':>11} {'communication ms':>17} {'hidden ms':>10} {'exposed ms':>11} {'hidden':>7}")
    for (process, device), (communication, compute) in sorted(found.items()):
        communication, compute = union(communication), union(compute)
        both, hidden = length(communication), common(communication, compute)
        share = f"{100 * hidden / both:.1f} %" if both else "–"
        print(f"{process:>8} {device:>6} {length(compute) / 1e6:>11.3f} {both / 1e6:>17.3f} {hidden / 1e6:>10.3f} {(both - hidden) / 1e6:>11.3f} {share:>7}")
    if reasons:
        print("communication, each by itself: " + ", ".join(f"{why} {time / 1e6:.3f} ms" for why, time in sorted(reasons.items())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path, help="the file that nsys.sh wrote, such as run1.sqlite")
    main(parser.parse_args().export)
