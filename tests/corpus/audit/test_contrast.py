"""What the audit compares with: the target, else general prose for a single source of some size, else nothing."""

import pytest

from jaxlm.config import ConfigError
from jaxlm.configs import base
from jaxlm.corpus.audit import audit

HTML = base.get_config().prepare.stages.html.to_dict()


def scanned(text: str, name: str = "a"):
    return audit.scan(name, [("d", text)])


def test_the_target_comes_first(tmp_path):
    (tmp_path / "page.html").write_text("<html><body><p>" + "A target has SpeakerQ words. " * 40 + "</p></body></html>")
    like = audit.contrast_of([scanned("one"), scanned("two", "b")], str(tmp_path), HTML)
    assert like.words.entries["SpeakerQ"].count == 40


def test_general_prose_is_for_a_single_source_of_some_size():
    assert audit.contrast_of([scanned("few words")], "", HTML) is None
    large = scanned("the words of a source. " * 10_000)
    assert audit.contrast_of([large, scanned("two", "b")], "", HTML) is None
    like = audit.contrast_of([large], "", HTML)
    assert 0 < like.bytes <= large.bytes
    assert like.words.entries["the"].count > 100


def test_a_target_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="nowhere"):
        audit.target_texts("nowhere", 1000, HTML)
