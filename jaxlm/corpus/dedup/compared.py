"""The part of a document by which it is compared with others: without what documents share by their kind.

Found by place and kind, never by frequency: the first comment of source code (a licence) and its imports; members that a
page of a reference says are inherited.
"""

import itertools
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
_HEADING = re.compile(r"(?:(?:\d+\.|[-*]) +)?#{1,6} (.*)")  # also in an item of a list
# Under a member, in TypeDoc and Scaladoc; the line after the second names the classes, that of the page first if it overrides.
_MARK = re.compile(r"\s*(?:(inherited from) \S+|definition classes)\s*$", re.I)
_TARGET = re.compile(r"\]\([^()\s]*\)")
_WORD = re.compile(r"\w+|[+/%&^~=<!]+")
_JUDGED = 50_000  # characters of a text: the search for lines takes the square
_FEW_WORDS = 20
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
    """Returns a page without the members that it says are inherited: lists up to the next heading, sections marked so."""
    if "nherited" not in text and "Definition Classes" not in text:
        return text
    lines = text.split("\n")
    title = next((heading[1] for heading in map(_HEADING.match, lines) if heading), "")
    own, section, inherited = [], 0, False
    for line, following in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        if len(line) <= _SHORT and _INHERITED.match(line) and not line.startswith("|") and not line.endswith("."):
            inherited = True
        elif _HEADING.match(line):
            section, inherited = len(own), False
        elif (mark := _MARK.match(line)) and (mark[1] or following.split()[:1] != title.split()[:1]):
            inherited = True
            del own[section:]
        if not inherited:
            own.append(line)
    rest = "\n".join(own)
    return rest if len(rest.split()) >= _FEW_WORDS else text  # "Inherited forms" may be what a page is about


def own_share(text: str, other: str) -> float:
    """Returns the share of a text's characters in lines that the other text does not have, however it wraps them."""
    text, other = text[:_JUDGED], other[: 2 * _JUDGED]
    others, there = f" {_folded(other)} ", set(map(_folded, other.split("\n")))
    lines = [line for line in map(_folded, text.split("\n")) if line]
    own = (len(line) for line in lines if line not in there and f" {line} " not in others)
    return sum(own) / max(1, sum(map(len, lines)))


def _folded(text: str) -> str:
    """Returns words and operators, without Markdown's marks and the targets of links."""
    return " ".join(_WORD.findall(_TARGET.sub("]", text.casefold())))
