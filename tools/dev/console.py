# SPDX-License-Identifier: Apache-2.0
"""How ./dev speaks to its user and starts other programs."""

import subprocess


class Stop(Exception):
    """A failure with a message for the user; no traceback."""


def say(text):
    print(f"dev: {text}", flush=True)


def run(command, **options):
    """Runs a command; raises Stop with its exit code if it fails."""
    result = subprocess.run([str(part) for part in command], **options)
    if result.returncode != 0:
        raise Stop(
            f"'{' '.join(str(part) for part in command[:4])} …' exited with {result.returncode}"
        )
