"""The recipe, the books and the removals that `prepare` tells of."""

import json
import pathlib

import pytest

from jaxlm.config import ConfigError, RunError, older
from jaxlm.configs import base
from jaxlm.corpus import prepare, recipes, removals
from jaxlm.corpus.stages import registry
from jaxlm.corpus.tally import StageTally, Tally, stage_order


def check(built, wanted):
    recipes.check_same(built, wanted, made="DATA was made", manifest=pathlib.Path("DATA/m.json"), again="make it anew")


@pytest.mark.parametrize(
    ("built", "wanted", "told"),
    [
        ({"seed": 0, "size": 1}, {"size": 2, "seed": 1}, "size = 1, now it is 2"),
        ({"seed": 0, "gone": 1}, {"seed": 0}, "gone = 1, now it is nothing"),
        ({"seed": 0}, {"seed": 0, "new": "a"}, "new = nothing, now it is a"),
        ({"near": {"bands": 6, "rows": 8}}, {"near": {"bands": 7, "rows": 8}}, "near = bands=6, now it is bands=7"),
        ({"source a": {"path": "x", "format": "auto", "n": 0}}, {}, "source a = path=x, format=auto, now it is nothing"),
        ({"s": [["html", {"k": 1}], "near"]}, {"s": [["html", {"k": 1}], ["pii", {"k": 1}]]}, "s = near, now it is pii k=1"),
        ({"s": [["html", {"k": 1, "m": 2}], 5]}, {"s": [["html", {"k": 3, "m": 2}], 5]}, "s = html k=1, now it is html k=3"),
        ({"stages": ["near", "exact"]}, {"stages": ["exact", "near"]}, "stages = near, exact, now it is exact, near"),
    ],
)  # fmt: skip
def test_the_first_difference_is_told(built, wanted, told):
    with pytest.raises(ConfigError) as error:
        check(built, wanted)
    assert str(error.value) == (
        f"DATA was made with {told}; set another --config.data.dir, or delete {pathlib.Path('DATA/m.json')} to make it anew"
    )


DEFAULTS = {"source": {"exclude": []}, "stages": {"language": {"keep": False, "score": 0.5}, "near": {"bands": 20}}}
OLD = {"source a": {"path": "x"}, "stages of a": [["language", {"score": 0.4}], "near"], "stage near": {"rows": 5}}


def newer(exclude=(), keep=False, bands=20, score=0.4):
    return {
        "source a": {"path": "x", "exclude": list(exclude)},
        "stages of a": [["language", {"score": score, "keep": keep}], "near"],
        "stage near": {"rows": 5, "bands": bands},
    }


def test_a_setting_that_is_newer_than_the_data_and_at_its_default_is_no_difference():
    check(recipes.with_newer_settings(OLD, newer(), **DEFAULTS), newer())


def test_a_default_that_changed_is_no_difference():
    built = {
        "stage lines": {"max_removed": 0.5},
        "stages of web": [["junk", {"patterns": ["annotation", "chat_tokens"]}]],
    }
    now = {"stage lines": {"max_removed": 1.0}, "stages of web": [["junk", {"patterns": ["annotation", "unk"]}]]}
    filled = recipes.with_newer_settings(built, now, source={}, stages={})
    assert filled["stage lines"] == now["stage lines"]
    assert filled["stages of web"] == built["stages of web"]  # not a recipe's: a user's own, which is a difference


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (newer(exclude=["_static"]), "source a = nothing, now it is exclude=_static"),
        (newer(keep=True), "language nothing, now it is language keep=True"),
        (newer(bands=7), "stage near = nothing, now it is bands=7"),
        (newer(score=0.5), "language score=0.4, now it is language score=0.5"),
    ],
)
def test_a_newer_setting_at_another_value_is_a_difference(wanted, told):
    with pytest.raises(ConfigError, match=told):
        check(recipes.with_newer_settings(OLD, wanted, **DEFAULTS), wanted)


def test_an_earlier_default_is_todays_and_another_value_is_a_difference():
    stages = json.loads(json.dumps(base.get_config().prepare.stages.to_dict()))
    earlier = {name: was for name, ((was, _),) in older.CHANGED["pii"].items()}
    old = {"stages of a": [["pii", stages["pii"] | earlier]]}
    wanted = {"stages of a": [["pii", stages["pii"]]]}
    check(recipes.with_newer_settings(old, wanted, source={}, stages=stages), wanted)
    own = {"stages of a": [["pii", stages["pii"] | {"kinds": ["email", "mac"]}]]}
    for built, now in ((old, own), (own, wanted)):
        with pytest.raises(ConfigError, match="pii kinds="):
            check(recipes.with_newer_settings(built, now, source={}, stages=stages), now)


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
    assert found.lines == [
        "gopher_quality took 13 of 100 documents of web (13%); 8 by 'gopher_short_doc', such as 0.html (x=0), 1.html, 2.html",
        f"  to keep them: {QUALITY}.min_words=0 {QUALITY}.max_bullet_lines=0",
    ]


def test_text_counts_too_but_not_markup(tmp_path):
    html, lines = stage("html", {}, text=(10**6, 100_000)), stage("lines", {}, text=(10**6, 850_000))
    (found,) = much(tmp_path, html, stage("unicode", {}, text=(9, 1)), lines)
    assert found.lines == [
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


def test_stages_stand_in_an_order_that_is_every_sources_own():
    sources = [["html", "unicode", "language", "pii", "near"], ["unicode", "near"], ["code", "pii", "near", "lines"]]
    names = stage_order(sources)
    assert sorted(names) == ["code", "html", "language", "lines", "near", "pii", "unicode"]
    for stages in sources:
        assert [name for name in names if name in stages] == stages
    assert sorted(stage_order([["a", "b"], ["b", "a"]])) == ["a", "b"]  # no order serves both
    assert stage_order([]) == []


def test_books_that_do_not_balance_are_refused():
    tally = Tally(documents=3, kept=1, stages=[StageTally("pii")])
    tally.stages[0].removed["x"] += 1
    with pytest.raises(RunError, match=r"read 3 != kept 1 \+ removed 1 \+ failed 0"):
        tally.check("web")
    tally.failed["torn"] += 1
    tally.check("web")
