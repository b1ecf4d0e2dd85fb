"""How many times a run goes through each source."""

import types

import pytest

from jaxlm.data import passes, rows


def test_times_through_by_weight_tokens_and_steps():
    """12,800 tokens, three quarters of them from `web`; a source without weight is not read."""
    data = types.SimpleNamespace(token_counts=lambda: {"web": 1000, "code": 6400, "unused": 5})
    order = rows.Order(data, {"web": 3.0, "code": 1.0, "unused": 0.0}, 0, seq_len=32, batch_size=4)
    assert passes.passes(order, 100) == pytest.approx({"web": 9.6, "code": 0.5})
    assert passes.passes(order, 0) == {"web": 0.0, "code": 0.0}
