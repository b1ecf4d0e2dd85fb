"""Prints the audit's findings as text: junk with examples, strings that are no junk, and what to do."""

from collections.abc import Sequence

from jaxlm.corpus.audit.audit import Finding
from jaxlm.host.console import print_table, say, share, table

_WIDTH, _TEXT_CHARS, _SOURCE_CHARS, _ID_CHARS = 100, 28, 12, 30  # of a line, and of columns in it
_PIECE = 40  # characters of a pattern in a line; repr may double them
_OWN_ROWS = 10  # of strings that are no junk


def show(findings: Sequence[Finding], patterns: Sequence[str], level: str) -> None:
    """Prints the junk with an example each, strings that are only characteristic of a source, and how to remove the junk."""
    junk = [finding for finding in findings if finding.is_junk]
    own = [finding for finding in findings if not finding.is_junk][:_OWN_ROWS]
    if junk:
        print("Junk, the worst first. Score 0 to 100: how surely it is junk, times how much of the source has it.\n")
        rows = [_short(finding) for finding in junk]
        head, *lines = table([list(rows[0]), *(list(row.values()) for row in rows)]).splitlines()
        print(head)
        for line, finding in zip(lines, junk, strict=True):
            print(line)
            for doc_id, text in finding.examples[:1]:
                print(" " * 7 + _clip(f"{_clip(doc_id, _ID_CHARS)}: {text}", _WIDTH - 7))
        print()
    if own:
        print("Characteristic of a source, no junk: leave it in.\n")
        print_table([_short(finding) for finding in own], as_json=False)
        print()
    if not junk:
        say("nothing looks like junk")
        return
    print('To remove the junk, put these lines into the config, name "junk" among its stages, and prepare')
    print("into another folder; for a folder of documents prepare.stages.junk.patterns is a flag:\n")
    print("c.prepare.stages.junk.patterns = (")
    for pattern in dict.fromkeys((*patterns, *(finding.pattern for finding in junk))):
        pieces = [repr(pattern[i : i + _PIECE]) for i in range(0, len(pattern), _PIECE)]
        print("    " + "\n    ".join(pieces) + ",")
    print(")")
    print("c.prepare.stages.junk.level = " + repr(level) + "  # what goes: match (alone) | line | document")


def _short(finding: Finding) -> dict[str, str]:
    return {
        "score": f"{finding.score:.1f}",
        "found": _clip(finding.text, _TEXT_CHARS),
        "what it is": finding.why,
        "source": _clip(finding.source, _SOURCE_CHARS),
        "times": f"{finding.count:,}",
        "in docs": share(finding.documents, round(finding.documents / finding.share_of_documents)),
    }


def _clip(text: str, chars: int) -> str:
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)  # no control characters
    return text if len(text) <= chars else text[: chars - 3] + "..."
