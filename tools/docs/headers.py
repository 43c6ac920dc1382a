# SPDX-License-Identifier: Apache-2.0
"""Turns a header of Weft, whose comments are plain // comments, into what Doxygen documents."""

import re

import site_map
from declarations import head_of, scan

OWN_USE = "For Weft's own use"
LONG_OPENING = 3  # lines; shorter ones only say what the file is
TWO_MEMBERS = re.compile(r"(?P<type>[\w:<>, ]+?)\s+(?P<first>\w+(\{\}| = [^,;{}]+)),\s*(?P<second>\w+(\{\}| = [^,;{}]+));")


def escaped(text):
    """Plain text in which Doxygen finds no commands, tags or emphasis; `code` stays code."""

    def plain(part):
        part = re.sub(r"[\\@<>&%*]|(?<!\w)_(?=\w)|(?<=\w)_(?!\w)", lambda sign: "\\" + sign.group(), part)
        part = part.replace("file://", "file&#58;//")  # Doxygen would make it a link
        return re.sub(r"docs/[\w-]+\.md", lambda path: link_to(path.group()), part)

    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if index % 2 else plain(part) for index, part in enumerate(parts))


def link_to(path):
    """A link to a page, or the path of one that the site does not have."""
    page = site_map.pages().get(path)
    return f'\\ref {page} "{path}"' if page else path


def documentation(lines, margin=""):
    """A comment's lines in Doxygen's form; lines that are indented behind an empty one are code."""
    result = []
    in_code = False
    for index, text in enumerate(lines):
        indented = text.startswith("  ") and text.strip()
        before = lines[index - 1] if index else None
        after = next((later for later in lines[index:] if later.strip()), "")
        is_code = (indented and (in_code or before == "")) or (in_code and not text and after.startswith("  "))
        if is_code and not in_code:
            result.append("\\code{.cpp}")
        if in_code and not is_code:
            result.append("\\endcode")
        result.append(text[2:] if is_code else escaped(text))
        in_code = is_code
    if in_code:
        result.append("\\endcode")
    return "\n".join(f"{margin}/// {line}".rstrip() for line in result)


def belongs_to(topic):
    """Says to which topic a declaration belongs, and what a program includes for it."""
    return f"/// \\ingroup {topic.id}\n/// \\headerfile weft/{topic.name}.h"


def blocks_of(comments):
    """Comments on adjacent lines, without code in front of them, as lists."""
    blocks = []
    for comment in comments:
        if not comment.alone:
            continue
        last = blocks[-1][-1] if blocks else None
        if last and (last.line + 1, last.column, last.scope) == (comment.line, comment.column, comment.scope):
            blocks[-1].append(comment)
        else:
            blocks.append([comment])
    return blocks


def is_behind_member(comment):
    """True for a comment that describes the member in front of it on the same line."""
    if comment.alone or comment.text.startswith("namespace"):
        return False
    if comment.scope == "enum":
        return comment.behind != "{"
    return comment.scope in ("namespace", "class") and comment.between and comment.behind in (";", "}")


def is_hidden(declaration):
    """True for declarations that no reader looks up."""
    if declaration.access == "private":
        return True
    text = " ".join(declaration.text.split())
    if re.search(r"= ?delete;?$|\boperator\b.*= ?default;?$", text):
        return True
    if declaration.scope == "class":
        return bool(re.match(r"friend (class|struct)\b|static_assert\b|WEFT_FIELDS\b", text))
    return bool(re.match(r"\w+\(.*\) ?-> ?\w+<.*>;?$", head_of(text)))  # a deduction guide


