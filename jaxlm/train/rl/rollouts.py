"""Batches that the policy itself generates: it answers prompts, the answers get rewards, and both become a batch.

A batch depends only on the state, the seed and the step, so a resumed run draws what an uninterrupted one does. Answers are
drawn at temperature 1: so the sampler's log-probabilities are the trainer's, up to rounding.

WORKDIR/rollouts/STEP.jsonl     the answers of a logged step: prompt, place, answer, reward and its parts, ended, tokens

Legend: B rows, T tokens, N answers of a step, n answers of a row, P prompts, A answers to a prompt.
"""

import collections
import dataclasses
import json
import pathlib
import re
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jaxlm.data.batches import pack_examples
from jaxlm.data.chats import chat
from jaxlm.devices import sharding
from jaxlm.devices.processes import say
from jaxlm.host import files
from jaxlm.models.decode import engine, schedule
from jaxlm.ops import returns
from jaxlm.run import clock
from jaxlm.step.objectives import policy
from jaxlm.step.objectives.base import Batch, Variables
from jaxlm.step.parts import Parts
from jaxlm.step.state import TrainState
from jaxlm.step.step import cast
from jaxlm.train.rl.prompts import Item, Prompts

FOLDER = "rollouts"
_WORD = re.compile(r"\w+")
_ALL = 2**31
_EVALUATION = 2**31  # evaluations use other seeds than all steps


class Answer(typing.NamedTuple):
    """The policy's answer to one prompt; `logp`: log p of each token by the decode engine; `ended`: True if not cut off."""

    ids: list[int]
    logp: np.ndarray
    text: str
    ended: bool


Rewarder = Callable[[Sequence[Item], Sequence[str]], tuple[np.ndarray, Mapping[str, np.ndarray]]]


