"""PPO and GRPO: prompts, rewards, and batches that the policy itself generates. See `step/objectives/policy.py`."""

import argparse
import dataclasses
import pathlib
from collections.abc import Callable

import jax
import numpy as np

from jaxlm.commands.train import run as training
from jaxlm.commands.train.kind import Ready
from jaxlm.commands.train.posttraining import Chats
from jaxlm.config import Config, ConfigError
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer import coder
from jaxlm.devices.processes import say
from jaxlm.eval.held_out import Evaluator
from jaxlm.interop import hf_folder, peft
from jaxlm.models.transformer import Transformer
from jaxlm.run import ledger
from jaxlm.run.checkpoints import keep
from jaxlm.run.workdir import TOKENIZER
from jaxlm.step.objectives import policy, reward
from jaxlm.step.objectives.base import Objective, Variables, init_head
from jaxlm.step.state import TrainState
from jaxlm.train import hooks, loop, origin, watches
from jaxlm.train.origin import Origin
from jaxlm.train.rl import process, prompts, rewards, rollouts

_PROMPTS = 500  # held-out prompts on which the best constant answer is sought


def run(config: Config, args: argparse.Namespace) -> int:
    return training.run(config, Rewards(config))


class Rewards(Chats):
    """PPO: a value head predicts the reward at each token. GRPO: answers to one prompt are compared with each other."""

    def __init__(self, config: Config):
        r = config.reward
        if not (r.tasks or r.function or r.model):
            raise ConfigError(
                f"{config.program} needs a reward: --config.reward.tasks=reasoning_gym:chain_sum, "
                "reward.function=MODULE:FUNCTION or reward.model=RUN"
            )
        if r.tasks and not config.eval.max_prompts:
            raise ConfigError("eval.max_examples=0 asks for all held-out prompts; tasks are endless: set it above 0")
        super().__init__(config)
        self.keeps_origin |= config.policy.reference
        self._folder = pathlib.Path(config.workdir)
        self._process: process.Processes | None = None
        self._rollouts: rollouts.Rollouts | None = None

    def objective(self, model: Transformer, config: Config) -> Objective:
        return policy.make(model, config)

    def data(self, config: Config) -> prompts.Prompts:
        """Returns the prompts; writes the tokenizer into the run's folder. Raises ConfigError if several processes train."""
        if jax.process_count() > 1:
            raise ConfigError(f"{config.program} runs in one process, on all of its devices: start it once")
        tokenizer = self._tokenizer
        if keep.begun(self._folder / "checkpoints"):
            if line := origin.other_template(config, tokenizer):
                say(line)
        elif chat.answer_end(tokenizer) is None:
            raise ConfigError(
                f"{chat.told_ends(tokenizer)}; {config.program} would learn from answers that are cut: take a template "
                "that ends an answer (--config.examples.template=FILE)"
            )
        coder.write(tokenizer, self._folder / TOKENIZER)
        self._process = rewards.make(config.reward, self._folder)
        return prompts.make(config, chat.dated(tokenizer, ledger.moment(self._folder)), self._process, say)

    def origin(self, config: Config) -> Origin:
        """Returns the model to begin with; its value head is the reward model's if `policy.value_from` is "reward"."""
        model = super().origin(config)
        if config.policy.value_from != "reward":
            return model
        head = _reward_model(config).trained().get(reward.HEAD)
        if head is None or (kernel := jax.tree.leaves(head)[0]).shape != (config.model.d_model,):
            raise ConfigError(
                f"policy.value_from=reward: the head of reward.model={config.reward.model} does not fit a model of "
                f"d {config.model.d_model}: leave it at zero"
            )
        value = init_head("value", config.model.d_model)
        value = jax.tree.map(lambda _: np.asarray(kernel, np.float32), value)
        return dataclasses.replace(model, trained=lambda: {"value": value} | model.trained())

    def begin(self, ready: Ready, state: TrainState, frozen: Variables) -> Ready:
        """Creates the rollouts, which generate the batches; returns `ready` unchanged."""
        c, parts = ready.config, ready.parts
        self._rollouts = None  # of the attempt before a rollback: its memory is needed
        room = ready.data.room + c.rollout.max_new_tokens
        with jax.set_mesh(parts.mesh):
            reference = parts.reference(self.origin(c), frozen) if c.policy.reference else None
            moment = ledger.moment(self._folder)
            scores = rewards.Scorer(_reward_model(c), parts.mesh, room, moment) if c.reward.model else None
            rewarder = rewards.Rewarder(c.reward, self._process, scores, say)
            self._rollouts = rollouts.Rollouts(parts, frozen, ready.data, rewarder, reference, self._folder)
        say("the first step compiles what draws answers, what judges them and the update: minutes on a CPU")
        if int(state.step) == 0:
            for line in (*watches.first_lines(c), chat.told_ends(self._tokenizer)):
                say(line)
            if c.reward.tasks and (line := rewards.baseline(ready.data.held_out(_PROMPTS), rewarder)):
                say(line)
        return ready

    def batches(self, ready: Ready, done: int, failed: Callable[[Exception], object]) -> loop.Batches:
        return self._rollouts

    def held_out(self, ready: Ready) -> Evaluator | None:
        return self._rollouts.evaluate if ready.data.held_out(1) else None

    def watches(self, ready: Ready) -> list[loop.Watch]:
        return watches.of_policy(ready.config, lambda: self._rollouts.common_word, say)

    def remark(self, ready: Ready) -> hooks.Remark:
        return hooks.Remarks(None, 0.0)


def _reward_model(config: Config) -> Origin:
    name = config.reward.model
    runs = pathlib.Path(name, "checkpoints").is_dir()
    return origin.open(name, "latest", peft.READERS if runs else (hf_folder.read_scores,))
