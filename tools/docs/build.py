#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the site of documents and reference.

usage: build.py FOLDER

Runs Doxygen over the public headers, README.md and docs/*.md (site_map.py lists them), then adds the navigation and the index
of the search. FOLDER is then the whole site: it may be opened from disk, or published as it is.
"""

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))

import pages
import site_map
from site_map import ROOT

HERE = Path(__file__).resolve().parent
BASES = ("weft::parallel::", "weft::rref::")  # their members are found under the names of derived classes
# In pages: scripts, and the link to a list for crawlers.
DOXYGENS_OWN = re.compile(r'<script type="text/javascript">.*?</script>\n?|<a href="doxygen_crawl.html"[^>]*></a>', re.DOTALL)
INDEX = "search_index.js"


def version():
    text = (ROOT / "base" / "version.h").read_text()
    return ".".join(re.search(rf"WEFT_VERSION_{part} (\d+)", text).group(1) for part in ("MAJOR", "MINOR", "PATCH"))


def topics_text(topics):
    """The topics' own documentation, for Doxygen."""
    parts = []
    for topic in topics:
        parts.append(f"/** \\defgroup {topic.id} {topic.title}\n\n\\code{{.cpp}}\n#include <weft/{topic.name}.h>\n\\endcode\n*/\n")
    return "\n".join(parts)


def version_of_doxygen():
    said = subprocess.run(["doxygen", "--version"], capture_output=True, text=True).stdout
    return tuple(int(part) for part in re.findall(r"\d+", said)[:2])


def settings(folder, work):
    """The Doxyfile of this build."""
    topics = site_map.topics()
    topics_file = work / "topics.dox"
    topics_file.write_text(topics_text(topics))
    inputs = [topics_file, HERE / "namespaces.dox", *(ROOT / path for path in site_map.pages()), *(ROOT / path for topic in topics for path in (topic.public_header, *topic.headers))]
    run_filter = f'"{sys.executable} {HERE / "filter.py"}"'
    return (HERE / "Doxyfile").read_text() + "\n".join(
        [
            "",
            f"PROJECT_NUMBER = {version()}",
            f"OUTPUT_DIRECTORY = {folder}",
            "INPUT = " + " ".join(f'"{path}"' for path in inputs),
            f"FILTER_PATTERNS = *.md={run_filter} *.h={run_filter}",
            f"STRIP_FROM_PATH = {ROOT}",
            f"USE_MDFILE_AS_MAINPAGE = {ROOT / 'README.md'}",
            f"LAYOUT_FILE = {HERE / 'layout.xml'}",
            f"HTML_HEADER = {work / 'header.html'}",
            f"HTML_FOOTER = {HERE / 'end.html'}",
            # examples/README.md is a page, and not the description of its folder.
            "IMPLICIT_DIR_DOCS = NO" if version_of_doxygen() >= (1, 10) else "",
            f"GENERATE_TAGFILE = {work / 'names.xml'}",
            "",
        ]
    )


def title_of(path):
    """A page's title, as text."""
    heading = (ROOT / path).read_text().split("\n", 1)[0]
    return re.sub(r"[`*]", "", heading.lstrip("# ").strip())


def page_groups():
    """{title: names of pages} in the order of the navigation."""
    names = site_map.pages().values()
    groups = {title: [name for name in group if name in names] for title, group in site_map.GROUPS.items()}
    listed = {name for group in groups.values() for name in group}
    return {**groups, "More": [name for name in names if name not in listed]}


def navigation():
    """The links to all pages and topics, in HTML."""
    names = {name: path for path, name in site_map.pages().items()}
    groups = page_groups()
    links = {title: [(f"{name}.html", title_of(names[name])) for name in group] for title, group in groups.items()}
    reference = [(f"group__{topic.id.replace('_', '__')}.html", topic.title) for topic in site_map.topics()]
    links["Reference"] = [*reference, ("annotated.html", "All classes"), ("namespaces.html", "All namespaces")]
    lines = []
    for title, entries in links.items():
        if entries:
            items = "".join(f'<li><a href="{address}">{html.escape(words)}</a></li>\n' for address, words in entries)
            lines.append(f"<h2>{title}</h2>\n<ul>\n{items}</ul>")
    return "\n".join(lines)


