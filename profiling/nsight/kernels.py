#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints a table of kernels from the output of ncu --csv --print-units base (profiling/nsight/ncu.sh): how often each kernel was
launched, and the medians of its time, of the bytes of device memory that it moved, of its bandwidth, and of its share of the memory's
peak bandwidth."""

import argparse
import csv
import statistics
import sys
from pathlib import Path

TIME, BYTES, SHARE = "gpu__time_duration.sum", "dram__bytes.sum", "dram__throughput.avg.pct_of_peak_sustained_elapsed"
UNITS = {TIME: ("ns", "nsecond"), BYTES: ("byte",), SHARE: ("%",)}


def launches_of(lines):
    """{kernel: [{metric: value}, …]}, one entry for each launch: ncu writes a line for each metric."""
    found = {}
    for row in csv.DictReader(lines):
        metric = row["Metric Name"]
        if metric not in UNITS:
            continue
        if row["Metric Unit"] not in UNITS[metric]:
            sys.exit(f"kernels: {metric} is in {row['Metric Unit']}; run ncu with --print-units base")
        launch = found.setdefault(row["Kernel Name"], {}).setdefault((row["Process ID"], row["ID"]), {})
        launch[metric] = float(row["Metric Value"].replace(",", ""))
    return {kernel: list(launches.values()) for kernel, launches in found.items()}


def main(path):
    try:
        text = path.read_text(errors="replace").splitlines()
    except OSError as error:
        sys.exit(f"kernels: {path}: {error.strerror}")
    remarks = [line for line in text if line.startswith("==")]  # ncu's own lines, between the figures
    figures = [line for line in text if line.strip() and not line.startswith("==")]
    if not figures or "Metric Name" not in figures[0]:
        sys.exit(f"kernels: {path} has no figures of a kernel of Weft" + "".join(f"\n  {line}" for line in remarks if "ERROR" in line or "WARNING" in line))
    print(f"{'launches':>8} {'time us':>9} {'MB':>10} {'GB/s':>8} {'of peak':>8}  kernel")
    for kernel, launches in sorted(launches_of(figures).items()):
        whole = [launch for launch in launches if all(metric in launch for metric in UNITS)]
        if not whole:
            print(f"{len(launches):>8} {'some of its figures are missing':>38}  {kernel}")
            continue
        time, moved, share = (statistics.median(launch[metric] for launch in whole) for metric in (TIME, BYTES, SHARE))
        print(f"{len(whole):>8} {time / 1e3:>9.2f} {moved / 1e6:>10.3f} {moved / time if time else 0:>8.1f} {share:>6.1f} %  {kernel}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, help="the file that ncu wrote with --csv --log-file")
    main(parser.parse_args().figures)
