"""Bits per byte of any text: each document alone, behind EOS, in windows without overlap."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_chats
import tiny_models as tiny
from tiny_steps import make_mesh

from jaxlm import models
from jaxlm.config import ConfigError
from jaxlm.eval import compare, likelihood, text

LENGTH = 16
TEXTS = ["the sea is red", "one two three four five six seven eight nine ten " * 4, "Ünïcode \u2028 und\nZeilen", "x"]


@pytest.fixture(scope="module")
def scorer() -> likelihood.Scorer:
    tokenizer = tiny_chats.tokenizer()
    model = models.build(tiny.model_config(vocab_size=tokenizer.vocab_size, max_seq_len=64, n_layers=1), "xla")
    return likelihood.Scorer(model, {"params": tiny.random_params(model)}, tokenizer, make_mesh(), 512, 0)


def direct(scorer: likelihood.Scorer, document: str) -> float:
    """Bits of a document, window by window, with no packing."""
    ids = [scorer.tokenizer.eos_id, *scorer.tokenizer.encode(document)]
    logits_of = tiny.jit(lambda tokens: tiny.logits(scorer.model, scorer.variables["params"], tokens))
    nll = 0.0
    for first in range(0, len(ids) - 1, LENGTH):
        window = ids[first : first + LENGTH + 1]
        padded = jnp.asarray([window[:-1] + [0] * (LENGTH + 1 - len(window))])  # causal, so harmless
        logp = np.asarray(jax.nn.log_softmax(logits_of(padded)[0]))
        nll -= logp[np.arange(len(window) - 1), window[1:]].sum()
    return nll / math.log(2)


def test_each_document_has_its_bits_over_its_bytes(scorer):
    documents = [(f"{number}.txt", one) for number, one in enumerate(TEXTS)]
    (found,) = text.results(scorer, documents, LENGTH)
    assert list(text.results(scorer, [], LENGTH)) == []
    bits, sizes = [direct(scorer, one) for one in TEXTS], [len(one.encode()) for one in TEXTS]
    assert max(len(scorer.tokenizer.encode(one)) for one in TEXTS) > 2 * LENGTH
    assert [item.metrics["bits_per_byte"] for item in found.items] == pytest.approx(np.divide(bits, sizes), rel=1e-4)
    assert found.metrics["bits_per_byte"] == pytest.approx(sum(bits) / sum(sizes), rel=1e-4)
    assert [item.detail["document"] for item in found.items] == [name for name, _ in documents]
    (row,) = compare.benchmarks({found.task: found}, {found.task: found})
    assert (row.metric, row.n, row.difference) == ("bits_per_byte", len(TEXTS), 0.0)


def test_the_name_follows_from_the_text_alone(tmp_path):
    for name, texts in (("a", TEXTS), ("b", TEXTS), ("c", TEXTS[::-1])):
        (tmp_path / name).mkdir()
        for number, one in enumerate(texts):
            (tmp_path / name / f"{number}.txt").write_text(one, encoding="utf-8")
    a, b, c = (text.task(text.read(str(tmp_path / name), "text")) for name in "abc")
    assert a == b != c
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match=r"gave no document|are empty"):
        text.read(str(tmp_path / "empty.txt"), "text")