class Converter:
    def __init__(self, text):
        self.text = text
        self.found = scan(text)
        self.found.comments = [one for one in self.found.comments if not one.text.startswith("SPDX-")]
        self.lines = text.split("\n")
        self.edits = []  # (start, end, new text)
        self.documented = set()  # the lines of declarations with a comment above them

    def replace(self, comment, new):
        self.edits.append((comment.start, comment.end, new))

    def blank(self, start, end):
        self.edits.append((start, end, re.sub(r"[^\n]", " ", self.text[start:end])))

    def line_start(self, offset):
        return self.text.rfind("\n", 0, offset) + 1

    def line_end(self, offset):
        end = self.text.find("\n", offset)
        return len(self.text) if end < 0 else end

    def with_comments(self, declaration):
        """(start, end) of a declaration with the comments above and behind it."""
        start, end = declaration.start, declaration.end
        first = self.line_start(start)
        if not self.text[first:start].strip():
            start = self.comment_above(first)
        rest = self.text[end : self.line_end(end)].strip()
        return start, self.line_end(end) if rest.startswith("//") else end

    def comment_above(self, start):
        """The start of the comment that ends directly above the line that begins at `start`."""
        while start > 0:
            above = self.line_start(start - 1)
            if not self.text[above:start].lstrip().startswith("//"):
                break
            start = above
        return start

    def convert(self, topic):
        blocks = blocks_of(self.found.comments)
        opening = blocks.pop(0) if blocks and blocks[0][0].start < self.text.find("#pragma once") else []
        self.convert_trailing(blocks)
        for block in blocks:
            if block[0].text.startswith(OWN_USE):
                self.hide_below(block)
            elif self.is_documentation(block):
                self.documented.add(block[-1].line + 1)
                margin = " " * block[0].column
                new = documentation([comment.text for comment in block], margin)
                if topic and block[0].scope == "namespace":
                    new += "\n" + belongs_to(topic)
                self.edits.append((block[0].start, block[-1].end, new.lstrip()))
        for declaration in self.found.declarations:
            if is_hidden(declaration) or site_map.is_hidden(declaration.name):
                self.blank(*self.with_comments(declaration))
            else:
                self.split(declaration)
        for start, end in self.found.bodies:
            self.blank(start, end)
        self.place_opening(opening, topic)
        return self.edited()

    def convert_trailing(self, blocks):
        """Converts comments behind members, which may go on in the lines below, out of `blocks`."""
        columns = {}
        for comment in self.found.comments:
            if is_behind_member(comment):
                columns[comment.line] = comment.column
                self.replace(comment, "///< " + escaped(comment.text))
        for block in [block for block in blocks if columns.get(block[0].line - 1) == block[0].column]:
            blocks.remove(block)
            for comment in block:
                self.replace(comment, "///< " + escaped(comment.text))

    def split(self, declaration):
        """Gives each of two members that are declared at once the comment above them."""
        text = self.text[declaration.start : declaration.end]
        two = TWO_MEMBERS.fullmatch(text)
        if two and two.group("type").count("<") == two.group("type").count(">"):
            kind, first, second = two.group("type", "first", "second")
            name = re.match(r"\w+", first).group()
            scope = declaration.name.rpartition("::")[0]
            new = f"{kind} {first};\n/// \\copydoc {scope}::{name}\n{kind} {second};"
            self.edits.append((declaration.start, declaration.end, new))

    def is_documentation(self, block):
        first, last = block[0], block[-1]
        follows = self.lines[last.line].strip() if last.line < len(self.lines) else ""
        if first.scope not in ("namespace", "class", "enum") or not first.between:
            return False
        return bool(follows) and not re.match(r"}|//|#(?!define)|namespace\b", follows) and not first.text.startswith("clang-format")

    def hide_below(self, block):
        """Leaves out the declarations below a comment, up to the next empty line."""
        below = [declaration for declaration in self.found.declarations if declaration.start > block[-1].end]
        depth = min((declaration.depth for declaration in below[:1]), default=0)
        first = next((one for one in sorted(below, key=lambda one: one.start)), None)
        if first is None:
            return
        depth, end = first.depth, block[-1].end
        for declaration in sorted(below, key=lambda one: one.start):
            if declaration.depth > depth:
                continue
            gap = self.text[end : declaration.start]
            if declaration.depth < depth or "\n\n" in gap or re.search(r"\b(public|protected|private):", gap):
                break
            end = self.with_comments(declaration)[1]
        self.blank(self.line_start(block[0].start), end)

    def place_opening(self, opening, topic):
        """Gives the header's opening comment to the class that it introduces, else to the topic."""
        words = documentation([comment.text for comment in opening])
        introduced = self.introduced(opening)
        if introduced is not None:
            self.edits.append((introduced, introduced, f"{words}\n{belongs_to(topic)}\n///\n" if topic else f"{words}\n///\n"))
        elif opening and topic and len(opening) >= LONG_OPENING:
            text = f"/// \\addtogroup {topic.id}\n/// \\details\n{words}"
            self.edits.append((opening[0].start, opening[-1].end, text))

    def introduced(self, opening):
        """The offset at which the opening comment belongs if it begins with a class's name and ':'."""
        said = opening[0].text if opening else ""
        for declaration in self.found.declarations:
            name = re.match(r"(?:class|struct)\s+(?:\[\[.*?\]\]\s*)?(?:WEFT_API\s+)?(\w+)[^;]*\{\}", head_of(declaration.text), re.DOTALL)
            if name and declaration.scope == "namespace" and re.match(rf"{name.group(1)}(<\w+>)?: ", said):
                return self.comment_above(self.line_start(declaration.start))
        return None

    def edited(self):
        """The text after all edits. Where edits overlap, the one that begins first wins, or the longer."""
        result, place = [], 0
        for start, end, new in sorted(self.edits, key=lambda edit: (edit[0], edit[0] != edit[1], -edit[1])):
            if start < place:
                continue
            result += [self.text[place:start], new]
            place = end
        return "".join(result) + self.text[place:]


def convert(text, topic=None):
    """The header's text for Doxygen. Its declarations belong to `topic`, if that is given."""
    return Converter(text).convert(topic)
