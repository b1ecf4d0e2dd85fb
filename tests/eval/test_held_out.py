"""Held-out loss of texts, answers and pairs, against a direct computation, whatever the rows and the mesh."""

import contextlib
import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_chats
import tiny_data
import tiny_models as tiny
from tiny_steps import make_mesh

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.data.batches import example_rows, replay
from jaxlm.data.tokenizer.ours import Tokenizer
from jaxlm.devices import sharding
from jaxlm.eval import held_out
from jaxlm.step.objectives import base, dpo, reward

MIXTURE = {"a": 3.0, "b": 1.0}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_data.make(tmp_path_factory.mktemp("data"), MIXTURE)


def make_config(**evaluation) -> config.Config:
    c = config.resolve(config_files.load("base", ["data.path=x", "train.seq_len=16", "eval.batch_size=8"]))
    model = dataclasses.replace(tiny.model_config(n_layers=1), vocab_size=300)
    return dataclasses.replace(c, model=model, eval=dataclasses.replace(c.eval, **evaluation))


def with_rows(c, evaluation, tokens, **changed) -> config.Config:
    """`c` with a section `eval`, rows of so many tokens, and plain cross-entropy."""
    rows, plain = dataclasses.replace(c.train, seq_len=tokens), dataclasses.replace(c.loss, tile_tokens=0)
    return dataclasses.replace(c, train=rows, loss=plain, eval=dataclasses.replace(evaluation, **changed))


def evaluator(c, model, data, mixture, mesh):
    return held_out.make(model, data, mixture, mesh, c)


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


ROWS, TOKENS = 8, 48


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """(model, its variables, packed chats, text, config)."""
    folder, tokenizer = tmp_path_factory.mktemp("chats"), tiny_chats.tokenizer()
    texts = (json.dumps({"text": f"{i} {word} is the sea"}) for i, word in enumerate(tiny_chats.WORDS * 5))
    (folder / "text.jsonl").write_text("\n".join(texts))
    path = tiny_chats.chats(folder / "chats.jsonl", 120)
    keys = [f"data.path={path}", "data.val_fraction=0.4", "eval.max_mb=0", "eval.max_examples=0"]
    c = config.resolve(config_files.load("base", keys))
    made = example_rows.make(c.data, c.examples, tokenizer, pairs=False, sizes=example_rows.Sizes(0, TOKENS, ROWS))
    text = replay.open_text(str(folder / "text.jsonl"), tokenizer, text_key="text", val_fraction=0.5)
    model = models.build(tiny.model_config(vocab_size=tokenizer.vocab_size, n_layers=1), "xla")
    return model, {"params": tiny.random_params(model)}, made, text, with_rows(c, c.eval, TOKENS, batch_size=ROWS)


def test_of_answers_and_of_text(given):
    model, variables, data, text, c = given
    mesh = make_mesh(data=2, fsdp=2)
    own = held_out.of_answers(model, data, mesh, c)
    found = held_out.joined([own, held_out.of_base(model, text, mesh, c)])(variables)
    sums = np.zeros(4)
    for batch, without in zip(data.held_out(4), data.held_out(4, ends=False), strict=True):
        nll = -tiny.jit(lambda v, b: base.token_logp(model, v, b))(variables, batch)
        for at, weights in enumerate((batch["weights"], without["weights"])):
            sums[2 * at : 2 * at + 2] += (nll * weights).sum(), weights.sum()
    assert sums[3] < sums[1]  # each answer ends
    assert found["val/loss"] == pytest.approx(sums[0] / sums[1], rel=1e-5)
    assert found["val/text_loss"] == pytest.approx(sums[2] / sums[3], rel=1e-5)
    whole = held_out.make(model, text, text.mixture, mesh, c)(variables)
    assert found[held_out.BASE] == pytest.approx(whole["val/replay/bits_per_byte"])
    assert set(found) == {"val/loss", "val/text_loss", held_out.BASE}
    fewer = with_rows(c, c.eval, TOKENS, max_examples=9)
    assert not math.isclose(held_out.of_answers(model, data, mesh, fewer)(variables)["val/loss"], found["val/loss"])


def test_nothing_held_out(given):
    model, _, data, _, c = given
    none = dataclasses.replace(data, val=data.val.take(np.zeros(len(data.val), bool)))
    assert held_out.joined([held_out.of_answers(model, none, make_mesh(), c), None]) is None


