# SPDX-License-Identifier: Apache-2.0
"""./dev release: packs a release's files and publishes them, or says what it would do."""

import hashlib
import re
import shlex
import shutil
import subprocess

from .build import build, build_folder
from .checkout import BUILD, ROOT
from .console import Stop, run, say
from .environment import tools
from .libtorch import DEFAULT_TORCH, choose_torch
from .options import BUILDING, parser_of
from .wheel import pack_wheel, weft_version

OLDEST_RELEASED_TORCH = "2.11.0"


def git(*words):
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def notes_of(version):
    """The changelog's section about a version; None if it has none with a date."""
    text = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## \[|\Z)",
        text,
        re.MULTILINE | re.DOTALL,
    )
    return found.group(1).strip() if found else None


def obstacles(version):
    """The reasons why this checkout cannot be released as it is."""
    if git("status", "--porcelain"):
        yield "files are changed or not tracked: commit them"
    if not notes_of(version):
        yield f"CHANGELOG.md has no section '## [{version}] - DATE' (docs/releases.md)"
    if git("tag", "--list", f"v{version}"):
        yield f"the tag v{version} exists: set the next version in base/version.h"


def publishing(version, files):
    """The commands that publish the files."""
    tag = f"v{version}"
    return [
        ["git", "tag", "--annotate", tag, "--message", f"Weft {version}"],
        ["git", "push", "origin", tag],
        ["gh", "release", "create", tag, "--verify-tag", "--notes-file", "NOTES.md", *files],
    ]


def make_files(options, folder):
    """Builds and packs what a release has; returns the files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for torch in (DEFAULT_TORCH, OLDEST_RELEASED_TORCH):
        choose_torch(torch)
        say(f"packing for torch {torch}")
        build(options, ["installed", "weft_python"])
        built = build_folder(options)
        pack_wheel(built, folder)
        run(
            ["cpack", "--config", built / "CPackConfig.cmake", "-B", folder], cwd=built, env=tools()
        )
        shutil.rmtree(folder / "_CPack_Packages", ignore_errors=True)
    files = sorted(folder.iterdir())
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (folder / "SHA256SUMS").write_text("".join(sums))
    return [file.name for file in files] + ["SHA256SUMS"]


def command_release(arguments):
    parser = parser_of("release", *BUILDING, preset="optimized")
    doing = parser.add_mutually_exclusive_group()
    doing.add_argument(
        "--dry-run", action="store_true", help="only say what would be done (default)"
    )
    doing.add_argument("--files", action="store_true", help="make the files, and publish nothing")
    doing.add_argument("--publish", action="store_true", help="make the files, tag and publish")
    options = parser.parse_args(arguments)
    version = weft_version()
    folder = BUILD / "release" / version
    found = list(obstacles(version))
    for obstacle in found:
        say(f"not ready: {obstacle}")
    if options.publish and found:
        raise Stop(f"Weft {version} is not published")
    if options.files or options.publish:
        files = make_files(options, folder)
        (folder / "NOTES.md").write_text(f"{notes_of(version) or 'not released'}\n")
        say(f"made {', '.join(files)} in {folder}")
    else:
        files = ["torch_weft-*.whl", "weft-*.tar.gz", "weft_*.deb", "SHA256SUMS"]
        say(f"would make, in {folder}: {' '.join(files)}")
    for command in publishing(version, files):
        if options.publish:
            run(command, cwd=folder)
        else:
            say(f"would run: {shlex.join(command)}")