@dataclasses.dataclass(eq=False)
class Rollouts:
    """Gives the train loop the batches of PPO and GRPO (`loop.Batches`), and measures held-out prompts.

    Create and use it under `jax.set_mesh` of the run's mesh.

    Args:
      rewarder: (items, answers) -> (the reward of each, float32[N]; its parts by name).
    """

    activity, from_state = clock.ROLLOUT, True
    parts: Parts
    frozen: Variables
    prompts: Prompts
    rewarder: Rewarder
    reference: Variables | None
    folder: pathlib.Path

    def __post_init__(self):
        self._engine: engine.Engine | None = None
        self._tokenizer = self.prompts.data.tokenizer()
        self._stops = chat.ends(self._tokenizer)
        self._judge = jax.jit(self._judged)
        self.common_word = ""

    def __call__(self, state: TrainState) -> Batch:
        """Returns the batch of the step after `state`. Raises RunError if a reward can't be computed."""
        c, step = self.parts.config, int(state.step) + 1
        items = [item for item in self.prompts.step(step) for _ in range(c.rollout.answers)]
        answers = self._answers(self.frozen | state.params, items, self.prompts.batch_number(step))
        rewards, parts = self._rewards(items, answers)
        if step % c.log.every_steps == 0 or step == 1:
            self._write(step, items, answers, rewards, parts)
        batch, places = self._packed(items, answers)
        batch["sampler"] = self._at_tokens(places, [answer.logp for answer in answers])
        batch["scores"] = rewards.reshape(c.train.batch_size, -1)
        if c.program == "grpo":
            groups_PxA = rewards.reshape(c.rollout.prompts, c.rollout.answers)
            advantages_PxA = returns.group_advantages(groups_PxA, c.policy.scale_advantages)
            batch["advantages"] = self._at_tokens(places, advantages_PxA.reshape(-1))
        on_mesh = self._on_mesh(batch)
        judged = on_mesh | self._judge(self.frozen, state.params, self.reference, state.running, on_mesh)
        figures = self._figures(items, answers, rewards)
        if c.program == "ppo":
            figures |= {"explained_variance": float(judged["explained_variance"]), "beta": float(state.running["beta"])}
        row_F = np.asarray([figures[name] for name in policy.figures(c)], np.float32)
        judged |= self._on_mesh({"figures": np.repeat(row_F[None], c.train.batch_size, axis=0)})
        return {name: judged[name] for name in self.parts.batch()}

    def evaluate(self, variables: Variables) -> dict[str, float]:
        """Returns the means, over held-out prompts, of `val/reward`, `val/ended`, `val/answer_tokens` and the reward's parts.

        Prompts and draws are the same each time: an answer to each of the first `eval.max_prompts` (0: all), at temperature 1.
        """
        items = self.prompts.held_out(self.parts.config.eval.max_prompts or _ALL)
        answers = self._answers(variables, items, _EVALUATION)
        rewards, parts = self._rewards(items, answers)
        figures = {"val/reward": rewards, "val/ended": [answer.ended for answer in answers]}
        figures |= {"val/answer_tokens": [len(answer.ids) for answer in answers]}
        figures |= {f"val/{name}": values for name, values in parts.items() if len(parts) > 1}
        return {name: float(np.mean(values)) for name, values in figures.items()}

    def close(self) -> None:
        """Frees the memory of the engine and the reference, and ends the processes of the rewards."""
        self._engine = self.reference = None
        self.rewarder.close()

    def _answers(self, variables: Variables, items: Sequence[Item], number: int) -> list[Answer]:
        """Returns one answer to each item, drawn with seeds derived from the run's seed and `number`."""
        parts, c = self.parts, self.parts.config
        speaking = {name: part for name, part in variables.items() if name not in parts.objective.heads}
        rows = c.rollout.rows or c.rollout.prompts * c.rollout.answers
        if self._engine is None:
            self._engine = engine.Engine(parts.model, speaking, rows, prefix_bytes=0)
        else:
            self._engine.load(speaking)
        seeds = np.random.SeedSequence([c.seed, number]).generate_state(len(items)).tolist()
        own = {"stop_ids": tuple(self._stops), "logprobs": 0, "keeps_stop": True}
        seeded, most = zip(items, seeds, strict=True), c.rollout.max_new_tokens
        asks = [schedule.Ask(tuple(item.ids), most, seed=seed, **own) for item, seed in seeded]
        # As long as a row of the batch has room for, not as this step's longest prompt: each length compiles anew.
        drawn = schedule.tokens_of(self._engine, asks, rows, c.train.seq_len // policy.in_row(c))
        self._engine.unload()  # the update needs the memory
        return [self._answer(tokens) for tokens in drawn]

    def _answer(self, tokens: list[schedule.Token]) -> Answer:
        ids = [token.id for token in tokens]
        text = self._tokenizer.decode([i for i in ids if i not in self._stops], follows=True)
        return Answer(ids, np.float32([token.logp for token in tokens]), text, ids[-1] in self._stops)

    def _rewards(self, items: Sequence[Item], answers: Sequence[Answer]) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
        """Returns (rewards of the answers, their parts), less a penalty on overlong answers (DAPO, arXiv:2503.14476, 3.4)."""
        rewards, parts = self.rewarder(items, [answer.text for answer in answers])
        most, soft = self.parts.config.rollout.max_new_tokens, self.parts.config.policy.overlong_tokens
        if soft:
            over = np.asarray([len(answer.ids) - (most - soft) for answer in answers], np.float32)
            parts = {**parts, "overlong": -np.clip(over / soft, 0, 1)}
            rewards = rewards + parts["overlong"]
        return rewards, parts

    def _packed(self, items: Sequence[Item], answers: Sequence[Answer]) -> tuple[dict[str, np.ndarray], "_Places"]:
        c, n = self.parts.config, policy.in_row(self.parts.config)
        rows, places = [], []
        for row in range(c.train.batch_size):
            group, used = [], 0
            for number in range(row * n, (row + 1) * n):
                item, answer = items[number], answers[number]
                counts = answer.ended or not c.policy.mask_truncated
                weights = np.repeat(np.float32([0, counts]), [len(item.ids) - 1, len(answer.ids)])
                group.append(pack_examples.Segment([*item.ids, *answer.ids], weights))
                places.append((row, slice(used + len(item.ids) - 1, used + len(weights))))
                used += len(weights)
            rows.append(group)
        return pack_examples.pack(rows, c.train.seq_len), places

    def _at_tokens(self, places: "_Places", values: Sequence[np.ndarray | float]) -> np.ndarray:
        """Puts each answer's value, or its values by token, at the answer's tokens; float32[B, T]."""
        t = self.parts.config.train
        values_BxT = np.zeros((t.batch_size, t.seq_len), np.float32)
        for (row, place), value in zip(places, values, strict=True):
            values_BxT[row, place] = value
        return values_BxT

    def _judged(
        self, frozen: Variables, params: Variables, reference: Variables | None, running: dict, batch: Batch
    ) -> Batch:
        """Returns the trainer's log-probabilities of the answers before the step; for PPO also values, advantages, returns."""
        c = self.parts.config
        variables = frozen | cast(params, np.dtype(c.model.dtype))
        judged = policy.judge(self.parts.model, c)(variables, reference, batch)
        if c.program == "ppo":
            judged |= policy.advantages(c, batch | judged, batch["scores"], running["beta"])
            explained = returns.explained_variance(judged["values"], judged["returns"], batch["weights"])
            judged["explained_variance"] = explained
        return judged

    def _on_mesh(self, batch: Mapping[str, np.ndarray]) -> Batch:
        mesh, t = self.parts.mesh, self.parts.config.train
        by_token, by_row = sharding.batch_sharding(mesh), sharding.row_sharding(mesh)
        placed = {name: by_token if x.shape[1] == t.seq_len else by_row for name, x in batch.items()}
        return sharding.to_global(dict(batch), mesh, t.batch_size, placed)

    def _figures(self, items: Sequence[Item], answers: Sequence[Answer], rewards: np.ndarray) -> dict[str, float]:
        r = self.parts.config.rollout
        groups_PxA = rewards.reshape(r.prompts, r.answers)
        words = collections.Counter(word for answer in answers for word in _WORD.findall(answer.text.lower()))
        self.common_word, most = words.most_common(1)[0] if words else ("", 0)
        return {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()) if np.ptp(rewards) else 0.0,  # rounding must not hide that all are equal
            "flat_groups": float((np.ptp(groups_PxA, axis=1) == 0).mean()) if r.answers > 1 else 0.0,
            "truncated": float(np.mean([not answer.ended for answer in answers])),
            "unique": len({answer.text for answer in answers}) / len(answers),
            "answer_tokens": float(np.mean([len(answer.ids) for answer in answers])),
            "top_word": most / max(1, words.total()),
        }

    def _write(
        self,
        step: int,
        items: Sequence[Item],
        answers: Sequence[Answer],
        rewards: np.ndarray,
        parts: Mapping[str, np.ndarray],
    ) -> None:
        """Writes the answers of a step into the run's folder. A failure is only reported."""
        lines = []
        for number, (item, answer) in enumerate(zip(items, answers, strict=True)):
            line = {"prompt": item.messages[-1]["content"], "place": item.place, "answer": answer.text}
            line |= {"reward": float(rewards[number]), "ended": answer.ended, "tokens": len(answer.ids)}
            lines.append(line | {name: float(values[number]) for name, values in parts.items()})
        folder = self.folder / FOLDER
        content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        try:
            folder.mkdir(exist_ok=True)
            files.write_atomically(folder / f"{step}.jsonl", content.encode("utf-8", "backslashreplace"))
        except OSError as error:
            say(f"the answers of step {step} are not written: {error}")


_Places = list[tuple[int, slice]]  # of each answer: its row, and the positions whose targets are its tokens
