"""The scorer: shared beginnings and packing change nothing but the time; bits per byte of any text."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_chats
import tiny_models as tiny
from tiny_steps import make_mesh

from jaxlm import config, models
from jaxlm.config import ConfigError
from jaxlm.devices import sharding
from jaxlm.eval import compare, likelihood, text

TOKENIZER = types.SimpleNamespace(opening=(2,), eos_id=2)


def make(mesh=(1, 1, 1, 1), tokens=512, tile=0, **overrides):
    model = models.build(tiny.model_config(**{"max_seq_len": 48, "n_layers": 1} | overrides), "blocked")
    on = sharding.make_mesh(config.MeshConfig(*mesh), jax.devices()[: math.prod(mesh)])
    variables = {"params": tiny.random_params(model)}
    return likelihood.Scorer(model, variables, TOKENIZER, on, tokens, tile)


def questions(count=12, seed=0):
    """Questions with choices behind one context, some behind the same worked example, one choice twice."""
    rng = np.random.default_rng(seed)
    example = rng.integers(3, 101, 9).tolist()
    requests = []
    for number in range(count):
        context = [2, *(example if number % 2 else []), *rng.integers(3, 101, rng.integers(1, 12)).tolist()]
        choices = [rng.integers(3, 101, rng.integers(1, 7)).tolist() for _ in range(4)]
        requests += [(context, choice) for choice in [*choices, choices[0]]]
    return requests


def alone(scorer, context, scored):
    """(log p, greedy) by a plain forward pass of one text, padded to one length to compile once."""
    ids = [*context, *scored][-scorer.context - 1 :]
    padded = jnp.asarray([ids[:-1] + [0] * (scorer.context + 1 - len(ids))])
    logits_of = alone.__dict__.setdefault(
        scorer.model.config, tiny.jit(lambda params, tokens: tiny.logits(scorer.model, params, tokens))
    )
    logp = np.asarray(jax.nn.log_softmax(logits_of(scorer.variables["params"], padded)[0]))
    at = np.arange(len(ids) - 1 - len(scored), len(ids) - 1)
    return logp[at, scored].sum(dtype=np.float64), bool((logp[at].argmax(-1) == scored).all())


def check(scorer, requests):
    for (context, scored), got in zip(requests, scorer.score(requests), strict=True):
        logp, greedy = alone(scorer, context, scored)
        assert got.logp == pytest.approx(logp, abs=2e-5)
        assert (got.greedy, got.tokens) == (greedy, len(scored))


@pytest.mark.parametrize(("mesh", "tile"), [((1, 1, 1, 1), 40), ((2, 2, 1, 2), 40), ((1, 2, 4, 1), 0)])
def test_each_choice_scores_as_it_does_alone(mesh, tile):
    check(make(mesh, tile=tile), questions())


def test_other_models_score_alike():
    check(make(family="gpt2", scan_layers=True, n_layers=2), questions(4))


def test_a_greedy_continuation_is_one():
    scorer = make()
    context = [2, 5, 7]
    best = []
    for _ in range(3):
        best.append(max(range(101), key=lambda i: alone(scorer, [*context, *best], [i])[0]))
    wrong = [*best[:2], (best[2] + 1) % 101]
    assert [score.greedy for score in scorer.score([(context, best), (context, wrong)])] == [True, False]


def test_a_beginning_stands_in_a_row_once():
    requests = questions()
    rows = likelihood.pack(requests, 4096)
    texts = {tuple([*context, *scored[:-1]][: n + 1]) for context, scored in requests for n in range(99)}
    assert len(rows) == 1
    assert len(rows[0].tokens) == len(texts)


def test_no_row_is_too_long_and_questions_stay_whole():
    requests = questions(40)
    rows = likelihood.pack(requests, 64)
    assert max(len(row.tokens) for row in rows) <= 64
    assert sorted(number for row in rows for number, _, _ in row.spans) == list(range(len(requests)))
    held = [{number // 5 for number, _, _ in row.spans} for row in rows]
    assert sum(map(len, held)) == 40


def test_a_text_longer_than_the_context_is_cut_on_the_left_and_told(capsys):
    scorer = make()
    long = ([2, *range(3, 80)], [5, 6])
    check(scorer, [long, ([2, 9], [7])])
    told = "scoring: 1 of 2 texts are longer than the model's context of 48 tokens: cut on the left"
    assert told in capsys.readouterr().err
    scorer.of(scorer.variables).score([long, ([2, 9], [7])])  # the next evaluation of a training
    assert told not in capsys.readouterr().err


def test_what_is_longer_than_the_context_is_scored_in_windows():
    scorer = make()
    ids = np.random.default_rng(1).integers(3, 101, 130).tolist()
    whole = [2, *ids]
    windows = [([2], ids[:48]), (whole[48:49], ids[48:96]), (whole[82:97], ids[96:])]
    assert [len(context) + len(scored) for context, scored in windows] == [49, 49, 49]
    want = sum(alone(scorer, *window)[0] for window in windows)
    (got,) = scorer.score([((2,), ids)])
    assert got.logp == pytest.approx(want, abs=1e-4)
    assert got.tokens == 130


def test_nothing_to_score_is_certain():
    assert make().score([([2, 5], [])]) == [(0.0, True, 0)]
    assert make().score([]) == []


def test_a_log_p_that_is_not_finite_is_refused():
    scorer = make()
    damaged = scorer.of(jax.tree.map(lambda leaf: leaf * math.nan, scorer.variables))
    with pytest.raises(
        likelihood.NotFinite, match=r"^made: log p of a text is not finite: the model's weights are damaged"
    ):
        damaged.score(questions(2), "made")


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
