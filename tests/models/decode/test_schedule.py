"""Many answers at once: each is what its prompt, its seed and the weights say, to the bit where the call is the same."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

from jaxlm import config, models
from jaxlm.devices import sharding
from jaxlm.models.decode import ring
from jaxlm.models.decode.engine import Engine, Settings
from jaxlm.models.decode.schedule import Ask, Ticket, answers, tokens_of

RNG = np.random.default_rng(0)
PROMPTS = [[5, 7, 11], RNG.integers(0, 101, 29).tolist(), [42]]
ASKED = [prompt for prompt in PROMPTS for _ in range(3)]
SEEDS = range(10, 19)


@functools.cache
def built():
    model = models.build(tiny.model_config(n_layers=1), "xla")
    return model, {"params": tiny.random_params(model)}


def engine(rows: int = 9, **more) -> Engine:
    return Engine(*built(), rows=rows, **({"chunk": 8, "shortest": 16, "prefix_bytes": 0} | more))


def asks(prompts=ASKED, new: int = 14, seeds=SEEDS, **more) -> list[Ask]:
    own = {"logprobs": 0, "keeps_stop": True} | more
    return [Ask(tuple(ids), new, seed=seed, **own) for ids, seed in zip(prompts, seeds, strict=True)]


def draw(engine: Engine, *args, **more) -> list[tuple[list[int], np.ndarray]]:
    drawn = tokens_of(engine, asks(*args, **more), engine.rows)
    return [([token.id for token in tokens], np.float32([token.logp for token in tokens])) for tokens in drawn]


def ids(drawn) -> list[list[int]]:
    return [ids for ids, _ in drawn]


@functools.cache
def expected():
    return draw(engine())


def test_an_answer_is_its_row_alone_and_its_log_probabilities_are_the_full_forward():
    model, variables = built()
    forward = tiny.jit(lambda tokens: jax.nn.log_softmax(tiny.logits(model, variables["params"], tokens)[0]))
    for prompt, (new, logp) in zip(ASKED, expected(), strict=True):
        assert len(new) == len(logp) == 14
        behind = [0] * (29 - len(prompt))  # one program for all
        logp_TxV = np.asarray(forward(jnp.asarray([prompt + new + behind])))[len(prompt) - 1 :]
        np.testing.assert_allclose(logp, logp_TxV[np.arange(14), new], atol=1e-4)
    one = engine(4)
    for number in (0, 4, 8):
        prefill = one.begin(ASKED[number])
        while prefill.left:
            one.read(prefill)
        one.resize(64)
        one.insert(prefill, 2, Settings(seed=SEEDS[number]))
        bursts = [one.step(np.arange(4) == 2, steps=4).token_NxB[:, 2].tolist() for _ in range(4)]
        assert [token for burst in bursts for token in burst][:14] == expected()[number][0]
    assert len({tuple(new) for new in ids(expected())}) == 9


@pytest.mark.parametrize("chunk", [8, 24])
def test_a_batch_has_a_ring_for_its_longest_text(chunk):
    one = engine(2, chunk=chunk)
    for places in (0, 1, 20, 33, 49, 64):
        one.reset(places=places)
        wanted = min(places or 64, 64)
        assert all(length % chunk == 0 for length in one.lengths)
        assert one.lengths == sorted(set(one.lengths))
        assert wanted <= one.lengths[-1] <= max(one.lengths[0], wanted + max(chunk, wanted // 4) - 1)
        assert all(longer <= 4 * shorter for shorter, longer in itertools.pairwise(one.lengths))
    drawn = draw(one := engine(2, chunk=8), PROMPTS[1:2], 6, SEEDS[:1])
    assert one.lengths == [16, 40]
    whole = tokens_of(again := engine(2, chunk=8), asks(PROMPTS[1:2], 6, SEEDS[:1]), 2, places=64)
    assert again.lengths == [16, 32, 64]
    assert ids(drawn) == [[token.id for token in tokens] for tokens in whole]


def test_more_answers_than_rows_are_the_same_answers():
    drawn = draw(engine(4))
    assert ids(drawn) == ids(expected())
    for (_, logp), (_, other) in zip(drawn, expected(), strict=True):
        np.testing.assert_allclose(logp, other, atol=1e-4)


def test_the_same_call_gives_the_same_bits_whatever_came_before():
    one = engine(4, prefix_bytes=2**20)
    first = draw(one)
    draw(one, [PROMPTS[1], [1, 2]], 5, [3, 4])
    again = draw(one)
    assert ids(again) == ids(first)
    assert all((logp == other).all() for (_, logp), (_, other) in zip(again, first, strict=True))
    assert ids(draw(one, seeds=range(20, 29))) != ids(first)


def test_an_answer_ends_at_a_stop_or_with_the_context():
    stop = expected()[0][0][5]
    for (new, logp), whole in zip(draw(engine(4), stop_ids=(stop,)), ids(expected()), strict=True):
        end = whole.index(stop) + 1 if stop in whole else 14
        assert new == whole[:end]
        assert len(logp) == end
    long = RNG.integers(0, 101, 61).tolist()
    assert [len(new) for new in ids(draw(engine(4), [long, [3]], 9, [1, 2]))] == [3, 9]
    with pytest.raises(config.ConfigError, match="prompt 1 has no tokens"):
        draw(engine(4), [[3], []], 9, [1, 2])


def test_a_text_that_is_cut_frees_its_row():
    """A batch that is read as it comes is the batch read at once, but for a text of which somebody has enough."""
    tickets, new = [Ticket(ask) for ask in asks()], [[] for _ in ASKED]
    for number, update in answers(engine(2), tickets, 2):
        new[number] += [token.id for token in update.tokens]
        if number == 1:
            tickets[1].cancel()
    cut, whole_1 = new.pop(1), ids(expected())[1]
    assert new == [new for number, new in enumerate(ids(expected())) if number != 1]
    assert cut == whole_1[: len(cut)]
    assert 0 < len(cut) < len(whole_1)


def test_equal_prompts_are_read_once_and_several_together(monkeypatch):
    one, read = engine(4), []
    monkeypatch.setattr(one, "read", lambda prefill: read.append(prefill.prompts) or Engine.read(one, prefill))
    assert ids(draw(one)) == ids(expected())
    assert [[len(ids) for ids in prompts] for prompts in read] == [[3, 29, 1]] * 4  # chunks of the longest


def test_other_weights_are_other_answers_and_compile_nothing():
    model, variables = built()
    other = {"params": jax.tree.map(lambda x: x * 1.1, variables["params"])}
    one = engine()
    draw(one)
    programs = (ring.empty, ring.step, ring.read_chunk, ring.insert, ring.resized, ring.cache)
    before = [program._cache_size() for program in programs]
    one.load(other)
    drawn = draw(one)
    assert [program._cache_size() for program in programs] == before
    fresh = draw(Engine(model, other, rows=9, chunk=8, shortest=16, prefix_bytes=0))
    assert ids(drawn) == ids(fresh) != ids(expected())
    assert all((logp == same).all() for (_, logp), (_, same) in zip(drawn, fresh, strict=True))
    one.load(variables)
    assert ids(draw(one)) == ids(expected())


def test_weights_that_diverged_are_one_line():
    one = engine()
    one.load({"params": jax.tree.map(lambda x: x * np.nan, built()[1]["params"])})
    with pytest.raises(config.RunError, match="not finite"):
        draw(one)


def test_a_mesh_changes_no_answer():
    model, variables = built()
    mesh = sharding.make_mesh(config.MeshConfig(data=1, fsdp=4, tensor=2, context=1))
    placed = sharding.tree_shardings(models.abstract_params(model), models.logical_axes(model), mesh)
    split = {"params": jax.device_put(variables["params"], placed)}
    with jax.set_mesh(mesh):
        one = Engine(model, split, rows=8, chunk=8, shortest=64, prefix_bytes=0)
        one.load(split)
        assert ids(draw(one)) == ids(expected())


def greedy(prompt, count: int, presence=0.0, frequency=0.0, repetition=1.0) -> list[int]:
    """The likeliest tokens after penalties, one full forward pass each, by vLLM's formulas."""
    model, variables = built()
    forward = tiny.jit(lambda tokens: tiny.logits(model, variables["params"], tokens)[0])
    new: list[int] = []
    for _ in range(count):
        padded = [*prompt, *new, *[0] * (count - len(new))]
        logits_V = np.asarray(forward(jnp.asarray([padded])))[len(prompt) + len(new) - 1, :101].copy()
        for token in {*prompt, *new}:
            logits_V[token] *= 1 / repetition if logits_V[token] > 0 else repetition
        for token in {*new}:
            logits_V[token] -= presence + frequency * new.count(token)
        new.append(int(logits_V.argmax()))
    return new


def test_penalties_are_vllms_and_change_no_neighbour():
    own = [(0.0, 0.0, 1.0), (0.4, 0.0, 1.0), (0.0, 0.3, 1.0), (0.0, 0.0, 1.3), (-1.0, 0.0, 0.8)]
    plain = {"temperature": 0.0, "bias": {}}
    asked = [Ask((5, 7, 11), 14, penalties=penalties, **plain) for penalties in own]
    drawn = [[token.id for token in tokens] for tokens in tokens_of(engine(5), asked, 5)]
    assert drawn == [greedy([5, 7, 11], 14, *penalties) for penalties in own]
    assert len({*map(tuple, drawn)}) == 5
    again = tokens_of(engine(5), [asked[0]] * 5, 5)  # without penalties in the batch, in bursts
    assert [[token.id for token in tokens] for tokens in again] == [drawn[0]] * 5
