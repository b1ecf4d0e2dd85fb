"""Stage `unicode`: planted damage goes, and what only looks like it stays."""
# ruff: noqa: RUF001 - letters that look alike are the subject

import collections
import pathlib
import time

import pytest

from jaxlm.configs import base
from jaxlm.corpus.stage import Document, Remove
from jaxlm.corpus.stages import registry

DEFAULTS = base.get_config().prepare.stages.to_dict()


def clean(text, kind="text", **settings):
    """(text or the Remove, edits)."""
    document, edits = Document(text=text, id="d", metadata={"format": kind}), collections.Counter()
    stage = registry.make(registry.StageSpec("unicode", DEFAULTS["unicode"] | settings), pathlib.Path())
    removed = stage.apply(document, edits)
    return (document.text if removed is None else removed), dict(edits)


@pytest.mark.parametrize(
    ("damaged", "text", "edits"),
    [
        ("Das ist schÃ¶n, und itâ€™s fine.", "Das ist schön, und it’s fine.", {"mojibake": 1}),
        ("ÐŸÑ€Ð¸Ð²ÐµÑ‚, мир", "Привет, мир", {"mojibake": 1}),
        ("РџСЂРёРІРµС‚ РјРёСЂ", "Привет мир", {"mojibake": 1}),
        ("it‚Äôs old", "it’s old", {"mojibake": 1}),
        ("good\nbad: cafÃ©\nÉté", "good\nbad: café\nÉté", {"mojibake": 1}),
        ("wait\x85 \x93now\x94", "wait… “now”", {"mojibake": 1}),
        ("cafe\u0301", "caf\u00e9", {"nfc": 1}),
        ("a\r\nb\rc\u2028d\x0ce", "a\nb\nc\nd\ne", {"line_ends": 4}),
        ("a  \nb\t\n\n\n\n\n\nc ", "a\nb\n\n\nc", {"trailing": 3, "blank_lines": 1}),
        ("\n\n  indented\n\n", "  indented", {}),
        ("10\u00a0km, 5\u202f000, a\u2003b", "10 km, 5 000, a b", {"spaces": 3}),
        ("\ufeffWord com\u00adpo\u200bnent\u2060s", "Word components", {"invisible": 4}),
        ("ad\u200dmin and pay\u200cpal", "admin and paypal", {"invisible": 2}),
        ("user\u202etxt.exe\u202c \u2066x\u2069 \u200ey", "usertxt.exe x y", {"bidi": 5}),
        ("a\x00b\x07c\x7f\ufffe", "abc", {"controls": 4}),
        ("\x1b[1;31mred\x1b[0m \x1b]0;title\x07done", "red done", {"escapes": 3}),
        ("N\x08NA\x08AME _\x08f_\x08oo", "NAME foo", {"overstrikes": 4}),
        ("hidden\U000e0068\U000e0069 text", "hidden text", {"invisible": 1}),
        ("smile \ud83d\ude00 here", "smile \U0001f600 here", {"surrogates": 1}),
    ],
)
def test_damage_is_mended(damaged, text, edits):
    assert clean(damaged) == (text, edits)


@pytest.mark.parametrize(
    "text",
    [
        "plain ASCII, tabs\tin it, <b>tags</b> &amp; entities, a < b",
        "x² + y³ ≤ ½, ﬁne ligature, ＦＵＬＬ width, ℌ, “quotes” – dashes…",  # NFC is not NFKC
        "SÃO PAULO, NAÏVE, ÂGE, Český, Łódź, «été», 5 £, 20 °C, æøå ß",
        "Русский: РФ, СССР и США — «РСФСР», РСТ",
        "√2 and √π; naïve café's résumé",
        "👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ❤️ 1️⃣ 🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f ❤️‍🔥 👩🏽‍💻",
        "می‌خواهم به خانه‌ها بروم؛ PDF‌ها",
        "שָׁלוֹם עוֹלָם \u200f(2024)\u200f",
        "مرحبا \u2067abc\u2069 بالعالم",
        "क्‍ष श्री र्‍य നന്‍മ ශ්‍රී",
        "สวัสดี\u200bครับ ភាសា\u200bខ្មែរ",
        "　　這是第一段。漢字かな交じり文、全角スペース　あり。",
        "ᠮᠣᠩᠭᠣᠯ\u180e ᠪᠢᠴᠢᠭ 葛\U000e0100",
        "def f():\n\tif x:\n\t    return '\\u00a0'\n\n\nclass A:\n    pass",
    ],
)
def test_what_stays(text):
    assert clean(text) == (text, {})
    assert clean(text + "\n" + text, "text")[1] == {}


def test_undecodable_documents_go_and_few_marks_stay():
    text = "a \ufffd b" + " good words" * 50
    assert clean(text) == (text, {})
    removed, _ = clean("\ufffd\ufffd bad \ufffd words \ufffd")
    assert isinstance(removed, Remove)
    assert removed.reason == "undecodable"
    assert clean("\ufffd" * 3 + "a" * 7, max_undecodable=0.3)[0] == "\ufffd" * 3 + "a" * 7
    assert clean("a\ud800b")[0].reason == "undecodable"


def test_code_keeps_no_marks_that_hide_its_order():
    text = "if role != '\u202e\u2066admin\u2069' : # שלום"
    assert clean(text, "code")[0] == "if role != 'admin' : # שלום"
    assert clean(text)[0] == "if role != '\u2066admin\u2069' : # שלום"


def test_settings():
    assert clean("cafÃ©", mojibake=False) == ("cafÃ©", {})
    assert clean("a\n\n\n\nb", max_blank_lines=1)[0] == "a\n\nb"
    assert clean("a\n\n\n\nb", max_blank_lines=3)[0] == "a\n\n\n\nb"


@pytest.mark.parametrize("piece", [" ", "\n", "\t", "\u200d", "\x08", "\x1b]0;", "Ã", "\r", "\U000e0061", "\u200b"])
def test_long_runs_take_no_longer(piece):
    start = time.monotonic()
    clean("a" + piece * 200_000 + "b")
    assert time.monotonic() - start < 5
