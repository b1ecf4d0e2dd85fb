"""Proposed tokens: the text is the one without proposals, drawn or greedy, whatever is proposed; what is proposed, and when."""

import functools

import jax
import numpy as np
import pytest
import tiny_models as tiny

from jaxlm import models
from jaxlm.models import quantized
from jaxlm.models.decode import drafts, engine
from jaxlm.models.decode.drafts import Draft
from jaxlm.models.decode.engine import Engine, Settings
from jaxlm.models.decode.schedule import Ask, Scheduler, Ticket

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 101, size).tolist() for size in (3, 9, 21)]
DRAWN = {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "seed": 5}


@functools.cache
def built(kind: str = "float"):
    """A model that writes loops: what it wrote before comes again."""
    model = models.build(tiny.model_config(n_layers=1), "xla")
    params = tiny.random_params(model)
    return model, {"params": params} if kind == "float" else quantized.in_int8(model, {"params": params})


@pytest.fixture
def sizes(monkeypatch):
    """Sets how many tokens are proposed, as if it were measured, and how many a step must give."""

    def fix(size: int, least: float = 0.0) -> None:
        monkeypatch.setattr(drafts, "best", lambda seconds: (size, least))
        monkeypatch.setattr(Engine, "_seconds", lambda self, size: 1.0)
        monkeypatch.setattr(engine, "_SIZES", {})

    return fix


def write(asks: list[Ask], speculate: bool, rows: int = 1, kind: str = "float", **more):
    """The answers, as a server writes them, and the steps that this took."""
    given = {"rows": rows, "chunk": 8, "shortest": 16, "prefix_bytes": 0} | more
    scheduler = Scheduler(Engine(*built(kind), speculate=speculate, **given))
    texts: list[list[int]] = [[] for _ in asks]
    for text, ask in zip(texts, asks, strict=True):
        scheduler.waiting.append(
            Ticket(ask, lambda update, text=text: text.extend(token.id for token in update.tokens))
        )
    while scheduler.busy:
        scheduler.turn()
    assert scheduler.counts["tokens"] == sum(map(len, texts))
    return texts, scheduler.counts["steps"]


@pytest.mark.parametrize("kind", ["float", "int8"])
@pytest.mark.parametrize("drawing", [{"temperature": 0.0}, DRAWN])
def test_the_text_is_the_one_without_proposals(sizes, drawing, kind):
    """In a ring that turns round, grows, and is full at the end of the context (43 tokens more than the longest prompt)."""
    sizes(3)
    for prompt in PROMPTS:
        prompt = prompt + prompt[:2]
        ask = Ask((*prompt, *prompt), 60, **drawing)
        (expected,), steps = write([ask], False, kind=kind)
        (got,), fewer = write([ask], True, kind=kind)
        assert got == expected
        assert fewer <= steps
        if not drawing["temperature"]:
            assert fewer < 0.8 * steps  # else the test shows nothing


def test_whatever_is_proposed_the_text_is_the_same(sizes, monkeypatch):
    sizes(3)
    ask = Ask(tuple(PROMPTS[2]), 30, temperature=0.0)
    (expected,), _ = write([ask], False)
    monkeypatch.setattr(Draft, "near", True)
    for propose in ("right", "wrong", "half"):

        def proposed(self, propose=propose):
            at = len(self._ids) - len(ask.ids)
            right = [*expected[at:], 0, 0, 0][:3]
            return {"right": right, "wrong": [100 - x for x in right], "half": [right[0], 100 - right[1], right[2]]}[
                propose
            ]

        monkeypatch.setattr(Draft, "propose", proposed)
        (got,), steps = write([ask], True)
        assert got == expected
        # Of the last tokens none is proposed: a step of four has no room there.
        assert steps in {"right": (8, 9, 10), "wrong": (30, 31), "half": (15, 16, 17, 18)}[propose]