def names_index(tags, folder):
    """The search's entries for the names of the reference, from Doxygen's tag file; by topic."""
    compounds = [compound for compound in ElementTree.parse(tags).getroot() if compound.get("kind") != "page"]
    classes = {one.findtext("name"): one for one in compounds if one.get("kind") in ("class", "struct", "union")}
    text_of = {file.name: file.read_text() for file in folder.glob("*.html")}
    entries = {}  # (name, address): [name, kind, address, text]
    topics = {}  # file: place of its topic

    def add(name, kind, address):
        entries.setdefault((name, address), [name, kind, address, ""])

    def add_members(compound, scope, file=None):
        """Adds the members under the scope's name, on the page `file` if they are there (also inherited ones are)."""
        for member in compound.findall("member"):
            name, anchor = member.findtext("name"), member.findtext("anchor")
            page = file if file and f'id="{anchor}"' in text_of[file] else member.findtext("anchorfile")
            if member.get("protection") == "private" or name.startswith(("~", "operator")):
                continue
            if f'id="{anchor}"' in text_of[page]:
                add(name if name.startswith(f"{scope}::") else f"{scope}::{name}", member.get("kind"), f"{page}#{anchor}")

    for compound in compounds:
        kind, name, file = compound.get("kind"), compound.findtext("name"), compound.findtext("filename")
        if kind == "group":
            file = file.removesuffix(".html") + ".html"
            place = list(site_map.TOPICS.values()).index(compound.findtext("title"))
            topics.update({file: place, **{classes[one.text].findtext("filename"): place for one in compound.findall("class")}})
            add(compound.findtext("title"), "topic", file)
            for member in compound.findall("member"):
                if member.get("kind") == "define":
                    add(member.findtext("name"), "macro", f"{file}#{member.findtext('anchor')}")
        elif kind == "namespace":
            add_members(compound, name)
        elif name in classes:
            add(name, kind, file)
            if not name.startswith(BASES):
                add_members(compound, name, file)
            for base in compound.findall("base"):
                if inherited := classes.get(re.sub(r"<.*", "", base.text).strip()):
                    add_members(inherited, name, file)
    return sorted(entries.values(), key=lambda entry: topics.get(entry[2].partition("#")[0], len(topics)))


def plain(text):
    """Markdown without its marks, on one line."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(re.sub(r"^[|#>-]+|[`*|]|-{3,}", " ", text, flags=re.MULTILINE).split())


def pages_index():
    """The search's entries for each section of each page."""
    entries = []
    paths = {name: path for path, name in site_map.pages().items()}
    for name in [name for group in page_groups().values() for name in group]:
        path, title = paths[name], title_of(paths[name])
        for heading, anchor, text in pages.sections((ROOT / path).read_text(), name):
            words = title if heading is None else f"{title}: {plain(heading)}"
            entries.append([words, "page", f"{name}.html" + (f"#{anchor}" if anchor else ""), plain(text)])
    return entries


def remove_leftovers(site):
    """Removes what Doxygen writes for its own navigation and style: files, scripts in pages, pages without a link to them."""
    texts = {file.name: DOXYGENS_OWN.sub("", file.read_text()) for file in site.glob("*.html")}
    reached, new = set(), {"index.html"}
    while new:
        reached |= new
        new = {name for page in new for name in re.findall(r'href="([^"#]+)', texts[page]) if name in texts} - reached
    for file in site.iterdir():
        if file.name in reached:
            file.write_text(texts[file.name])
        else:
            file.unlink()


def build(folder):
    """Builds the site and puts it in the place of `folder`; returns Doxygen's exit code.

    If Doxygen finds an error, `folder` stays as it is.
    """
    with tempfile.TemporaryDirectory() as temporary:
        work, site = Path(temporary), Path(temporary) / "site"
        site.mkdir()
        (work / "header.html").write_text((HERE / "page.html").read_text().replace("@navigation@", navigation()))
        result = subprocess.run(["doxygen", "-"], input=settings(site, work), text=True, cwd=ROOT)
        if result.returncode:
            return result.returncode
        remove_leftovers(site)
        index = names_index(work / "names.xml", site) + pages_index()
        for file in ("style.css", "site.js"):
            shutil.copyfile(HERE / file, site / file)
        (site / INDEX).write_text(f"const SEARCH_INDEX = {json.dumps(index, ensure_ascii=False)};\n")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(site, folder)
    return 0


def main():
    parser = argparse.ArgumentParser(prog="build.py")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    if not shutil.which("doxygen"):
        sys.exit("no doxygen: ./dev docs installs it")
    if folder.exists() and any(folder.iterdir()) and not (folder / INDEX).exists():
        sys.exit(f"{folder} has files of something else: name an empty folder, or one of an earlier build")
    sys.exit(build(folder))


if __name__ == "__main__":
    main()
