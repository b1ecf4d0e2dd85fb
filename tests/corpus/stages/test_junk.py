"""Stage `junk`: the match, its line or its document goes; what only looks like junk stays."""

import collections
import pathlib

import pytest

from jaxlm.config import ConfigError
from jaxlm.configs import base
from jaxlm.corpus.audit import audit
from jaxlm.corpus.stage import Document
from jaxlm.corpus.stages import registry

DEFAULTS = base.get_config().prepare.stages.to_dict()


def make(**settings):
    spec = registry.StageSpec("junk", DEFAULTS["junk"] | settings)
    registry.stage_class("junk").build(registry.typed_settings(spec), pathlib.Path())
    return registry.make(spec, pathlib.Path())


def clean(text, **settings):
    """(text or the Remove, edits)."""
    document, edits = Document(text=text, id="d", metadata={}), collections.Counter()
    removed = make(**settings).apply(document, edits)
    return (document.text if removed is None else removed), dict(edits)


def test_lines_with_annotations_and_chat_tokens_go_by_default():
    text = "one\nPersonX sees PersonY\ntwo\n<|im_start|>user\nthree\na -LRB- b -RRB- c"
    assert clean(text) == ("one\ntwo\nthree\n", {"annotation": 2, "chat_tokens": 1})


def test_matches_alone():
    text = "<|im_start|>user\nHello there<|im_end|>\nthe <unk> cat , five @-@ year , 0 @.@ 7"
    settings = {"patterns": ("chat_tokens", "unk"), "level": "match"}
    expected = "user\nHello there\nthe cat , five-year , 0.7"
    assert clean(text, **settings) == (expected, {"chat_tokens": 2, "unk": 3})


def test_documents():
    assert clean("PersonX sees\n \nPersonY runs\n")[0].reason == "annotation"  # nothing is left
    removed, edits = clean("one\nPersonX sees\ntwo", level="document")
    assert (removed.reason, edits) == ("annotation", {})
    assert "PersonX" in removed.detail


def test_min_hits_are_of_a_pattern_in_a_document():
    text = "PersonX sees\n<|im_end|>\ntwo"
    assert clean(text, min_hits=2) == (text, {})
    assert clean(f"{text}\nPersonY", min_hits=2) == ("<|im_end|>\ntwo\n", {"annotation": 2})


def test_own_expressions():
    assert clean("a\nShare this: x\nb", patterns=(r"^Share\sthis:",)) == ("a\nb", {r"^Share\sthis:": 1})
    assert clean("a foo b", patterns=("foo",), level="match")[0] == "a b"
    assert clean("foo b", patterns=("foo",), level="match")[0] == "b"
    assert clean("a,foo b", patterns=("foo",), level="match")[0] == "a, b"


def test_lines_that_a_match_spans_go_and_no_others():
    pattern = r"<!--[^>]*-->"
    assert clean("a\nb <!-- x\ny --> c\nd", patterns=(pattern,)) == ("a\nd", {pattern: 2})
    assert clean("a\n\n  Foo  \n\nb", patterns=(r"^\s*Foo\s*$",))[0] == "a\n\n\nb"
    assert clean("x <unk> <unk>\nb <unk>", patterns=("unk",))[1] == {}  # all of it: removed
    assert clean("x <unk> <unk>\nb", patterns=("unk",)) == ("b", {"unk": 1})


@pytest.mark.parametrize(
    "text",
    [
        "Catch java.lang.NullPointerException, or ValueError.\nTraceback (most recent call last):\n    at a.B.c(B.java:3)",
        "Write {{ name }} or {% if user %} in Jinja, ${HOME} in a shell, %(name)s in Python.",
        "a { color: #ff00aa; }\nb { color: #00ff00; }\nc { color: #0000ff; }",
        "HTML: <p>text &amp; more</p><br>\nLorem ipsum dolor sit amet",
        "sha256: 0123456789abcdef0123456789abcdef0123456789abcdef",
        "the <unk> of a vocabulary",
        "BERT puts a `[MASK]` there; ChatML writes '<|im_start|>'; ATOMIC has \u201cPersonX\u201d.",
        "<s>old</s> new, <|psi|> of <|x|>, a B-52, Person X",
    ],
)
def test_documentation_stays_with_the_defaults(text):
    assert clean(text) == (text, {})


@pytest.mark.parametrize("kind", ["token", "line", "clause"])
def test_the_pattern_of_a_finding_removes_it(kind):
    template = "Posted on {0} May 20{0} by us (c)\nIn {1} SpeakerQ went 1st. Follow us on [all] our channels{0}! End"
    texts = [template.format(10 + i, "abcdefghijklmnopqrstu"[i] * 9) for i in range(21)]
    found = audit.rank([audit.scan("s", [(f"d{i}", text) for i, text in enumerate(texts[:20])])])
    finding = next(finding for finding in found if finding.kind == kind)
    changed, edits = clean(texts[20], patterns=(finding.pattern,), level="match")
    assert edits == {finding.pattern: 1}
    assert len(changed) < len(texts[20])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patterns": ("(a",)}, "no regular expression"),
        ({"patterns": ("anotation",)}, "did you mean 'annotation'"),
        ({"patterns": ("x*",)}, "matches everything"),
        ({"level": "lines"}, "choose one of match, line, document"),
        ({"min_hits": 0}, "at least 1"),
        ({"patterns": "annotation"}, "expected"),
    ],
)
def test_bad_settings_are_one_clear_line(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make(**settings)
    assert "\n" not in str(caught.value)
