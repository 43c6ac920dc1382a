#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints a header or a page of Weft in the form in which Doxygen documents it.

usage: filter.py FILE   (Doxygen calls it; tools/docs/build.py says so)
"""

import sys
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))

import headers
import pages
import site_map

path = Path(sys.argv[1]).resolve()
name = str(path.relative_to(site_map.ROOT))
text = path.read_text()
if path.suffix == ".md":
    sys.stdout.write(pages.convert(text, name))
else:
    sys.stdout.write(headers.convert(text, site_map.topic_of(name)))
