# SPDX-License-Identifier: Apache-2.0
"""Finds comments, declarations and function bodies in a header of C++, without compiling it."""

import re
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*)
      | (?P<block>/\*.*?\*/)
      | (?P<directive>^[ \t]*\#(?:[^\n\\/]|\\.|\\\n|/(?!/))*)
      | (?P<raw>R"(?P<tag>\w*)\(.*?\)(?P=tag)")
      | (?P<string>"(?:\\.|[^"\\\n])*"|(?<!\w)'(?:\\.|[^'\\\n])+')
      | (?P<newline>\n)
      | (?P<space>[ \t]+)
      | (?P<word>\w+)
      | (?P<sign>.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
ACCESS = ("public", "protected", "private")


@dataclass
class Comment:
    """A // comment: one line of it."""

    start: int
    line: int
    column: int
    text: str  # without the slashes and the space behind them
    alone: bool  # no code in front of it
    scope: str  # as scope_of()
    between: bool  # no declaration has begun and not yet ended
    behind: str  # the last character of code in front of it

    @property
    def end(self):
        return self.start + len(self.source)

    source: str = ""


@dataclass
class Declaration:
    start: int
    end: int
    scope: str  # that it stands in: "namespace" or "class"
    depth: int
    text: str  # without comments; bodies are {}
    name: str  # qualified: "weft::Future::get"
    access: str


@dataclass
class Header:
    comments: list = field(default_factory=list)
    declarations: list = field(default_factory=list)
    bodies: list = field(default_factory=list)  # (start, end) between the braces of functions


def head_of(declaration):
    """A declaration without the template header, attributes and WEFT_API in front of it."""
    text = declaration.strip()
    while True:
        template = re.match(r"template\s*<", text)
        if template:
            depth, place = 1, template.end()
            while depth and place < len(text):
                if text[place] == "<":
                    depth += 1
                elif text[place] == ">" and text[place - 1] != "-":
                    depth -= 1
                place += 1
            text = text[place:].strip()
            continue
        shorter = re.sub(r"^(\[\[.*?\]\]|WEFT_API\b)\s*", "", text, flags=re.DOTALL)
        if shorter == text:
            return text
        text = shorter


def scope_of(declaration):
    """The kind of scope that a brace behind this text opens.

    "namespace", "class", "enum", "body" of a function, or "value" of a variable.
    """
    text = head_of(declaration)
    kind = re.match(r"(?:inline\s+)?(namespace|class|struct|union|enum)\b", text)
    if kind:
        return {"namespace": "namespace", "enum": "enum"}.get(kind.group(1), "class")
    if text.startswith("MSGPACK_API_VERSION_NAMESPACE"):
        return "namespace"
    return "body" if "(" in text and not text.rstrip().endswith("=") else "value"


def without_requirements(text):
    """The text without a requires clause in parentheses in front of it."""
    while True:
        clause = re.match(r"(requires|&&|\|\|)\s*!?\s*(?=\()", text)
        if not clause:
            return text
        depth, place = 0, clause.end()
        while place < len(text):
            depth += (text[place] == "(") - (text[place] == ")")
            place += 1
            if depth == 0:
                break
        text = text[place:].strip()


def name_of(declaration):
    """The name that a declaration introduces, as it is written there; "" if it has none."""
    text = without_requirements(head_of(declaration))
    kind = re.match(r"(?:inline\s+)?(?:namespace|class|struct|union|enum(?:\s+class)?|concept|using)\b", text)
    if kind:
        rest = re.sub(r"^(\s*(\[\[.*?\]\]|WEFT_API\b))*\s*", "", text[kind.end() :], flags=re.DOTALL)
        return re.match(r"[\w:]*", rest).group()
    function = re.search(r"(operator\s*[^\w\s(]+|operator\s+[\w:]+|operator\s*\(\)|~?[\w:]+)\s*\(", text)
    variable = re.search(r"(\w+)\s*(<[^=]*>)?\s*(\{\}|=[^=]|;|$)", text)
    if function and not (variable and variable.start() < function.start()):
        return function.group(1)
    return variable.group(1) if variable else ""


def scan(text):
    """The Header that the text is."""
    found = Header()
    scopes = ["namespace"]
    names = []  # of the scopes
    access = ["public"]  # in each scope
    opened = []  # for each brace: the offset behind it, and the declaration that it belongs to
    begin, words, parens = None, "", 0
    line, line_start, code = 1, 0, ""

    def end_declaration(end):
        nonlocal begin, words
        if begin is not None and scopes[-1] in ("namespace", "class"):
            name = "::".join([name for name in names if name] + [name_of(words)])
            found.declarations.append(Declaration(begin, end, scopes[-1], len(scopes), words, name, access[-1]))
        begin, words = None, ""

    for match in TOKEN.finditer(text):
        kind, token = match.lastgroup, match.group()
        if kind in ("newline", "space"):
            words += " " if words else ""
        elif kind == "comment":
            found.comments.append(
                Comment(
                    match.start(),
                    line,
                    match.start() - line_start,
                    re.sub(r"^//+ ?", "", token),
                    not code,
                    scopes[-1],
                    begin is None,
                    code[-1:],
                    token,
                )
            )
        elif kind == "directive":
            code += token
        elif kind != "block":
            code += token
            if token == "{":
                inside = scopes[-1] in ("body", "value") or parens > 0
                scopes.append("value" if inside else scope_of(words))
                opened.append((match.end(), begin, words, parens))
                names.append(name_of(words) if scopes[-1] in ("namespace", "class") else "")
                access.append("private" if scopes[-1] == "class" and head_of(words).startswith("class") else "public")
                if scopes[-1] not in ("body", "value"):
                    begin, words = None, ""
                parens = 0
            elif token == "}" and len(scopes) > 1:
                end_declaration(match.start())
                scope = scopes.pop()
                names.pop()
                access.pop()
                place, begin, words, parens = opened.pop()
                words += "{}"
                if scope == "body":
                    found.bodies.append((place, match.start()))
                    end_declaration(match.end())
                elif scope == "namespace":
                    begin, words = None, ""
            elif token == ";" and parens == 0:
                end_declaration(match.end())
            elif token == ":" and words.strip() in ACCESS:
                access[-1] = words.strip()
                begin, words = None, ""
            elif scopes[-1] != "enum":
                begin = match.start() if begin is None else begin
                words += token
                parens += (token in "([") - (token in ")]") if len(token) == 1 else 0
        newlines = token.count("\n")
        if newlines:
            line, line_start, code = line + newlines, match.start() + token.rindex("\n") + 1, ""
    return found
