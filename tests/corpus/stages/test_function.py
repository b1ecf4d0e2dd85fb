"""The stage `function`: a user's own filter, from a file or a module, and what is refused."""

import pytest
import tiny_stage

from jaxlm.config import ConfigError

FILTERS = """
def long(text, metadata):
    return len(text) > 10


def share_of_letters(text, metadata):
    metadata["letters"] = sum(map(str.isalpha, text))
    return metadata["letters"] / len(text)
"""


@pytest.fixture
def filters(tmp_path):
    (tmp_path / "my_filters.py").write_text(FILTERS)
    return tmp_path / "my_filters.py"


def test_a_function_of_a_file_says_what_stays(filters, tmp_path):
    stage = tiny_stage.make(f"function path={filters}:long", tmp_path)
    assert tiny_stage.apply(stage, "Long enough to stay.").metadata["score"] == 1
    gone = tiny_stage.apply(stage, "Short.")
    assert (gone.reason, gone.removed.detail) == ("low score", "score=0.000, min_score=0.5")


def test_a_score_is_noted_and_metadata_may_grow(filters, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    stage = tiny_stage.make("function path=my_filters:share_of_letters min_score=0.25", tmp_path)
    outcome = tiny_stage.apply(stage, "ab 1", url="https://a.org")
    assert outcome.removed is None
    assert outcome.metadata == {"url": "https://a.org", "letters": 2, "score": 0.5}
    assert tiny_stage.apply(stage, "1234 5678 a").reason == "low score"


def test_an_edited_file_is_another_input(filters):
    spec = tiny_stage.registry.StageSpec("function", {"path": f"{filters}:long", "min_score": 0.5})
    before = tiny_stage.registry.digest(spec)
    filters.write_text(FILTERS + "\n")
    assert before != tiny_stage.registry.digest(spec) != ""


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", "ValueError: Empty module name"),
        ("my_filters", "ValueError: Empty module name"),
        ("no.such.module:keep", "ModuleNotFoundError: No module named 'no'"),
        ("json:keep", "AttributeError: module 'json' has no attribute 'keep'"),
        ("missing.py:keep", "FileNotFoundError: "),
    ],
)
def test_what_can_not_be_imported_is_refused(tmp_path, path, why):
    with pytest.raises(ConfigError, match=r"write FILE\.py:FUNCTION or MODULE:FUNCTION") as error:
        tiny_stage.make("function", tmp_path, path=path)
    assert why in str(error.value)
    assert "\n" not in str(error.value)
