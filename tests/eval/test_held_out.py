"""Held-out loss and bits per byte, against a direct computation from the texts."""

import contextlib
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_data
import tiny_models as tiny

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.data.tokenizer.ours import Tokenizer
from jaxlm.devices import sharding
from jaxlm.eval import held_out

MIXTURE = {"a": 3.0, "b": 1.0}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_data.make(tmp_path_factory.mktemp("data"), MIXTURE)


def make_config(**evaluation) -> config.Config:
    c = config.resolve(config_files.load("base", ["data.path=x", "train.seq_len=16", "eval.batch_size=8"]))
    model = dataclasses.replace(tiny.model_config(n_layers=1), vocab_size=300)
    return dataclasses.replace(c, model=model, eval=dataclasses.replace(c.eval, **evaluation))


def evaluator(c, model, data, mixture, mesh):
    return held_out.make(model, data, mixture, mesh, c.eval, seq_len=c.train.seq_len, tile=c.loss.tile_tokens)


def direct(c, model, params, data, source):
    """Loss in nats a token and bits a byte, document by document, with no packing."""
    tokenizer = Tokenizer.load(data.path / "tokenizer.model")
    tokens = data.stream(source, "val").read(0, data.entry(source, "val")["tokens"]).tolist()
    starts = [i for i, token in enumerate(tokens) if token == data.separator_id]
    ends = [i + 1 for i in starts[1:]] + [len(tokens)]  # with the separator of the next; the last document has none
    documents = [tokens[start:end] for start, end in zip(starts, ends, strict=True)]
    logits_of = jax.jit(lambda params, tokens: tiny.logits(model, params, tokens))
    nll, count, n_bytes = 0.0, 0, 0
    for text in documents:
        padded = jnp.asarray([text[:-1] + [0] * (256 - len(text))])  # one length, to compile once; causal, so harmless
        logp = np.asarray(jax.nn.log_softmax(logits_of(params, padded)[0]))
        nll -= logp[np.arange(len(text) - 1), text[1:]].sum()
        count += len(text) - 1
        n_bytes += len(tokenizer.decode(text).encode())
    assert n_bytes == data.entry(source, "val")["bytes"]  # each byte once
    return nll / count, nll / math.log(2) / n_bytes


def test_loss_and_bits_per_byte_are_those_of_the_texts(data):
    mesh = (1, 2, 2, 2)
    # Rows as long as the stream, so that no document is cut at a row's end.
    length = -(-max(data.entry(s, "val")["tokens"] for s in MIXTURE) // 4) * 4
    c = make_config(max_mb=0.0, batch_size=mesh[0] * mesh[1])
    c = dataclasses.replace(c, train=dataclasses.replace(c.train, seq_len=length))
    model = models.build(c.model, "xla")
    params = tiny.random_params(model)
    on = sharding.make_mesh(config.MeshConfig(*mesh), jax.devices()[: math.prod(mesh)])
    with jax.set_mesh(on):
        got = evaluator(c, model, data, MIXTURE, on)({"params": params})
    for source in MIXTURE:
        nats, bits = direct(c, model, params, data, source)
        assert got[f"val/{source}/loss"] == pytest.approx(nats, rel=1e-5)
        assert got[f"val/{source}/bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    weighted = (3 * got["val/a/loss"] + got["val/b/loss"]) / 4
    assert got["val/loss"] == pytest.approx(weighted)


def test_the_limit_is_of_text_and_the_same_at_each_call(data):
    model = models.build(make_config().model, "xla")
    mesh = sharding.make_mesh(config.MeshConfig(8, 1, 1, 1))
    params = {"params": tiny.random_params(model)}
    short = evaluator(make_config(max_mb=0.0005), model, data, MIXTURE, mesh)
    assert short(params) == short(params)
    assert short(params) != evaluator(make_config(max_mb=0.001), model, data, MIXTURE, mesh)(params)


def test_progress_ends_with_all_and_only_sources_of_the_mixture_are_evaluated(data, monkeypatch):
    told = []

    @contextlib.contextmanager
    def working(what, total, unit):
        yield lambda done: told.append((done, total))

    monkeypatch.setattr(held_out.processes, "working", working)
    model = models.build(make_config().model, "xla")
    mesh = sharding.make_mesh(config.MeshConfig(8, 1, 1, 1))
    evaluate = evaluator(make_config(max_mb=0.002), model, data, {"b": 1.0}, mesh)
    assert set(evaluate({"params": tiny.random_params(model)})) == {"val/b/loss", "val/b/bits_per_byte", "val/loss"}
    done, total = told[-1]
    assert done == total > 0
    assert [n for n, _ in told] == sorted(n for n, _ in told)
