"""Words and sentences by regular expressions, for datatrove's filters (through `stages.word_tokenizer`) and for our own stages.

datatrove's English word tokenizer is spaCy. These expressions follow its rules where the verdicts of the filters hang on
them (numbers, contractions, dots, dashes; each other mark alone), at about 100 times its speed, and add that a Chinese
or Japanese character is a word, as there are no spaces to go by.
"""

import functools
import re

CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[^\W{CJK}]+(?:[.,]\d+)*|['’]\w{{1,2}}\b|\.\.+|--+|[^\w\s]|[{CJK}]")  # noqa: RUF001
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]»]*(?=\s)|[。！？]+[」』”’）]*")  # noqa: RUF001


@functools.lru_cache(maxsize=2)
def split(text: str) -> list[str]:
    """Words and marks of a text, without white space. The stages of a document share one list: do not change it."""
    return _WORD.findall(text)


def sentence_ends(text: str) -> list[int]:
    """Where the sentences end; the last end is that of the text without the white space after it."""
    ends = [m.end() for m in _SENTENCE_END.finditer(text)]
    end = len(text.rstrip())
    return ends if ends and ends[-1] >= end else [*ends, end]
