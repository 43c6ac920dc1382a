# SPDX-License-Identifier: Apache-2.0
"""./dev results: fills the tables of docs/benchmarks.md from profiling/results/."""

import re
import shlex

from .checkout import ROOT
from .console import Stop, say
from .gpu_figures import gpu_tables
from .gpu_run import rows_of
from .options import parser_of


def rows_by_case(rows):
    """The medians of rows: {(case, metric, unit): {peer: p50}}, in the order of the rows."""
    cases = {}
    for row in rows:
        cases.setdefault((row["case"], row["metric"], row["unit"]), {})[row["peer"]] = row["p50"]
    return cases


def newest_rows(bench, cases):
    """(file, rows) of the newest file in profiling/results/ with such cases of a bench.

    (None, []) if no file has any.
    """
    found, others = {}, False
    for file in sorted((ROOT / "profiling" / "results").glob("*.json")):
        if file.name.startswith("gpu-"):
            continue
        of_bench = [row for row in rows_of(file) if row["bench"] == bench]
        others = others or bool(of_bench)
        if rows := [row for row in of_bench if re.search(cases, row["case"])]:
            when = re.search(r"-(\d{4}-\d\d-\d\d(?:T\d{4})?)-", file.name)
            if when is None:
                raise Stop(
                    f"profiling/results/{file.name}: its name contains no date "
                    "(profiling/results/README.md says how)"
                )
            if when.group(1) in found:
                raise Stop(
                    f"profiling/results/ has {found[when.group(1)][0].name} and {file.name}, "
                    "and the names do not say which is newer; "
                    "add the time of day to the later one (2026-01-31T1730)"
                )
            found[when.group(1)] = file, rows
    if not found and others:
        raise Stop(
            f"docs/benchmarks.md shows cases '{cases}' of the bench {bench}: "
            "profiling/results/ has rows of that bench, but none of such a case"
        )
    return found[max(found)] if found else (None, [])


TIMES = {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def shown(figure, unit=""):
    """A figure with three digits; a time in the largest unit in which it is at least 1."""
    if figure is None:
        return ""
    if unit in TIMES:
        seconds = figure * TIMES[unit]
        unit = next((one for one, size in TIMES.items() if seconds >= size), unit)
        figure, unit = seconds / TIMES[unit], unit.replace("us", "µs")
    return (
        f"{figure:.0f} {unit}".rstrip() if abs(figure) >= 100 else f"{figure:.3g} {unit}".rstrip()
    )


def bench_table(bench, options="", cases="", peers="", ratios=""):
    """The lines of a table: a row for each case, a column for each peer and each ratio "A / B"."""
    command = f"./dev bench {bench} {options}".rstrip()
    file, rows = newest_rows(bench, cases)
    if file is None:
        return [f"Not measured on this machine: `{command}`."]
    lines = rows_by_case(rows)
    measured = list(dict.fromkeys(row["peer"] for row in rows))
    peers = peers.split("|") if peers else measured
    pairs = [ratio.split(" / ") for ratio in ratios.split("|") if ratio]
    for peer in [*peers, *(peer for pair in pairs for peer in pair)]:
        if peer not in measured:
            raise Stop(
                f"docs/benchmarks.md shows '{peer}' in a table of {bench}; "
                f"{file.name} has {', '.join(measured)}"
            )
    titles = ["case", *peers, *(" / ".join(pair) for pair in pairs)]
    table = [
        f"p50 of `{command}`, in `{file.name}`:",
        "",
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
    ]
    for (case, metric, unit), figures in lines.items():
        if not set(peers) & set(figures):
            continue
        title = case if metric in ("time", "rate", "bandwidth") else f"{case}: {metric}"
        cells = [shown(figures.get(peer), unit) for peer in peers]
        cells += [
            shown(figures[over] / figures[under]) if over in figures and figures.get(under) else ""
            for over, under in pairs
        ]
        table.append(f"| {title} | {' | '.join(cells)} |")
    return table


# The marker in front of a table of docs/benchmarks.md: "gpu", or a bench and its choices,
#   bench=NAME [options="--runs 4"] [cases=REGEX] [peers="A|B"] [ratios="A / B|C / B"]
RESULTS = re.compile(r"<!-- results: (.*) -->\n")
END_OF_RESULTS = "<!-- end of results -->\n"


def lines_for(marker):
    if marker == "gpu":
        return gpu_tables()
    try:
        return bench_table(**dict(word.split("=", 1) for word in shlex.split(marker)))
    except (TypeError, ValueError, re.error) as error:
        raise Stop(
            f"docs/benchmarks.md: '<!-- results: {marker} -->' cannot be parsed: {error}"
        ) from None


def command_results(arguments):
    parser_of("results").parse_args(arguments)
    page = ROOT / "docs" / "benchmarks.md"
    before, *tables = RESULTS.split(page.read_text())
    made = before
    for marker, text in zip(tables[::2], tables[1::2]):
        old, end, behind = text.partition(END_OF_RESULTS)
        if not end:
            raise Stop(
                f"docs/benchmarks.md: no '{END_OF_RESULTS.strip()}' after "
                f"'<!-- results: {marker} -->'"
            )
        made += (
            f"<!-- results: {marker} -->\n"
            + "\n".join(lines_for(marker))
            + "\n"
            + END_OF_RESULTS
            + behind
        )
    page.write_text(made)
    say(f"{page.relative_to(ROOT)}: {len(tables) // 2} tables")
