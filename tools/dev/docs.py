# SPDX-License-Identifier: Apache-2.0
"""./dev docs: builds the site of documents and reference."""

import sys

from .checkout import BUILD, ROOT, lock
from .console import run, say
from .options import parser_of
from .setup import install_system_packages

SITE = BUILD / "docs" / "html"


def command_docs(arguments):
    parser = parser_of("docs")
    parser.add_argument(
        "--output", default=SITE, metavar="DIR", help="where the site goes (default: build/docs/html)"
    )
    options = parser.parse_args(arguments)
    with lock("setup"):
        install_system_packages("apt-docs.txt")
    with lock("docs"):
        run([sys.executable, ROOT / "tools" / "docs" / "build.py", options.output])
    say(f"built the site: open {options.output}/index.html")
