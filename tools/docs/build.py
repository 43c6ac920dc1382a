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


def summaries(page, file):
    """(address, text) of each summary of a class or a member in a list of a page."""
    row = re.compile(r'<tr class="memdesc:([^"]*)">.*?<td class="mdescRight">(.*?)</td>', re.DOTALL)
    for match in row.finditer(page):
        before = page[: match.start()]
        link = re.search(r'href="([^"#]+)">[^<]*</a>[^\n]*\s*$', before[before.rfind("<tr") :])
        address = f"{file}#{match.group(1)}" if match.group(1) else link and link.group(1)
        text = re.sub(r'<a [^>]*>More...</a>|<[^>]+>', "", match.group(2))
        if address:
            yield address, " ".join(html.unescape(text).split())


class NamesIndex:
    """The search's entries for the names of the reference, from Doxygen's tag file."""

    def __init__(self, tags, folder):
        compounds = [one for one in ElementTree.parse(tags).getroot() if one.get("kind") != "page"]
        self.classes = {one.findtext("name"): one for one in compounds if one.get("kind") in ("class", "struct", "union")}
        self.pages = {file.name: file.read_text() for file in folder.glob("*.html")}
        self.summaries = {address: text for file, page in self.pages.items() for address, text in summaries(page, file)}
        self.found = {}  # (name, address): [name, kind, address, summary]
        self.enumerators = set()
        self.topics = {}  # page: the place of its topic
        for compound in compounds:
            self.add_compound(compound)

    def entries(self):
        """The entries in the order of the topics."""
        return sorted(self.found.values(), key=lambda entry: self.topics.get(entry[2].partition("#")[0], len(self.topics)))

    def undocumented(self):
        """Enumerators without documentation, of which Doxygen does not warn."""
        return sorted(self.enumerators - {name for name, _ in self.found})

    def add(self, name, kind, page, anchor=None):
        if anchor is None or f'id="{anchor}"' in self.pages[page]:
            address = f"{page}#{anchor}" if anchor else page
            self.found.setdefault((name, address), [name, kind, address, self.summaries.get(address, "")])

    def add_compound(self, compound):
        kind, name, page = compound.get("kind"), compound.findtext("name"), compound.findtext("filename")
        if kind == "group":
            page = page.removesuffix(".html") + ".html"
            place = list(site_map.TOPICS.values()).index(compound.findtext("title"))
            shown = [self.classes[one.text].findtext("filename") for one in compound.findall("class")]
            self.topics.update({file: place for file in [page, *shown]})
            self.add(compound.findtext("title"), "topic", page)
            for member in compound.findall("member[@kind='define']"):
                self.add(member.findtext("name"), "macro", page, member.findtext("anchor"))
        elif kind == "namespace":
            self.add_members(compound, name)
        elif name in self.classes:
            self.add(name, kind, page)
            if not name.startswith(BASES):
                self.add_members(compound, name, page)
            for base in compound.findall("base"):
                if inherited := self.classes.get(re.sub(r"<.*", "", base.text).strip()):
                    self.add_members(inherited, name, page)

    def add_members(self, compound, scope, page=None):
        """Adds members under the scope's name: on its page if they are there, as inherited ones are, else on their own."""
        for member in compound.findall("member"):
            name, anchor = member.findtext("name"), member.findtext("anchor")
            if name.startswith(("~", "operator")):
                continue
            full = name if name.startswith(f"{scope}::") else f"{scope}::{name}"
            here = page if page and f'id="{anchor}"' in self.pages[page] else member.findtext("anchorfile")
            self.add(full, member.get("kind"), here, anchor)
            for value in member.findall("enumvalue"):
                self.enumerators.add(f"{full}::{value.text}")
                self.add(f"{full}::{value.text}", "value", value.get("file"), value.get("anchor"))


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
    """Builds the site and puts it in the place of `folder`; returns the exit code.

    If there is an error, `folder` stays as it is.
    """
    with tempfile.TemporaryDirectory() as temporary:
        work, site = Path(temporary), Path(temporary) / "site"
        site.mkdir()
        (work / "header.html").write_text((HERE / "page.html").read_text().replace("@navigation@", navigation()))
        result = subprocess.run(["doxygen", "-"], input=settings(site, work), text=True, cwd=ROOT)
        if result.returncode:
            return result.returncode
        remove_leftovers(site)
        names = NamesIndex(work / "names.xml", site)
        if names.undocumented():
            print("\n".join(f"error: {name} is not documented." for name in names.undocumented()), file=sys.stderr)
            return 1
        index = names.entries() + pages_index()
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
