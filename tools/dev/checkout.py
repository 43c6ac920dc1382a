# SPDX-License-Identifier: Apache-2.0
"""The folders of this checkout and the locks on its builds."""

import contextlib
import fcntl
import os
import pwd
import shlex
from pathlib import Path

from .console import Stop, say

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
PROGRAMS = BUILD / "programs"


def user_name(user):
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


@contextlib.contextmanager
def lock(name):
    """Holds a lock file, so that several ./dev do not install or build at the same time."""
    path = BUILD / f".{name}.lock"
    try:
        BUILD.mkdir(exist_ok=True)
        opened = open(path, "w")
    except PermissionError:  # an earlier run was made with sudo
        taken = next(place for place in (path, BUILD, ROOT) if place.exists())
        folder = ROOT if taken == ROOT else BUILD
        raise Stop(
            f"{folder} belongs to {user_name(taken.stat().st_uid)}: "
            f"sudo chown -R {user_name(os.geteuid())} {shlex.quote(str(folder))}, or use sudo again"
        ) from None
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another ./dev ({name}) to finish")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
