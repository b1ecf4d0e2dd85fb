"""Held-out loss of answers, with their end token and without, and of the base's own text."""

import dataclasses
import json
import math

import numpy as np
import pytest
import tiny_chats
import tiny_models as tiny
from tiny_steps import make_mesh

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.data.batches import packed, replay
from jaxlm.eval import held_out
from jaxlm.step.objectives import base

ROWS, TOKENS = 8, 48


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """(model, its variables, packed chats, text, config.eval)."""
    folder, tokenizer = tmp_path_factory.mktemp("chats"), tiny_chats.tokenizer()
    texts = (json.dumps({"text": f"{i} {word} is the sea"}) for i, word in enumerate(tiny_chats.WORDS * 5))
    (folder / "text.jsonl").write_text("\n".join(texts))
    path = tiny_chats.chats(folder / "chats.jsonl", 120)
    keys = [f"data.path={path}", "data.val_fraction=0.4", "eval.max_mb=0", "eval.max_examples=0"]
    c = config.resolve(config_files.load("base", keys))
    made = packed.make(c.data, c.examples, tokenizer, pairs=False, sizes=packed.Sizes(0, TOKENS, ROWS))
    text = replay.open_text(str(folder / "text.jsonl"), tokenizer, text_key="text", val_fraction=0.5)
    model = models.build(tiny.model_config(vocab_size=tokenizer.vocab_size, n_layers=1), "xla")
    return model, {"params": tiny.random_params(model)}, made, text, dataclasses.replace(c.eval, batch_size=ROWS)


def test_of_answers_and_of_text(given):
    model, variables, data, text, settings = given
    mesh = make_mesh(data=2, fsdp=2)
    own = held_out.of_answers(model, data, mesh, settings, tile=0)
    found = held_out.joined([own, held_out.of_base(model, text, mesh, settings, seq_len=TOKENS, tile=0)])(variables)
    sums = np.zeros(4)
    for batch, without in zip(data.held_out(4), data.held_out(4, ends=False), strict=True):
        nll = -tiny.jit(lambda v, b: base.token_logp(model, v, b, None))(variables, batch)
        for at, weights in enumerate((batch["weights"], without["weights"])):
            sums[2 * at : 2 * at + 2] += (nll * weights).sum(), weights.sum()
    assert sums[3] < sums[1]  # each answer ends
    assert found["val/loss"] == pytest.approx(sums[0] / sums[1], rel=1e-5)
    assert found["val/text_loss"] == pytest.approx(sums[2] / sums[3], rel=1e-5)
    whole = held_out.make(model, text, text.mixture, mesh, settings, seq_len=TOKENS, tile=0)(variables)
    assert found[held_out.BASE] == pytest.approx(whole["val/replay/bits_per_byte"])
    assert set(found) == {"val/loss", "val/text_loss", held_out.BASE}
    fewer = dataclasses.replace(settings, max_examples=9)
    assert not math.isclose(
        held_out.of_answers(model, data, mesh, fewer, tile=0)(variables)["val/loss"], found["val/loss"]
    )


def test_nothing_held_out(given):
    model, _, data, _, settings = given
    none = dataclasses.replace(data, val=data.val.take(np.zeros(len(data.val), bool)))
    assert held_out.joined([held_out.of_answers(model, none, make_mesh(), settings, tile=0), None]) is None
