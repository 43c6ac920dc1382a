#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""weft-run under a terminal: ranks read from it, and Ctrl-C ends them.

usage: terminal.py WEFT_RUN
"""

import os
import pty
import sys

READER = "read line; echo got $line; trap 'echo interrupted; exit 5' INT; echo ready; while :; do sleep 0.05; done"

process, terminal = pty.fork()
if process == 0:
    os.execv(sys.argv[1], [sys.argv[1], "--nproc-per-node", "1", "sh", "-c", READER])

output = ""


def read_until(wanted):
    global output
    while wanted not in output:
        try:
            output += os.read(terminal, 4096).decode()
        except OSError:  # no process has the terminal open any more
            sys.exit(f"no '{wanted}' in:\n{output}")


os.write(terminal, b"one\n")
read_until("got one")
read_until("ready")
os.write(terminal, b"\x03")
read_until("interrupted")
read_until("ended by signal 2")
code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
if code != 128 + 2 or output.count("interrupted") != 1:
    sys.exit(f"exit code {code}:\n{output}")
