# SPDX-License-Identifier: Apache-2.0
"""./dev format and ./dev lint."""

import json
import os
import re
import shlex
import subprocess
import sys

from .build import build_folder, configure
from .checkout import ROOT, lock
from .console import Stop, run
from .libtorch import venv
from .options import BUILDING, parser_of
from .setup import install_system_packages, install_venv, requirements


def sources(*patterns):
    """The repository's files that match. It stops if there is none.

    Without files clang-format would read its standard input and succeed.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    files = listed.stdout.splitlines()
    if listed.returncode != 0 or not files:
        raise Stop(
            f"git finds no {' '.join(patterns)} in {ROOT}: "
            f"{listed.stderr.strip() or 'the list is empty'}"
        )
    return files


def command_format(arguments):
    parser = parser_of("format")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if a file would change or has a misspelling; measure the prose"
    )
    options = parser.parse_args(arguments)
    with lock("setup"):
        install_system_packages()
        install_venv("format", requirements("pip-format.txt"))  # versions format differently
    files = sources("*.h", "*.cc", "*.cu", "*.cuh")
    mode = ["--dry-run", "-Werror"] if options.check else ["-i"]
    run([venv() / "bin" / "clang-format", *mode, *files], cwd=ROOT)
    if options.check:
        check_spelling()
        run([ROOT / "tools" / "prose.py"])


def check_spelling():
    with lock("setup"):
        install_venv("codespell", requirements("pip-codespell.txt"))
    run([venv() / "bin" / "codespell", *sources("*")], cwd=ROOT)  # reads .codespellrc


def clangs_view(database):
    """The compile commands without options of GCC only and without precompiled headers."""
    for entry in database:
        words = shlex.split(entry["command"])
        for name, count in (("-Xclang", 2), ("-include", 2), ("--param", 2), ("-Winvalid-pch", 1)):
            while name in words:
                place = words.index(name)
                del words[place : place + count]
        entry["command"] = shlex.join(words)
    return database


def command_lint(arguments):
    # The preset optimized compiles each source by itself.
    parser = parser_of("lint", *BUILDING, preset="optimized")
    parser.add_argument("files", nargs="*", help="default: every source that is compiled")
    options = parser.parse_intermixed_args(arguments)
    configure(options)
    database = json.loads((build_folder(options) / "compile_commands.json").read_text())
    compiled = {os.path.relpath(entry["file"], ROOT) for entry in database}
    files = options.files or [file for file in sources("*.cc") if file in compiled]
    if not files:
        raise Stop(f"{build_folder(options)} compiles none of the sources")
    run(["clang-tidy", "--version"], stdout=subprocess.DEVNULL)
    folder = build_folder(options) / "lint"
    folder.mkdir(exist_ok=True)
    (folder / "compile_commands.json").write_text(json.dumps(clangs_view(database)))
    parallel = ["xargs", "-d", "\\n", "-P", options.jobs, "-n", "1"]
    # g++'s commands lack the option by which clang checks the annotations of base/mutex.h.
    script = [*parallel, "clang-tidy", "--quiet", "--extra-arg=-Wthread-safety", "-p", folder]
    result = subprocess.run(
        [str(part) for part in script],
        input="\n".join(files),
        text=True,
        cwd=ROOT,
        stderr=subprocess.PIPE,
    )
    # For each file clang-tidy prints how many warnings it has suppressed.
    said = [
        line
        for line in result.stderr.splitlines()
        if not re.fullmatch(r"\d+ warnings? generated\.", line)
    ]
    print("\n".join(said), end="\n" if said else "", file=sys.stderr)
    if result.returncode != 0:
        raise Stop("clang-tidy found errors (above)")
