#!/usr/bin/env python3
"""How much of the communication on a GPU was hidden behind compute, from what nsys exported (profiling/nsight/nsys.sh).

Communication: NCCL's kernels, and copies between devices. Compute: all other kernels. Exposed: communication while nothing
computes on the same device. Times are the unions of the intervals, for each process and device.
"""

import argparse
import sqlite3
import sys
from pathlib import Path

PEER_TO_PEER = 10  # CUpti_ActivityMemcpyKind


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
    """What both unions cover."""
    total, i, j = 0, 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        total += max(0, end - begin)
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


def tables(database):
    return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def intervals_of(database):
    """{(process, device): (communication, compute)}, each a list of (begin, end) in nanoseconds."""
    found = {}
    present = tables(database)
    if "CUPTI_ACTIVITY_KIND_KERNEL" in present:
        query = ("SELECT k.globalPid, k.deviceId, k.start, k.end, s.value FROM CUPTI_ACTIVITY_KIND_KERNEL k "
                 "JOIN StringIds s ON s.id = k.demangledName")
        for process, device, begin, end, name in database.execute(query):
            sides = found.setdefault((process >> 24 & 0xFFFFFF, device), ([], []))
            sides[0 if "nccl" in name.lower() else 1].append((begin, end))
    if "CUPTI_ACTIVITY_KIND_MEMCPY" in present:
        query = "SELECT globalPid, deviceId, start, end, copyKind FROM CUPTI_ACTIVITY_KIND_MEMCPY"
        for process, device, begin, end, kind in database.execute(query):
            if kind == PEER_TO_PEER:
                found.setdefault((process >> 24 & 0xFFFFFF, device), ([], []))[0].append((begin, end))
    return found


def main(path):
    if not path.exists():
        sys.exit(f"overlap: there is no {path}; profiling/nsight/nsys.sh makes it")
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            found = intervals_of(database)
    except sqlite3.DatabaseError as error:
        sys.exit(f"overlap: {path} is no export of nsys: {error}")
    if not found:
        sys.exit(f"overlap: {path} holds no kernel of a GPU")
    print(f"{'process':>8} {'device':>6} {'compute ms':>11} {'communication ms':>17} {'hidden ms':>10} {'exposed ms':>11} {'hidden':>7}")
    for (process, device), (communication, compute) in sorted(found.items()):
        communication, compute = union(communication), union(compute)
        both, hidden = length(communication), common(communication, compute)
        share = f"{100 * hidden / both:.1f} %" if both else "–"
        print(f"{process:>8} {device:>6} {length(compute) / 1e6:>11.3f} {both / 1e6:>17.3f} {hidden / 1e6:>10.3f} {(both - hidden) / 1e6:>11.3f} {share:>7}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path, help="what nsys.sh wrote, such as run1.sqlite")
    main(parser.parse_args().export)
