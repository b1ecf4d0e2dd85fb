"""Words as spaCy's English rules have them, where filters count on it; Chinese and Japanese by the character."""

import pytest

from jaxlm.corpus import words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It cost 1,234.56 dollars.", ["It", "cost", "1,234.56", "dollars", "."]),
        ("The cat's tail -- gone ...", ["The", "cat", "'s", "tail", "--", "gone", "..."]),
        ("well-known (see p. 3)", ["well", "-", "known", "(", "see", "p", ".", "3", ")"]),
        ("x_1 += a[0]", ["x_1", "+", "=", "a", "[", "0", "]"]),
        ("猫は2匹。Two cats", ["猫", "は", "2", "匹", "。", "Two", "cats"]),
        ("naïve Ünïcode — да", ["naïve", "Ünïcode", "—", "да"]),
        (" \n\t ", []),
    ],
)
def test_words(text, expected):
    assert words.split(text) == expected


def test_nothing_but_white_space_is_lost():
    text = "a\u200bb \u00a0“c” _ d̈ 🙂\x07 e"
    assert "".join(words.split(text)) == "".join(text.split())


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("One. Two? Three!", 3),
        ('He said "go." Then he left.', 2),
        ("Version 1.2.3 is out", 1),
        ("Wait... what", 2),
        ("猫がいる。犬もいる。", 2),
        ("no end", 1),
        ("", 1),
    ],
)
def test_sentences(text, n):
    ends = words.sentence_ends(text)
    assert len(ends) == n
    assert ends[-1] == len(text.rstrip())
