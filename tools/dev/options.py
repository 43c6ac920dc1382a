# SPDX-License-Identifier: Apache-2.0
"""The command line options that several commands share."""

import argparse
import os

PRESETS = ["dev", "optimized", "cpu", "release", "profile", "asan", "tsan"]
BUILDING = ("preset", "compiler", "cuda", "jobs")


def parser_of(command, *common, preset="dev", **settings):
    """A parser for a command, with the common options that `common` names.

    The command adds its own options.
    """
    parser = argparse.ArgumentParser(prog=f"./dev {command}", allow_abbrev=False, **settings)
    if "preset" in common:
        parser.add_argument("--preset", default=preset, choices=PRESETS)
    if "compiler" in common:
        parser.add_argument(
            "--compiler",
            choices=["clang", "gcc"],
            help="default: clang for the presets dev, asan and tsan, gcc for the others",
        )
    if "cuda" in common:
        parser.add_argument(
            "--cuda",
            default="auto",
            choices=["auto", "system", "pip", "off"],
            help="where nvcc comes from",
        )
    if "jobs" in common:
        parser.add_argument(
            "--jobs",
            type=int,
            default=os.cpu_count(),
            help="compile jobs at a time; tests run twice as many, since they mostly wait",
        )
    return parser


def add_nproc(parser, default):
    parser.add_argument(
        "--nproc-per-node", "--nproc_per_node", default=default, metavar="N", help="ranks to start"
    )
