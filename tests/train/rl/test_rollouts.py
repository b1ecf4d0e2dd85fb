"""Batches that the policy itself writes."""

import dataclasses
import json
import pathlib
import types

import jax
import numpy as np
import pytest
import tiny_chats
import tiny_models as tiny

from jaxlm import config
from jaxlm.config import MeshConfig, RunError, config_files
from jaxlm.data.chats import chat
from jaxlm.devices.sharding import make_mesh
from jaxlm.step import parts as parts_lib
from jaxlm.step.objectives import policy
from jaxlm.train.rl import rollouts

PROMPTS, ANSWERS, ROWS, T, NEW = 2, 4, 4, 80, 6


@dataclasses.dataclass(frozen=True)
class Item:
    ids: tuple[int, ...]
    messages: tuple
    place: str
    columns: dict = dataclasses.field(default_factory=dict)


class Texts:
    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def tokenizer(self):
        return self._tokenizer


class Prompts:
    """Two questions a step, of 2 to 6 words."""

    def __init__(self, tokenizer):
        self.data = Texts(tokenizer)

    def step(self, step):
        return [self._item(2 * step + i) for i in range(PROMPTS)]

    def held_out(self, count):
        return [self._item(1000 + i) for i in range(min(count, 3))]

    def batch_number(self, step):
        return step

    def _item(self, number):
        words = tiny_chats.WORDS[number % 7 : number % 7 + 2 + number % 4]
        messages = ({"role": "user", "content": " ".join(words)},)
        return Item(tuple(chat.ids(self.data.tokenizer(), messages)), messages, f"q{number}")


class Rewarder:
    """As many points as an answer has characters."""

    closed = 0

    def __call__(self, items, answers):
        assert len(items) == len(answers)
        found = np.asarray([len(answer) for answer in answers], np.float32)
        return found, {"length": found}

    def close(self):
        self.closed += 1


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_chats.tokenizer()


def make(tokenizer, folder, mesh=None, **keys):
    """(rollouts, parts, state) of a tiny model."""
    overrides = {"program": "grpo", "workdir": folder, "data.path": "x", "reward.function": "a:b"}
    overrides |= {"rollout.prompts": PROMPTS, "rollout.answers": ANSWERS, "rollout.max_new_tokens": NEW}
    overrides |= {"train.batch_size": ROWS, "train.seq_len": T, "train.steps": 10, "policy.mask_truncated": False}
    overrides |= {"optim.lr": 1e-3, "optim.warmup_steps": 0, "log.every_steps": 2, "eval.max_examples": 4}
    overrides |= {name.replace("__", "."): value for name, value in keys.items()}
    overrides |= {f"model.{name}": value for name, value in (tiny.BASE | {"n_layers": 1}).items()}
    overrides |= {"model.vocab_size": tokenizer.vocab_size, "model.attention": "xla"}
    c = config.resolve(config_files.load("base", [f"{name}={value}" for name, value in overrides.items()]))
    mesh = mesh or make_mesh(MeshConfig(data=1, fsdp=1, tensor=1, context=1), jax.devices()[:1])
    made = parts_lib.make(c, mesh, policy.make)
    state, frozen = made.create()
    reference = state.params if c.policy.reference else None
    with jax.set_mesh(mesh):
        found = rollouts.Rollouts(made, frozen, Prompts(tokenizer), Rewarder(), reference, folder)
    return found, made, state


def batch_of(found, made, state):
    with jax.set_mesh(made.mesh):
        return jax.device_get(found(state))


def anew(grpo, folder, **sections):
    """As `make`, with the same model and state; some keys of the config are others."""
    found, made, state = grpo
    made = dataclasses.replace(made, config=config.with_keys(made.config, **sections))
    with jax.set_mesh(made.mesh):
        return dataclasses.replace(found, parts=made, folder=folder), made, state


