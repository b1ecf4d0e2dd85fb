"""The books of a source, and the order in which the stages of several are told."""

import pytest

from jaxlm.config import RunError
from jaxlm.corpus.tally import StageTally, Tally, stage_order


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
