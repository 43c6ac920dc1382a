# SPDX-License-Identifier: Apache-2.0
"""The environment of the programs that ./dev starts."""

import os

from .checkout import PROGRAMS, ROOT
from .libtorch import venv

# Options for sanitizers; libtorch and its libraries are not instrumented. CMakePresets.json repeats
# them for ctest.
SANITIZERS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": f"suppressions='{ROOT / 'tests/harness/tsan.supp'}'"
    ":halt_on_error=1:second_deadlock_stack=1"
    ":die_after_fork=0"  # tests fork ranks, which start threads
    ":atexit_sleep_ms=50"  # the default is one second for every process
    # libtorch unlocks mutexes in instrumented code that it locked in code that is not instrumented;
    # Weft locks only through guards, which make no such mistakes.
    ":report_mutex_bugs=0",
}


def tools():
    """os.environ with the venv's cmake and ninja first on PATH, fetched programs last."""
    programs = [str(folder) for folder in PROGRAMS.glob("*/usr/bin")]
    return {
        **SANITIZERS,
        **os.environ,
        "PATH": ":".join([str(venv() / "bin"), os.environ["PATH"], *programs]),
    }
