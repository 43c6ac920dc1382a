# SPDX-License-Identifier: Apache-2.0
"""Turns a page, Markdown as GitHub shows it, into Markdown as Doxygen reads it.

Headings get the anchors that GitHub gives them, with the page's name in front, since anchors of Doxygen are unique in a site.
Links between pages, and to headers that the reference shows, become Doxygen's. Links to other files of the repository become
text.
"""

import posixpath
import re

import site_map

SECTIONS = 3  # a page with more has a table of contents
FENCE = re.compile(r"^ *(```|~~~)")
HEADING = re.compile(r"^(#{1,6}) +(.*?) *#*$")
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def slug(heading):
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"`|\*|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchor(page, heading_slug):
    return f"{page}-{heading_slug}"


def reference(target, path, pages, topics):
    """What Doxygen's @ref names for a link's target; None for a file that is not in the site."""
    file, _, fragment = target.partition("#")
    file = posixpath.normpath(posixpath.join(posixpath.dirname(path), file)) if file else path
    if file in pages:
        return anchor(pages[file], fragment) if fragment else pages[file]
    if file.startswith("include/weft/"):
        return "topic_" + posixpath.basename(file).removesuffix(".h")
    return next((topic.id for topic in topics if file in topic.headers), None)


def convert_text(text, path, pages, topics):
    """Converts text outside of code blocks."""

    def link(match):
        words, target = " ".join(match.group(1).split()), match.group(2)  # Doxygen's end with the line
        if re.match(r"[a-z]+:", target):
            return match.group()
        name = reference(target, path, pages, topics)
        return f"[{words}](@ref {name})" if name else words

    def code(match):
        words = match.group(2)
        inside = words.strip()
        name = reference(inside, "README.md", pages, topics) if inside.endswith(".md") else None
        if name and pages.get(path) != name:
            return f"[{inside}](@ref {name})"
        ticks = "``" if "'" in words else match.group(1)
        return f"{ticks}{words}{ticks}"

    result = []
    # Links first, as their words may be code.
    for index, part in enumerate(re.split(r"(\[(?:[^\[\]`]|`[^`]*`)*\]\([^()\s]+\))", text)):
        if index % 2:
            result.append(LINK.sub(link, part))
            continue
        for place, piece in enumerate(re.split(r"((?<!`)(?:``[^`].*?``|`[^`]+`)(?!`))", part, flags=re.DOTALL)):
            if place % 2:
                result.append(re.sub(r"^(`+)(.*?)`+$", code, piece, flags=re.DOTALL))
            else:
                result.append(re.sub(r"[\\@](?=\w)|<(?=[A-Za-z/])|&(?!\w+;)", lambda sign: "\\" + sign.group(), piece))
    return "".join(result)


def lines_of(text, name):
    """(line, kind, anchor) of each line: kind is "code", "prose" or "heading", which has an anchor."""
    seen, fence = {}, None
    for number, line in enumerate(text.split("\n")):
        mark = FENCE.match(line)
        if mark and fence in (None, mark.group(1)):
            fence = None if fence else mark.group(1)
            yield line, "code", None
        elif fence or not HEADING.match(line):
            yield line, "code" if fence else "prose", None
        else:
            own = slug(HEADING.match(line).group(2))
            count = seen[own] = seen.get(own, -1) + 1
            yield line, "heading", None if number == 0 else anchor(name, own + (f"-{count}" if count else ""))


def sections(text, name):
    """(heading, anchor, text) of each section of a page; of its first lines heading and anchor are None."""
    result = [[None, None, []]]
    for line, kind, place in lines_of(text, name):
        if kind == "heading" and place:
            result.append([HEADING.match(line).group(2), place, []])
        elif kind != "heading":
            result[-1][2].append(line)
    return [(heading, place, "\n".join(lines)) for heading, place, lines in result]


def convert(text, path):
    """The page's text for Doxygen."""
    pages, topics = site_map.pages(), site_map.topics()
    name = pages[path]
    result, prose = [], []

    def flush():
        if prose:
            result.append(convert_text("\n".join(prose), path, pages, topics))
            prose.clear()

    has_contents = len(sections(text, name)) > SECTIONS
    for line, kind, place in lines_of(text, name):
        if kind == "prose":
            prose.append(line)
            continue
        flush()
        if kind == "heading":
            level, words = HEADING.match(line).groups()
            label = place or ("" if name == "index" else name)  # the main page has its name already
            line = f"{level} {convert_text(words, path, pages, topics)}" + (f" {{#{label}}}" if label else "")
            if place is None and has_contents:
                line += "\n\n[TOC]\n"
        result.append(line)
    flush()
    return "\n".join(result)
