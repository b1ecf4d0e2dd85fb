"""How many times a run goes through each source."""

import types

import pytest

from jaxlm.data.batches import rows
from jaxlm.data.shards import mixture


def test_times_through_by_weight_tokens_and_steps():
    """12,800 tokens, three quarters of them from `web`; a source without weight is not read."""
    data = types.SimpleNamespace(token_counts=lambda: {"web": 1000, "code": 6400, "unused": 5})
    order = rows.Rows(data, {"web": 3.0, "code": 1.0, "unused": 0.0}, 0, seq_len=32, batch_size=4)
    assert rows.passes(order, 100) == pytest.approx({"web": 9.6, "code": 0.5})
    assert rows.passes(order, 0) == {"web": 0.0, "code": 0.0}


def test_both_mixtures_count_each_for_its_steps():
    """80 steps with 3/4 of `web`, then 20 with a quarter of it; `best` is read at the end alone."""
    data = types.SimpleNamespace(token_counts=lambda: {"web": 1000, "code": 6400, "best": 320, "unused": 5})
    final = mixture.Final({"web": 1.0, "best": 3.0}, share=0.2, steps=100)
    order = rows.Rows(data, {"web": 3.0, "code": 1.0, "unused": 0.0}, 0, seq_len=32, batch_size=4, final=final)
    assert rows.passes(order, 100) == pytest.approx({"web": 7.68 + 0.64, "code": 0.4, "best": 6.0})
    assert rows.passes(order, 80) == pytest.approx({"web": 7.68, "code": 0.4, "best": 0.0})
    assert rows.passes(order, 40) == pytest.approx({"web": 3.84, "code": 0.2, "best": 0.0})
    assert rows.mixture_words(order, 100) == "web 0.75, code 0.25 to step 80, then best 0.75, web 0.25"
    assert rows.mixture_words(order, 80).endswith("then best 0.75, web 0.25 (this run ends at step 80)")
    # Ten batches that were passed over: 70 steps are left of the first 80 batches, so that 30 draw from the final mixture.
    over = order.passing_over([(11, 20)])
    assert rows.passes(over, 100)["best"] == pytest.approx(9.0)
    assert "to step 70, then" in rows.mixture_words(over, 100)
    assert rows.mixture_words(rows.Rows(data, {"web": 1.0}, 0, seq_len=32, batch_size=4), 100) == ""


def test_a_source_is_counted_by_the_share_that_is_drawn_and_named_if_it_is_off():
    data = types.SimpleNamespace(token_counts=lambda split="train": {"web": 10**6, "rare": 1000})
    order = rows.Rows(data, {"web": 1.0, "rare": 1e-6}, 0, seq_len=32, batch_size=4)
    drawn = mixture.count_draws(order.plan.shares, 65536 * 4)[0]
    assert rows.passes(order, 65536)["rare"] == pytest.approx(float(drawn) * 32 / 1000)
    assert rows.rounded(order)[0].startswith("rare is drawn with a share of 1.53e-05, its weight is 1e-06")
    assert not rows.rounded(rows.Rows(data, {"web": 0.9, "rare": 0.1}, 0, seq_len=32, batch_size=4))
