"""Words and sentences as datatrove's filters ask for them."""

import pytest

from jaxlm.corpus.stages.word_tokenizer import TOKENIZER


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ('He said "go." Then he left.', ['He said "go."', "Then he left."]),
        ("Version 1.2.3 is out", ["Version 1.2.3 is out"]),
        ("Wait... what", ["Wait...", "what"]),
        ("猫がいる。犬もいる。", ["猫がいる。", "犬もいる。"]),
        ("no end \n", ["no end"]),
        ("", [""]),
    ],
)
def test_sentences(text, sentences):
    assert TOKENIZER.sent_tokenize(text) == sentences
    spans = TOKENIZER.span_tokenize(text)
    assert "".join(text[a:b] for a, b in spans) == text.rstrip()


def test_words():
    assert TOKENIZER.word_tokenize("It costs 1,000.50 (or so).") == [
        "It",
        "costs",
        "1,000.50",
        "(",
        "or",
        "so",
        ")",
        ".",
    ]