def written(folder):
    """What stands in the file of the first step's answers."""
    return [json.loads(line) for line in (pathlib.Path(folder) / "rollouts/1.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def grpo(tokenizer, tmp_path_factory):
    return make(tokenizer, tmp_path_factory.mktemp("grpo"))


@pytest.fixture(scope="module")
def batch(grpo):
    return batch_of(*grpo)


def test_the_batch_is_what_the_objective_takes(grpo, batch):
    shapes = grpo[1].batch()
    assert batch.keys() == shapes.keys()
    for name, shape in shapes.items():
        assert (batch[name].shape, batch[name].dtype) == (shape.shape, shape.dtype), name


def test_answers_stand_behind_their_prompts(grpo, batch, tokenizer):
    """Each row holds two answers; the weights are on their tokens alone."""
    items = [item for item in Prompts(tokenizer).step(1) for _ in range(ANSWERS)]
    lines = written(grpo[1].config.workdir)
    for number, (item, line) in enumerate(zip(items, lines, strict=True)):
        row, segment = divmod(number, 2)
        mine = batch["segment_ids"][row] == segment + 1
        tokens, targets, weights = (batch[name][row][mine] for name in ("tokens", "targets", "weights"))
        prompt = len(item.ids)
        assert tuple(tokens[:prompt]) == item.ids
        assert weights.tolist() == [0.0] * (prompt - 1) + [1.0] * line["tokens"]
        stops = chat.ends(tokenizer)
        said = [i for i in targets[prompt - 1 :].tolist() if i not in stops]
        assert tokenizer.decode(said, follows=True) == line["answer"]
        assert (line["place"], line["reward"]) == (item.place, len(line["answer"]))
        assert line["ended"] == (targets[-1] in stops)
    assert batch["weights"].sum() == sum(line["tokens"] for line in lines)


def test_sampler_and_trainer_agree(batch):
    counted = batch["weights"] > 0
    np.testing.assert_allclose(batch["sampler"][counted], batch["old"][counted], atol=1e-4)
    assert (batch["old"][counted] < 0).all()
    np.testing.assert_allclose(batch["reference"][counted], batch["old"][counted], atol=1e-6)


def test_advantages_are_rewards_less_the_groups_mean(grpo, batch):
    lines = written(grpo[1].config.workdir)
    rewards = np.asarray([line["reward"] for line in lines]).reshape(PROMPTS, ANSWERS)
    wanted = (rewards - rewards.mean(axis=1, keepdims=True)).reshape(ROWS, 2)
    for row in range(ROWS):
        for segment in range(2):
            mine = (batch["segment_ids"][row] == segment + 1) & (batch["weights"][row] > 0)
            np.testing.assert_allclose(batch["advantages"][row][mine], wanted[row, segment], rtol=1e-6)
    figures = dict(zip(policy.FIGURES, batch["figures"][0], strict=True))
    assert figures["reward"] == pytest.approx(rewards.mean())
    assert figures["flat_groups"] == (rewards.std(axis=1) == 0).mean()
    assert figures["answer_tokens"] == pytest.approx(np.mean([line["tokens"] for line in lines]))
    assert figures["truncated"] == np.mean([not line["ended"] for line in lines])
    assert figures["unique"] == len({line["answer"] for line in lines}) / len(lines)


def test_a_resumed_run_draws_the_same(grpo, batch, tmp_path):
    """Also if the first has drawn other steps in between; another step draws other answers."""
    found, made, state = grpo
    later = batch_of(found, made, dataclasses.replace(state, step=state.step + 1))
    assert (later["tokens"] != batch["tokens"]).any()
    for again in (batch_of(found, made, state), batch_of(*anew(grpo, tmp_path))):
        jax.tree.map(np.testing.assert_array_equal, again, batch)


def test_the_step_learns_from_it(grpo, batch):
    found, made, state = grpo
    with jax.set_mesh(made.mesh):
        copied = jax.tree.map(lambda x: x.copy(), state)
        after, metrics = made.jit()({}, copied, found(state))
    assert float(metrics["loss"]) == pytest.approx(0, abs=0.5)
    assert float(metrics["kl"]) == pytest.approx(0, abs=1e-5)
    assert float(metrics["reward"]) == pytest.approx(batch["figures"][0][0])
    assert float(metrics["sampler_gap"]) < 1e-4
    assert int(after.step) == 1
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), after.params, state.params)
    assert max(jax.tree.leaves(moved)) > 0


