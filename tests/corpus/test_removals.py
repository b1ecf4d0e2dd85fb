"""What stages took much of, by which reason, and the settings that would keep it: each of them is one that exists."""

import json

import pytest

from jaxlm.configs import base
from jaxlm.corpus import prepare, removals
from jaxlm.corpus.stages import registry

QUALITY = "--config.prepare.stages.gopher_quality"
STAGES = ("unicode", "gopher_quality", "junk", "exact", "lines")


def stage(name, removed, documents=100, text=(10**6, 10**6)):
    return {"name": name, "removed": removed, "documents_in": documents, "bytes_in": text[0], "bytes_out": text[1]}


def much(folder, *stages, lines=STAGES):
    recipe = {"stages of web": [["language", {"languages": ["en"]}]]}
    manifest = {"recipe": recipe, "sources": {"web": {"read": {"documents": 100}, "stages": list(stages)}}}
    examples = [
        {"source": "web", "stage": s["name"], "reason": reason, "id": f"{i}.html", "detail": f"x={i}", "excerpt": ""}
        for s in stages
        for reason in [*s["removed"], ""]
        for i in range(5)
    ]
    (folder / prepare.EXAMPLES).write_text("".join(json.dumps(example) + "\n" for example in examples))
    return removals.much(manifest, folder, {"web": lines})


def test_over_a_tenth_is_named_with_reason_examples_and_limits(tmp_path):
    few = stage("unicode", {"undecodable": 10})
    many = stage(
        "gopher_quality",
        {"gopher_short_doc": 8, "gopher_too_many_bullets": 4, "gopher_long_doc": 1},
        text=(10**6, 930_000),
    )
    (found,) = much(tmp_path, few, many)
    assert found.lines() == [
        "gopher_quality took 13 of 100 documents of web (13%); 8 by 'gopher_short_doc', such as 0.html (x=0), 1.html, 2.html",
        f"  to keep them: {QUALITY}.min_words=0 {QUALITY}.max_bullet_lines=0",
    ]


def test_text_counts_too_but_not_markup(tmp_path):
    html, lines = stage("html", {}, text=(10**6, 100_000)), stage("lines", {}, text=(10**6, 850_000))
    (found,) = much(tmp_path, html, stage("unicode", {}, text=(9, 1)), lines)
    assert found.lines() == [
        "lines took 15% of the text that came to it of web, such as 0.html, 1.html, 2.html",
        "  to keep them: --config.prepare.sources.web.stages=\"('unicode', 'gopher_quality', 'junk', 'exact')\"",
    ]


def test_where_no_limit_decides_the_stage_can_be_left_out(tmp_path):
    left = "--config.prepare.sources.web.stages=\"('unicode', 'gopher_quality', 'exact', 'lines')\""
    assert much(tmp_path, stage("junk", {"annotation": 20}))[0].keep == (left,)
    own = much(
        tmp_path, stage("gopher_quality", {"gopher_short_doc": 20}), lines=("unicode", "gopher_quality min_words=9")
    )
    assert own[0].keep == (
        "--config.prepare.sources.web.stages=\"('unicode',)\"",
    )  # its own limit wins over prepare.stages
    assert much(tmp_path, stage("exact", {"duplicate": 20}))[0].keep == ()


def test_a_language_is_added_to_those_that_stay(tmp_path):
    (found,) = much(tmp_path, stage("language", {"other language": 30}))
    assert found.keep == ("--config.prepare.stages.language.languages=\"('en', 'x')\"",)


@pytest.mark.parametrize("name", list(removals._OFF))
def test_each_setting_exists_and_is_allowed(name):
    defaults = base.get_config().prepare.stages.to_dict()
    for settings in removals._OFF[name].values():
        spec = registry.parse(f"{name} {settings}", defaults, "test")
        assert spec.settings != defaults[name]
        if name in registry.DOCUMENT_STAGES:
            registry.typed_settings(spec)
        registry.check_ranges(name, spec.settings)