def test_proposals_change_no_distribution(sizes, monkeypatch):
    """Of 2,000 seeds: the first two tokens, with a proposal that is often right, against the probabilities of the model."""
    sizes(1)
    model, variables = built()
    one = Engine(model, variables, rows=1, chunk=8, shortest=16, prefix_bytes=0, speculate=True)
    prefill = one.begin([5, 7, 11, 5, 7])
    while prefill.left:
        one.read(prefill)

    def next_probs(ids: list[int]) -> np.ndarray:
        return np.asarray(jax.nn.softmax(tiny.logits(model, variables["params"], np.asarray([ids]))[0, -1] / 0.3))

    probs = next_probs([5, 7, 11, 5, 7])
    guess = int(probs.argmax())
    after = next_probs([5, 7, 11, 5, 7, guess])
    first, second = np.zeros(101), np.zeros(101)
    for seed in range(2000):
        one.insert(prefill, 0, Settings(temperature=0.3, seed=seed))
        tokens = np.asarray(one.start_first([guess]).token_NxB[:, 0])
        first[tokens[0]] += 1
        if tokens[0] == guess:
            second[tokens[1]] += 1
    assert 0.05 < probs[guess] < 0.95
    for counts, expected in ((first, probs), (second, after)):
        total = counts.sum()
        error = np.sqrt(expected * (1 - expected) / total)
        assert (np.abs(counts / total - expected) < 4.5 * error + 2 / total).all()
    assert np.abs(first / 2000 - np.eye(101)[guess]).max() > 0.05  # it is not the proposal that is drawn


def test_nothing_is_proposed_while_others_live_nor_with_a_bias(sizes, monkeypatch):
    sizes(3)
    proposed = []
    propose = Draft.propose
    monkeypatch.setattr(Draft, "propose", lambda self: proposed.append(propose(self)) or proposed[-1])
    asks = [Ask((5, 7, 11) * 4, 20, temperature=0.0, seed=seed) for seed in range(2)]
    both, _ = write(asks, True, rows=2)
    assert not any(proposed)
    assert write(asks[:1], True, rows=2)[0] == both[:1]
    assert any(proposed)
    proposed.clear()
    for more in ({"bias": {3: 0.5}}, {"logprobs": 1}):
        write([Ask((5, 7, 11) * 4, 20, temperature=0.0, **more)], True)
    assert not any(proposed)


def test_a_request_that_comes_meanwhile_changes_nothing(sizes):
    sizes(3)
    asks = [Ask((*prompt, *prompt), 24, temperature=0.0) for prompt in PROMPTS[:2]]
    expected = [write([ask], False)[0][0] for ask in asks]
    scheduler = Scheduler(Engine(*built(), rows=2, chunk=8, shortest=16, prefix_bytes=0, speculate=True))
    rows: list[list[int]] = [[], []]
    for number, ask in enumerate(asks):
        scheduler.waiting.append(
            Ticket(ask, lambda update, number=number: rows[number].extend(token.id for token in update.tokens))
        )
        for _ in range(9):
            scheduler.turn()
    while scheduler.busy:
        scheduler.turn()
    assert rows == expected


def test_what_followed_the_newest_place_is_proposed():
    draft = Draft([1, 2, 3, 4, 5, 9, 1, 2, 3, 6, 7, 8, 1, 2, 3], 3, 1.0)
    assert draft.near
    assert draft.propose() == [6, 7, 8]
    draft.add([7])
    assert not draft.near
    assert draft.propose() == []
    assert Draft([4, 5, 4, 5, 4, 5], 5, 1.0).propose() == [4, 5, 4, 5, 4]  # it goes on with itself
    assert Draft([1, 2], 3, 1.0).propose() == []


def test_proposals_end_where_they_do_not_pay():
    draft = Draft([1, 2, 3, 1, 2, 3], 3, 1.5)
    for _ in range(100):
        draft.judge(2)
    for _ in range(63):
        draft.judge(1)
        if not draft.size:
            break
    # Of the last 64 steps the half gave a token each: 96 tokens.
    assert sum(draft._given) < 1.5 * 64
    assert (draft.near, draft.propose()) == (False, [])
    costs = {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.4}
    assert drafts.best(costs) == (3, pytest.approx(1.3))
    assert drafts.best({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0})[0] == 0


def test_the_size_is_measured_once_in_a_process(monkeypatch):
    monkeypatch.setattr(engine, "_SIZES", {})
    one = Engine(*built(), rows=1, chunk=8, shortest=16, prefix_bytes=0, speculate=True)
    draft = one.draft([1])
    assert draft.size in [size - 1 for size in drafts.SIZES]
    monkeypatch.setattr(Engine, "_seconds", None)
    assert one.draft([1]).size == draft.size
