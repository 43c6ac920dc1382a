#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the site of ./dev docs and looks at it.

usage: site_test.py links     every link and anchor leads somewhere in the site, and no page loads anything from elsewhere
       site_test.py errors    a public name without a comment, and a link that leads nowhere, fail the build
       site_test.py browser   a browser opens it from disk; its search finds names and pages, and leads to them
       site_test.py filter    headers and pages become what Doxygen documents; needs neither Doxygen nor a browser
"""

import html.parser
import json
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import urllib.parse
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tools" / "docs"))

import headers
import pages
import site_map

BROWSERS = ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"]
SKIPPED = 77


def skip(reason):
    print(f"SKIP: {reason}")
    sys.exit(SKIPPED)


class Page(html.parser.HTMLParser):
    """The links, anchors and loaded files of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors, self.loaded = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors += [values[name] for name in ("id", "name") if values.get(name)]
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("link", "script", "img", "iframe", "source", "object"):
            self.loaded += [values[name] for name in ("href", "src", "data") if values.get(name)]


class Site(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="weft-site-")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.site = cls.folder / "site"
        built = subprocess.run(
            [sys.executable, ROOT / "tools" / "docs" / "build.py", cls.site], capture_output=True, text=True
        )
        if built.returncode:
            sys.exit(f"the site is not built:\n{built.stdout}{built.stderr}")


class Links(Site):
    def setUp(self):
        self.pages = {file.name: Page(file.read_text()) for file in self.site.glob("*.html")}

    def broken(self, here, target):
        """Why a link leads nowhere, or None."""
        url = urllib.parse.urlsplit(target)
        if url.scheme in ("http", "https", "mailto"):
            return None
        file = urllib.parse.unquote(url.path) or here
        if not (self.site / file).is_file():
            return "no such file"
        if url.fragment and urllib.parse.unquote(url.fragment) not in self.pages[file].anchors:
            return "no such anchor"
        return None

    def test_every_link_leads_to_a_page_and_an_anchor(self):
        links = [(here, target) for here, page in self.pages.items() for target in page.links]
        self.assertGreater(len(links), 1000)
        found = {(here, target, self.broken(here, target)) for here, target in links}
        self.assertEqual([one for one in sorted(found, key=str) if one[2]], [])

    def test_every_search_result_leads_to_a_page_and_an_anchor(self):
        text = (self.site / "search_index.js").read_text()
        index = json.loads(text.removeprefix("const SEARCH_INDEX = ").rstrip().removesuffix(";"))
        self.assertGreater(len(index), 300)
        found = {(name, address, self.broken("index.html", address)) for name, _, address, _ in index}
        self.assertEqual([one for one in sorted(found, key=str) if one[2]], [])

    def test_pages_load_only_files_of_the_site(self):
        for here, page in self.pages.items():
            for file in page.loaded:
                self.assertTrue((self.site / file).is_file(), f"{here} loads {file}")
        style = (self.site / "style.css").read_text()
        self.assertNotRegex(style, r"url\(|@import")

    def test_every_page_is_in_the_navigation(self):
        links = set(self.pages["index.html"].links)
        for path, name in site_map.pages().items():
            self.assertIn(f"{name}.html", links, path)
        for topic in site_map.topics():
            self.assertIn(f"group__topic__{topic.name.replace('_', '__')}.html", links)

    def test_only_public_names_are_shown(self):
        shown = " ".join(self.pages)
        self.assertNotRegex(shown, r"detail|AgentCore|Reducer|Refus|Generation|Outcome")
        for name in ("ProcessGroup", "Work", "DistributedDataParallel", "Future", "RRef", "rpc_1_1Agent", "AutogradContext", "Error"):
            self.assertRegex(shown, rf"classweft_1_1{name}\.html")

    def test_inherited_members_are_shown(self):
        for file, member in {"classweft_1_1DistributedDataParallel.html": "register_comm_hook", "classweft_1_1RRef.html": "sync",
                             "classweft_1_1ZeroRedundancyOptimizer.html": "overlap_with"}.items():
            self.assertRegex((self.site / file).read_text(), rf">{member}<", file)


