"""The stages `language` and `pii` on sets of texts that were written before their rules (see sets/README.md)."""

import pathlib

import pytest
import tiny_stage
from tiny_stage import rows

from jaxlm.configs import base, presets

SETS = pathlib.Path(__file__).parent / "sets"


@pytest.mark.parametrize("preset", ["web", "docs"])
def test_foreign_prose_goes_and_short_or_mixed_paragraphs_stay(preset):
    config = base.get_config()
    getattr(presets, preset)(config)
    settings = config.prepare.stages.language.to_dict()
    stages = {
        code: tiny_stage.make("language", **settings | {"languages": (code,)})
        for code in ("en", "de", "fr", "es", "it")
    }
    lost = [
        row["text"]
        for row in rows("languages_short.jsonl")
        if tiny_stage.apply(stages[row["language"]], row["text"]).removed
    ]
    left = [
        row["text"]
        for row in rows("languages_foreign.jsonl")
        if not tiny_stage.apply(stages["en"], row["text"]).removed
    ]
    assert len(lost) <= 2, lost
    assert len(left) <= 10, left


def test_personal_data_goes_and_what_looks_like_it_stays():
    missed, wrong = tiny_stage.pii(rows("pii.jsonl"))
    assert len(missed) <= 3, missed
    assert len(wrong) <= 2, wrong


def test_the_language_of_personal_data_need_not_be_given():
    stage = tiny_stage.make("pii")
    true = [row for row in rows("pii.jsonl") if row["find"]]
    missed = [row["text"] for row in true if row["find"] in tiny_stage.apply(stage, row["text"]).text]
    assert len(missed) <= 3, missed
