"""How a generated text falls apart: repeated n-grams, few different ones, the word from which it loops, known junk.

rep-n and distinct-n are those of Welleck et al. 2020 (arXiv:1908.04319, "seq-rep-n") and Li et al. 2016 (arXiv:1510.03055).
Words are what stands between white space; n-grams are of words, so that models with different tokenizers compare.
"""

from jaxlm.corpus.audit_patterns import GROUPS

_N = 4  # words of an n-gram whose repetition counts
_LOOP, _TIMES = 16, 3  # words of the longest loop; rounds of it that count as one
_FEWEST = 8  # words that such rounds have together, at least: "no no no" is speech
_SURE = 0.8  # a severity of `GROUPS`: of patterns that are junk in any text


def of_text(text: str) -> dict[str, float | int | None]:
    """Returns what tells of a text that degenerates.

    repetition: the share of its 4-grams of words that stood in it before; 0 for a text of fewer words.
    distinct_2: the share of its 2-grams of words that are different; 1 for a text of fewer words.
    degenerates_at: the number of words before it only repeats itself up to its end; None if it does not.
    junk: the share of its characters that known junk has (the groups of `corpus.audit_patterns` that are sure).
    """
    words = text.split()
    return {
        "repetition": round(1 - _different(words, _N), 4),
        "distinct_2": round(_different(words, 2), 4),
        "degenerates_at": degenerates_at(words),
        "junk": round(junk(text), 4),
    }


def _different(words: list[str], n: int) -> float:
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def degenerates_at(words: list[str]) -> int | None:
    """Returns how many words stand before a loop that lasts to the end of a text; None if it does not end in one.

    A loop is at most 16 words, three times or more, the last time perhaps cut short.
    """
    found = []
    for period in range(1, _LOOP + 1):
        start = len(words) - period
        while start > 0 and words[start - 1] == words[start - 1 + period]:
            start -= 1
        if len(words) - start >= max(_TIMES * period, _FEWEST) and start >= 0:
            found.append(start)
    return min(found, default=None)


def junk(text: str) -> float:
    """Returns the share of a text's characters that are known junk: chat tokens, labels of data sets, <unk>, U+FFFD."""
    hit = bytearray(len(text))
    for group in GROUPS.values():
        if group.severity >= _SURE:
            for match in group.matches(text):
                hit[match.start() : match.end()] = b"\1" * (match.end() - match.start())
    for place, character in enumerate(text):
        if character == "\ufffd":
            hit[place] = 1
    return sum(hit) / len(text) if text else 0.0
