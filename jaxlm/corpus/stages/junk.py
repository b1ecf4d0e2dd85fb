"""Removes known junk and what the user's patterns match, by match, by line or by document. `jaxlm audit` suggests patterns."""

import difflib
import pathlib
import re

from jaxlm.config import ConfigError
from jaxlm.corpus.stage import Document, Edits, Remove, Settings, Stage
from jaxlm.corpus.stages.junk_patterns import GROUPS, Shown


class Junk(Stage):
    """Removes what the patterns match. Removes a document if nothing is left; the reason is the last pattern's name."""

    def __init__(self, settings: Settings, folder: pathlib.Path):
        super().__init__(settings, folder)
        self._find = {p: GROUPS[p].matches if p in GROUPS else _compile(p).finditer for p in settings.patterns}

    @classmethod
    def build(cls, settings: Settings, folder: pathlib.Path) -> None:
        cls(settings, folder)

    def apply(self, document: Document, edits: Edits) -> Remove | None:
        is_code = document.metadata.get("format") == "code"
        for name in self.settings.patterns:
            if name in GROUPS and is_code:  # a program may name any token; the user's own patterns hold everywhere
                continue
            matches = list(self._find[name](document.text))
            if name in GROUPS and matches and self.settings.level == "line":
                shown = Shown(document.text)
                matches = [match for match in matches if not shown.at(*match.span())]
            if len(matches) < self.settings.min_hits:
                continue
            detail = f"{len(matches)} matches, the first {matches[0][0][:80]!r}"
            if self.settings.level == "document":
                return Remove(name, detail)
            cut = _cut_lines if self.settings.level == "line" else _cut_matches
            document.text, n = cut(document.text, matches)
            if not document.text.strip():
                return Remove(name, detail)
            edits[name] += n
        return None


def _compile(pattern: str) -> re.Pattern[str]:
    near = difflib.get_close_matches(pattern, GROUPS, n=1, cutoff=0.8)
    if near:
        raise ConfigError(
            f"prepare.stages.junk.patterns has {pattern!r}: did you mean {near[0]!r}? (as an expression: '(?:{pattern})')"
        )
    try:
        compiled = re.compile(pattern, re.MULTILINE)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"prepare.stages.junk.patterns has {pattern!r}, which is no regular expression ({error}) and no group; groups are "
            f"{', '.join(GROUPS)}"
        ) from None
    if compiled.match(""):
        raise ConfigError(f"prepare.stages.junk.patterns has {pattern!r}, which matches everything; make it match less")
    return compiled


def _cut_lines(text: str, matches: list[re.Match[str]]) -> tuple[str, int]:
    """Returns the text without the lines that a match touches, and how many lines were removed."""
    pieces, lines, position = [], 0, 0
    for match in matches:
        # What `\s` took of the lines around a match does not count as touching them.
        hit = len(match[0]) - len(match[0].lstrip())
        start, end = match.start() + hit, max(match.start() + hit, match.start() + len(match[0].rstrip()))
        if end <= position:
            continue
        begin = max(position, text.rfind("\n", 0, start) + 1)
        stop = text.find("\n", end) + 1 or len(text)
        pieces.append(text[position:begin])
        lines += text.count("\n", begin, stop - 1) + 1
        position = stop
    return "".join([*pieces, text[position:]]), lines


def _cut_matches(text: str, matches: list[re.Match[str]]) -> tuple[str, int]:
    """Returns the text without the matches (their group `keep` stays), and the number of matches."""
    pieces, position = [], 0
    for match in matches:
        pieces.append(text[position : match.start()])
        keep = match.groupdict().get("keep") or ""
        pieces.append(keep)
        position = match.end()
        before = text[match.start() - 1 : match.start()]
        if not keep and text[position : position + 1] == " " and before in ("", " ", "\n"):
            position += 1  # one of the two spaces around it
    return "".join([*pieces, text[position:]]), len(matches)