class Errors(unittest.TestCase):
    """Builds of a copy of the sources that have a mistake."""

    def errors_with(self, *changes):
        """The errors of the build after (file, old text, new text) changes."""
        with tempfile.TemporaryDirectory(prefix="weft-site-") as folder:
            root = Path(folder)
            shutil.copytree(ROOT / "tools" / "docs", root / "tools" / "docs", ignore=shutil.ignore_patterns("__pycache__"))
            headers = [path for topic in site_map.topics() for path in (topic.public_header, *topic.headers)]
            for path in [*headers, *site_map.pages()]:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, root / path)
            for file, old, new in changes:
                text = (root / file).read_text()
                self.assertIn(old, text)
                (root / file).write_text(text.replace(old, new))
            run = subprocess.run([sys.executable, root / "tools" / "docs" / "build.py", root / "site"], capture_output=True, text=True)
            self.assertNotEqual(run.returncode, 0)
            self.assertFalse((root / "site").exists())
            return run.stderr

    def test_names_without_comments_and_links_without_anchors_are_errors(self):
        errors = self.errors_with(("engine/group/work.h", "  bool query() const;", "\n  bool query() const;"),
                                  ("docs/rpc.md", "\n\n", "\n\n[there](launching.md#no-such-heading)\n\n"))
        self.assertRegex(errors, r"work\.h:\d+: .*query\(\) const .* is not documented")
        self.assertIn("launching-no-such-heading", errors)

    def test_enumerators_without_comments_are_errors(self):
        errors = self.errors_with(("kernels/reduce_op.h", "// the product of all elements", ""))
        self.assertEqual(errors.strip(), "error: weft::ReduceOp::Product is not documented.")


def title_of(page):
    return re.search(r"<title>(.*?)</title>", page).group(1)


class Browser(Site):
    browser = None

    def open(self, file, script=""):
        """The page as the browser leaves it after running a script of the test in it."""
        page = (self.site / file).read_text()
        probe = self.site / f"probe-{file}"
        probe.write_text(page.replace("</body>", f"<script>addEventListener('load', () => {{{script}}});</script></body>"))
        command = [self.browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1200,900",
                   f"--user-data-dir={self.folder / 'profile'}", "--virtual-time-budget=5000", "--dump-dom", probe.as_uri()]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
        self.assertEqual(run.returncode, 0, run.stderr[-2000:])
        self.assertNotRegex(run.stderr, r"CONSOLE.*(Error|Refused|Failed|not found|net::)", file)
        return run.stdout

    def search(self, asked, then=""):
        typed = f"const field = document.getElementById('search'); field.value = {json.dumps(asked)}; field.dispatchEvent(new Event('input'));"
        return self.open("index.html", typed + then)

    def test_search_finds_names_and_leads_to_them(self):
        enter = "field.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}));"
        for asked, title in {"ProcessGroup": "weft::ProcessGroup", "DistributedDataParallel": "weft::DistributedDataParallel",
                             "rpc::init": "Remote calls", "all_reduce": "weft::ProcessGroup", "weft_fields": "Values as bytes",
                             "register_comm_hook": "weft::DistributedDataParallel"}.items():
            with self.subTest(asked):
                self.assertRegex(title_of(self.search(asked, enter)), rf"^{title}\b")

    def test_search_finds_text_of_pages(self):
        found = re.search(r'<ol id="results">(.*?)</ol>', self.search("WEFT_SOCKET_IFNAME"), re.DOTALL).group(1)
        self.assertIn("Environment variables", found)

    def test_search_says_when_nothing_is_found(self):
        self.assertIn("Nothing found", self.search("no such words anywhere"))

    def test_link_of_the_navigation_leads_to_its_page(self):
        page = self.open("index.html", "document.querySelector('#navigation a[href=\"rpc.html\"]').click();")
        self.assertEqual(title_of(page), "Remote calls - Weft")
        self.assertEqual(re.findall(r'<a href="([^"]*)" aria-current="page">', page), ["rpc.html"])

    def test_pages_are_drawn_with_their_style(self):
        say = ("document.title = [getComputedStyle(document.querySelector('header.bar')).position, "
               "document.querySelector('#navigation').getBoundingClientRect().width > 200, "
               "document.documentElement.scrollWidth <= innerWidth].join(' ');")
        for file in ("index.html", "rpc.html", "classweft_1_1ProcessGroup.html", "group__topic__rpc.html"):
            self.assertEqual(title_of(self.open(file, say)), "sticky true true", file)


