"""A mismatch report as JSON has it."""

import dataclasses
import json

from jaxlm.corpus.comparison import Advice, Mixture, Pair, Report

PAIR = Pair("a", "b", 0.5, 0.125, 0.75, 0.25, None, ["words"], ["of b"])


def test_distance_is_what_exceeds_chance():
    assert PAIR.distance == 0.375
    assert dataclasses.replace(PAIR, floor_words=0.625).distance == 0.0


def test_to_dict_has_every_field_and_the_distances():
    report = Report(
        {"a": {"documents": 3}}, [PAIR], Mixture({"a": 1.0}, {"a": 0.5}, 0.25, 0.125), {"a": Advice("keep", "Keep a.")}
    )
    assert json.loads(json.dumps(report.to_dict())) == {
        "sources": {"a": {"documents": 3}},
        "pairs": [dataclasses.asdict(PAIR) | {"distance": 0.375}],
        "mixture": {"now": {"a": 1.0}, "nearest": {"a": 0.5}, "js_now": 0.25, "js_nearest": 0.125},
        "advice": {"a": {"action": "keep", "sentence": "Keep a."}},
    }
