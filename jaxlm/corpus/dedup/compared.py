"""The part of a document by which it is compared with others: without what documents share by their kind.

Found by place and kind, never by frequency: the first comment of source code (a licence) and its imports; members that a
page of a reference says are inherited.
"""

import re

from jaxlm.corpus.stage import Document

_COMMENT = re.compile(
    r"\s*(?:#(?!include|define|if|pragma)|//|--(?!\w)|;|%|\*|/\*|\*/|<!--|-->|\(\*|\{-|\.\. |'|REM\b|dnl\b|$)"
)
_BLOCKS = (("/*", "*/"), ("<!--", "-->"), ("(*", "*)"), ("{-", "-}"))
_DOCSTRING = re.compile(r"\s*[rRuU]?(\"\"\"|''')")
_IMPORT = re.compile(
    r"\s*(?:import\b|from\s+\S+\s+import\b|#\s*include\b|using\s+[\w.:]+;|use\s+[\w:\\{}, *]+;|require\b|require_once\b|"
    r"package\s+[\w.]+;?|module\s+[\w.]+\s*(?:where)?$|extern crate\b|@import\b|const\s+.*=\s*require\()"
)
_INHERITED = re.compile(
    r"(?:#|.*\b(?:methods|fields|members|functions|properties|signals|types|classes)\b).*\binherited\b", re.I
)
_HEADING = re.compile(r"#{1,6} ")
_SHORT = 160  # characters of a line that announces inherited members


def of(document: Document) -> str:
    """Returns the text that counts."""
    kind = document.metadata.get("format")
    if kind == "code":
        return _own_code(document.text)
    if kind == "markdown" or document.metadata.get("from") == "html":
        return _own_members(document.text)
    return document.text


def _own_code(text: str) -> str:
    """Returns source code without its first comment and its imports."""
    lines, end, first = text.split("\n"), "", 0
    for first, line in enumerate(lines):
        if end:
            end = "" if end in line else end
        elif block := next((block for block in _BLOCKS if line.lstrip().startswith(block[0])), None):
            own = line.lstrip()[len(block[0]) :].partition(block[1])
            if own[2].strip():  # code follows the comment: a file of one line
                break
            end = "" if own[1] else block[1]
        elif (quote := _DOCSTRING.match(line)) and first < 3:
            end = "" if line.count(quote[1]) > 1 else quote[1]
        elif not _COMMENT.match(line):
            break
    return "\n".join(line for line in lines[first:] if not _IMPORT.match(line))


def _own_members(text: str) -> str:
    """Returns a page without the lists of members that it says are inherited, each up to the next heading."""
    if "nherited" not in text:
        return text
    own, inherited = [], False
    for line in text.split("\n"):
        if len(line) <= _SHORT and _INHERITED.match(line) and not line.startswith("|") and not line.endswith("."):
            inherited = True
        elif _HEADING.match(line):
            inherited = False
        if not inherited:
            own.append(line)
    return "\n".join(own)


def own_share(text: str, other: str) -> float:
    """Returns the share of a text's characters in lines that the other text does not have."""
    others = set(map(_folded, other.split("\n")))
    lines = [line for line in map(_folded, text.split("\n")) if line]
    return sum(len(line) for line in lines if line not in others) / max(1, sum(map(len, lines)))


def _folded(line: str) -> str:
    return " ".join(line.split()).casefold()