class Filter(unittest.TestCase):
    def header(self, text):
        return headers.convert(text)

    def test_comment_above_a_declaration_becomes_documentation(self):
        self.assertEqual(self.header("namespace weft {\n// Does it.\nvoid f();\n}\n"), "namespace weft {\n/// Does it.\nvoid f();\n}\n")

    def test_comment_behind_a_member_becomes_documentation(self):
        text = "struct A {\n  int a = 0;  // the first\n              // of two\n  int b;  // the second\n};\n"
        self.assertEqual(self.header(text), text.replace("// ", "///< "))

    def test_comments_in_functions_are_left_alone(self):
        self.assertNotIn("///", self.header("inline int f() {\n  // Computes.\n  return 1;  // always\n}\n"))

    def test_section_comments_are_left_alone(self):
        self.assertNotIn("///", self.header("// About all of it.\n\nint f();\n"))

    def test_indented_lines_become_code(self):
        text = self.header("\n// Use it:\n//\n//   f(1);  // <T>\n//\n// Not twice.\nvoid f(int);\n")
        self.assertIn("/// \\code{.cpp}\n/// f(1);  // <T>\n/// \\endcode\n", text)

    def test_markup_in_comments_is_plain_text(self):
        self.assertIn("/// Gives a Future\\<T\\>, 50 \\% of \\*all, to \\@you: `a<b>`.", self.header("\n// Gives a Future<T>, 50 % of *all, to @you: `a<b>`.\nint f();\n"))

    def test_opening_comment_goes_to_the_class_it_names(self):
        text = self.header("// SPDX-License-Identifier: X\n// A: what it is.\n#pragma once\n\nstruct B {};\n// More.\nstruct A {\n};\n")
        self.assertLess(text.index("struct B"), text.index("/// A: what it is."))
        self.assertLess(text.index("/// A: what it is."), text.index("/// More."))

    def test_pages_in_comments_become_links(self):
        self.assertIn('/// See \\ref cuda_graphs "docs/cuda-graphs.md", not docs/x.md.',
                      self.header("\n// See docs/cuda-graphs.md, not docs/x.md.\nint f();\n"))

    def test_hidden_declarations_are_left_out(self):
        text = self.header("struct A {\n  // For Weft's own use.\n  void f();\n  void g() { h(); }\n\n  void i();\n  A(const A&) = delete;\n};\n"
                           "namespace weft::detail {\n// Hidden.\nint j();\n}\n")
        self.assertRegex(text, r"void i\(\)")
        self.assertNotRegex(text, r"\b[fghj]\(|delete|Hidden")

    def test_line_numbers_stay(self):
        text = (ROOT / "engine" / "group" / "process_group.h").read_text()
        for part in ("Work broadcast", "Work barrier"):
            self.assertLess(abs(text[: text.index(part)].count("\n") - self.header(text).split(part)[0].count("\n")), 20)

    def page(self, text):
        return pages.convert(text, "docs/rpc.md")

    def test_headings_get_the_anchors_of_github(self):
        text = self.page("# Remote calls\n\n## Workers that come & go\n\n## `sync`, async\n\n## `sync`, async\n")
        for anchor in ("{#rpc}", "{#rpc-workers-that-come--go}", "{#rpc-sync-async}", "{#rpc-sync-async-1}"):
            self.assertIn(anchor, text)

    def test_links_between_pages_become_references(self):
        text = self.page("# A\n\n[a](autograd.md) [b](data-parallel.md#checkpoints) [c](#here) [d](../LICENSE) [e](../README.md) [f](https://a.b/c)\n")
        self.assertIn("[a](@ref autograd) [b](@ref data_parallel-checkpoints) [c](@ref rpc-here) d [e](@ref index) [f](https://a.b/c)", text)

    def test_words_of_a_link_stay_on_one_line(self):
        self.assertIn("see [a b](@ref autograd) now", self.page("# A\n\nsee [a\nb](autograd.md) now\n"))

    def test_code_in_pages_is_left_alone(self):
        text = "\n```cpp\nf<T>();  // @x [a](autograd.md)\n```\n"
        self.assertEqual(self.page(text), text)

    def test_sections_have_their_own_text(self):
        text = "# Title\nintro\n## One\nfirst\n```\n# no heading\n```\n"
        self.assertEqual(pages.sections(text, "p"), [(None, None, "intro"), ("One", "p-one", "first\n```\n# no heading\n```\n")])

    def test_links_of_pages_name_files_that_exist(self):
        for path in site_map.pages():
            text = re.sub(r"^ *```.*?^ *```|`[^`\n]*`", "", (ROOT / path).read_text(), flags=re.MULTILINE | re.DOTALL)
            for _, target in pages.LINK.findall(text):
                if not re.match(r"[a-z]+:|#", target):
                    file = (ROOT / path).parent / target.partition("#")[0]
                    self.assertTrue(file.exists(), f"{path} links to {target}")

    def test_every_hidden_name_exists(self):
        text = "\n".join((ROOT / path).read_text() for topic in site_map.topics() for path in topic.headers)
        for patterns in site_map.HIDDEN.values():
            for pattern in patterns:
                name = pattern.rpartition("::")[2].rstrip("*")
                self.assertRegex(text, rf"\b{re.escape(name)}", f"tools/docs/site_map.py hides {pattern}, which no header has")


def main():
    if len(sys.argv) != 2 or sys.argv[1] not in ("links", "errors", "browser", "filter"):
        sys.exit(__doc__)
    case = {"links": Links, "errors": Errors, "browser": Browser, "filter": Filter}[sys.argv[1]]
    if case is not Filter and not shutil.which("doxygen"):
        skip("no doxygen: ./dev docs installs it")
    if case is Browser:
        Browser.browser = next(filter(None, map(shutil.which, BROWSERS)), None) or skip(f"no browser: install {' or '.join(BROWSERS[:2])}")
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(case)
    sys.exit(not unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful())


if __name__ == "__main__":
    main()
