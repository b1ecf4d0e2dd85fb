"""Another recipe is refused by the first key that differs."""

import pathlib

import pytest

from jaxlm.config import ConfigError
from jaxlm.corpus import recipes


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
