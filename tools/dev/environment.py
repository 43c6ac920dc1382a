"""The environment in which ./dev starts the programs that it has built or installed."""

import os

from .checkout import PROGRAMS, ROOT
from .libtorch import venv

# For builds that have them. libtorch and its libraries are not instrumented. CMakePresets.json says the same to ctest.
SANITIZERS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": f"suppressions='{ROOT / 'tests/harness/tsan.supp'}':halt_on_error=1:second_deadlock_stack=1"
    ":die_after_fork=0"  # ranks that are forked have threads
    ":atexit_sleep_ms=50"  # each process would wait for a second at its end
    ":report_mutex_bugs=0",  # libtorch locks out of the sanitizer's sight what it then unlocks in it; Weft locks by guards only
}


def tools():
    """The environment with the venv's cmake and ninja first, and what fetch_programs() unpacked last."""
    programs = [str(folder) for folder in PROGRAMS.glob("*/usr/bin")]
    return {
        **SANITIZERS,
        **os.environ,
        "PATH": ":".join([str(venv() / "bin"), os.environ["PATH"], *programs]),
    }
