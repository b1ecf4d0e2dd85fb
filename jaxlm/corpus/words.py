"""Splits text into words and sentences by regular expressions, for our stages and (by `stages.heuristics`) datatrove's.

The expressions follow spaCy's rules where a stage's verdict depends on them, at 100 times spaCy's speed. A Chinese or
Japanese character is a word.
"""

import functools
import re

CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[^\W{CJK}]+(?:[.,]\d+)*|['’]\w{{1,2}}\b|\.\.+|--+|[^\w\s]|[{CJK}]")  # noqa: RUF001
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]»]*(?=\s)|[。！？]+[」』”’）]*")  # noqa: RUF001


@functools.lru_cache(maxsize=2)
def split(text: str) -> list[str]:
    """Returns the words and marks of a text. The stages of a document share this list: do not change it."""
    return _WORD.findall(text)


def sentence_ends(text: str) -> list[int]:
    """Returns the positions at which sentences end; the last is the end of the text without trailing white space."""
    ends = [m.end() for m in _SENTENCE_END.finditer(text)]
    end = len(text.rstrip())
    return ends if ends and ends[-1] >= end else [*ends, end]