def test_answers_that_were_cut_off_do_not_count_and_long_ones_cost(grpo, tmp_path):
    found, made, state = anew(grpo, tmp_path, policy={"mask_truncated": True, "overlong_tokens": 4})
    found._stops = frozenset(range(0, made.config.model.vocab_size, 6))  # so that some end
    batch = batch_of(found, made, state)
    lines = written(tmp_path)
    assert {line["ended"] for line in lines} == {True, False}
    assert batch["weights"].sum() == sum(line["tokens"] for line in lines if line["ended"])
    for line in lines:
        over = min(max((line["tokens"] - 2) / 4, 0), 1)
        assert line["overlong"] == pytest.approx(-over)
        assert line["reward"] == pytest.approx(len(line["answer"]) - over)


def test_ppo(tokenizer, tmp_path):
    found, made, state = make(
        tokenizer, tmp_path, program="ppo", policy__beta=0.1, policy__whiten=False, policy__gae_lambda=1.0
    )
    batch = batch_of(found, made, state)
    assert batch.keys() == made.batch().keys()
    counted = batch["weights"] > 0
    assert not batch["values"][counted].any()  # a new head
    for number, line in enumerate(written(tmp_path)):
        row, segment = divmod(number, 2)
        mine = (batch["segment_ids"][row] == segment + 1) & counted[row]
        np.testing.assert_allclose(batch["returns"][row][mine], line["reward"], rtol=1e-5)  # KL is 0 at the start
    figures = dict(zip(policy.figures(made.config), batch["figures"][0], strict=True))
    assert figures["beta"] == pytest.approx(0.1)
    assert figures["explained_variance"] == pytest.approx(0, abs=1e-5)


def test_held_out_prompts(grpo):
    found, made, state = grpo
    with jax.set_mesh(made.mesh):
        first, again = (found.evaluate(state.params) for _ in range(2))
    assert first == again
    assert first.keys() == {"val/reward", "val/ended", "val/answer_tokens"}
    assert 1 <= first["val/answer_tokens"] <= NEW


def test_fewer_rows_than_answers_draw_the_same_texts_and_a_reward_that_fails_is_passed_on(batch, grpo, tmp_path):
    found, made, state = anew(grpo, tmp_path, rollout={"rows": 3})
    fewer = batch_of(found, made, state)
    np.testing.assert_array_equal(fewer["tokens"], batch["tokens"])
    np.testing.assert_allclose(fewer["sampler"], batch["sampler"], atol=1e-4)

    def fails(items, answers):
        raise RunError("q2: the reward hangs")

    found.rewarder = fails
    with pytest.raises(RunError, match="q2: the reward hangs"):
        batch_of(found, made, state)
    found.rewarder = Rewarder()
    found.close()
    assert found.rewarder.closed == 1


def test_on_several_devices(batch, tokenizer, tmp_path):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=1, context=1), jax.devices()[:4])
    several = batch_of(*make(tokenizer, tmp_path, mesh=mesh))
    np.testing.assert_array_equal(several["tokens"], batch["tokens"])
    np.testing.assert_allclose(several["old"], batch["old"], atol=1e-4)


def test_rewards_that_are_equal_have_no_spread():
    """float32 can't add them up exactly: the deviation of equal numbers is not 0."""
    rewards, answer = np.full(64, 0.1, np.float32), rollouts.Answer([1], np.zeros(1), "a", True)
    assert rewards.std() > 0
    parts = types.SimpleNamespace(config=types.SimpleNamespace(rollout=types.SimpleNamespace(prompts=2, answers=32)))
    figures = rollouts.Rollouts._figures(types.SimpleNamespace(parts=parts), [], [answer] * 64, rewards)
    assert figures["reward"] == pytest.approx(0.1)
    assert (figures["reward_std"], figures["flat_groups"]) == (0, 1)