KEYS = ["data.path=x", "train.seq_len=192", "eval.batch_size=4", "eval.max_examples=0"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tiny_chats.pairs(tmp_path_factory.mktemp("pairs") / "p.jsonl", 30)
    return tiny_chats.make(path, tiny_chats.tokenizer(), pairs=True)


@pytest.fixture(scope="module")
def model(pairs):
    return models.build(tiny.model_config(vocab_size=pairs.data.vocab_size, max_seq_len=192, n_layers=1), "xla")


@pytest.fixture(scope="module")
def judged(pairs, model):
    return held_out.judge(model, {"params": tiny.random_params(model)}, pairs, make_mesh(), 4, 0)


def test_a_reference_judges_each_pair(pairs, model, judged):
    params = tiny.random_params(model)
    logits_of = tiny.jit(lambda tokens: tiny.logits(model, params, tokens))
    for said, source in zip(judged, (pairs.train, pairs.val), strict=True):
        assert said.shape == (len(source), 2)
        for number in (0, len(source) - 1):
            for ids, kinds, got in zip(*zip(*source.segments(number), strict=True), said[number], strict=True):
                row = np.pad(ids, (0, 192 - len(ids)))[None]  # alone in it; what comes behind is not seen
                logits = np.asarray(logits_of(row)[0, : len(ids) - 1], np.float64)
                logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
                want = logp[np.arange(len(ids) - 1), ids[1:]][kinds[1:] > 0].sum()
                assert got == pytest.approx(want, rel=1e-4)


def test_on_a_mesh_it_says_the_same(pairs, model, judged):
    on = held_out.judge(model, {"params": tiny.random_params(model)}, pairs, make_mesh(data=2, context=2), 4, 7)
    for got, want in zip(on, judged, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4)


def settings(model, *keys) -> config.Config:
    return dataclasses.replace(config.resolve(config_files.load("base", [*KEYS, *keys])), model=model.config)


def test_held_out_figures_are_means_over_pairs(pairs, model, judged):
    params = {"params": tiny.random_params(model, seed=1)}
    c = settings(model, "dpo.beta=0.5")
    given, (_, reference) = pairs.with_reference(*judged), judged
    _, policy = held_out.judge(model, params, pairs, make_mesh(), 4, 0)
    margins = 0.5 * ((policy - reference)[:, 0] - (policy - reference)[:, 1])
    evaluate = held_out.of_pairs(dpo.make(model, c), given, make_mesh(), c)
    assert evaluate(params) == {
        "val/loss": pytest.approx(np.log1p(np.exp(-margins)).mean(), rel=1e-4),
        "val/accuracy": pytest.approx((margins > 0).mean()),
        "val/predicted": pytest.approx((1 / (1 + np.exp(-margins))).mean(), rel=1e-4),
        "val/margin": pytest.approx(margins.mean(), rel=1e-4),
    }
    fewer = dataclasses.replace(c, eval=dataclasses.replace(c.eval, max_examples=2))
    assert held_out.of_pairs(dpo.make(model, c), given, make_mesh(), fewer)(params)["val/margin"] != pytest.approx(
        margins.mean(), rel=1e-4
    )


def test_a_reward_models_head_is_held_to_the_same_pairs(pairs, model):
    c = settings(model)
    new = {"params": tiny.random_params(model), "score": {"score_head": {"kernel": np.zeros(model.config.d_model)}}}
    evaluate = held_out.of_pairs(reward.make(model, c), pairs, make_mesh(), c)
    found = evaluate(new)
    margin = float(pairs.val.margins_E.mean())
    assert found["val/accuracy"] == 0.5
    assert found["val/loss"] > np.log(2) + margin / 4  # the pairs' margins count


def test_without_held_out_pairs_nothing_is_measured(pairs, model):
    c = settings(model)
    none = dataclasses.replace(pairs, val=pairs.val.take(np.zeros(len(pairs.val), bool)))
    assert held_out.of_pairs(dpo.make(model, c), none, make_mesh(), c) is None


SHORT_ROWS = 32
MACHINES = [(6, 1), (2, 8)]  # rows in memory, devices; eight devices take eight rows


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("files"), tiny_chats.tokenizer()
    chats = tiny_chats.make(tiny_chats.chats(folder / "chats.jsonl", 60), tokenizer)
    compared = tiny_chats.make(tiny_chats.pairs(folder / "pairs.jsonl", 60), tokenizer, pairs=True)
    return {"text": tiny_data.make(folder / "data", MIXTURE), "answers": chats, "pairs": compared}


def text(model, data, mesh, settings):
    return held_out.make(model, data, MIXTURE, mesh, with_rows(make_config(), settings, SHORT_ROWS))


def of_answers(model, data, mesh, settings):
    return held_out.of_answers(model, data, mesh, with_rows(make_config(), settings, SHORT_ROWS))


def of_pairs(model, data, mesh, settings):
    keys = ["data.path=x", "dpo.loss=simpo", "dpo.margin=0.1"]
    c = dataclasses.replace(config.resolve(config_files.load("base", keys)), model=model.config)
    return held_out.of_pairs(dpo.make(model, c), data, mesh, dataclasses.replace(c, eval=settings))


KINDS = {"text": text, "answers": of_answers, "pairs": of_pairs}
LIMITS = ["eval.max_mb=0.0012", "eval.max_examples=11"]
OLDER = ["eval.max_batches=1", "eval.batch_size=3"]
ENGINES = pytest.mark.engines


@pytest.mark.parametrize(
    ("kind", "limits", "within"),
    [
        ("text", LIMITS, 1e-6),
        pytest.param("answers", LIMITS, 1e-6, marks=ENGINES),
        pytest.param("pairs", LIMITS, 1e-6, marks=ENGINES),
        # The same rows; their sum in float32 is over a batch, as it was.
        pytest.param("text", OLDER, 1e-5, marks=ENGINES),
        pytest.param("answers", OLDER, 1e-5, marks=ENGINES),
        pytest.param("pairs", OLDER, 1e-5, marks=ENGINES),
    ],
)
def test_rows_in_memory_and_devices_change_no_held_out_loss(files, kind, limits, within):
    data = files[kind]
    size = data.vocab_size if kind == "text" else data.data.vocab_size
    model = models.build(tiny.model_config(vocab_size=size, max_seq_len=192, n_layers=1), "xla")
    variables = {"params": tiny.random_params(model)}
    limited = config.resolve(config_files.load("base", ["data.path=x", *limits])).eval
    found = []
    for rows, devices in MACHINES:
        mesh = make_mesh(data=devices)
        with jax.set_mesh(mesh):
            settings = dataclasses.replace(limited, batch_size=rows)
            found.append(KINDS[kind](model, data, mesh, settings)(variables)["val/loss"])
    np.testing.assert_allclose(found, found[0], rtol=0, atol=within)
    whole = dataclasses.replace(limited, max_mb=0.0, max_examples=0, older_batches=())
    of_all = KINDS[kind](model, data, make_mesh(), whole)(variables)["val/loss"]
    assert abs(of_all - found[0]) > 10 * within  # the limit is one
