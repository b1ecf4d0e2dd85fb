"""What PPO and GRPO share: prompts, rewards, and batches that the policy itself writes."""

import dataclasses
import pathlib

import jax
import numpy as np

from jaxlm.config import Config, ConfigError
from jaxlm.data import chat, coder
from jaxlm.eval.loss import Evaluator
from jaxlm.interop import readers
from jaxlm.objectives import base, policy, reward
from jaxlm.objectives.base import Variables
from jaxlm.processes import say
from jaxlm.programs import posttraining
from jaxlm.programs.task import Ready, Task
from jaxlm.step.state import TrainState
from jaxlm.train import answers, ledger, origin, policies, rollouts, scorer
from jaxlm.train.checkpoints import weights
from jaxlm.train.rewards import process, prompts, rewards
from jaxlm.train.workdir import TOKENIZER


def task(config: Config) -> Task:
    """Returns the task of PPO or GRPO, as `config.program` says.

    Raises:
      ConfigError: there is no origin or reward, or several processes would train.
    """
    r = config.reward
    if not (r.tasks or r.function or r.model):
        raise ConfigError(
            f"{config.program} needs a reward: --config.reward.tasks=reasoning_gym:chain_sum, reward.function=MODULE:FUNCTION "
            "or reward.model=RUN"
        )
    if r.tasks and not config.eval.max_prompts:
        raise ConfigError(
            "eval.max_examples=0 asks for all held-out prompts, and tasks have no end of them: set it above 0"
        )
    speaker = posttraining.tokenizer(config)
    made = _Made(config, speaker)
    return posttraining.task(
        config,
        policy.make,
        pairs=False,
        data=made.data,
        batches=lambda ready, done: made.rollouts,
        held_out=made.held_out,
        origin=made.origin,
        keeps_origin=posttraining.keeps_origin(config),
        passes=lambda data, steps: data.passes(steps),
        documents=lambda data, step: data.places(step),
        begin=made.begin,
        watches=lambda ready: policies.of_policy(ready.config, lambda: made.rollouts.common_word, say),
        remark=lambda ready: answers.Remarks(None, 0.0),
    )


_ASKED = 500  # held-out prompts that the best constant answer is looked for on


class _Made:
    """What a run has beside its state; each start makes it anew."""

    def __init__(self, config: Config, speaker: coder.Coder):
        self._speaker, self._folder = speaker, pathlib.Path(config.workdir)
        self._process: process.Processes | None = None
        self.rollouts: rollouts.Rollouts | None = None

    def data(self, config: Config) -> prompts.Prompts:
        """Opens the prompts, and keeps the tokenizer in the run's folder."""
        if jax.process_count() > 1:
            raise ConfigError(f"{config.program} runs in one process, on all of its devices: start it once")
        if weights.begun(self._folder / "checkpoints"):
            if line := origin.other_template(config, self._speaker):
                say(line)
        elif chat.answer_end(self._speaker) is None:
            raise ConfigError(
                f"{chat.told_ends(self._speaker)}; {config.program} would learn from answers that are cut: take a template "
                "that ends an answer (--config.examples.template=FILE)"
            )
        coder.write(self._speaker, self._folder / TOKENIZER)
        self._process = rewards.make(config.reward, self._folder)
        speaker = chat.dated(self._speaker, ledger.moment(self._folder))
        return prompts.make(config, speaker, self._process, say)

    def origin(self, config: Config) -> origin.Origin:
        """The model to begin with; its value head is the reward model's if `policy.value_from` says so."""
        found = posttraining.first_weights(config).with_prompt(config.adapter, self._speaker, config.seed)
        if config.policy.value_from != "reward":
            return found
        head = _reward_model(config).trained().get(reward.HEAD)
        if head is None or (kernel := jax.tree.leaves(head)[0]).shape != (config.model.d_model,):
            raise ConfigError(
                f"policy.value_from=reward: the head of reward.model={config.reward.model} does not fit a model of "
                f"d {config.model.d_model}: leave it at zero"
            )
        value = base.init_head("value", config.model.d_model)
        value = jax.tree.map(lambda _: np.asarray(kernel, np.float32), value)
        return dataclasses.replace(found, trained=lambda: {"value": value} | found.trained())

    def begin(self, ready: Ready, state: TrainState, frozen: Variables) -> Ready:
        """Makes what writes the batches."""
        c, parts = ready.config, ready.parts
        self.rollouts = None  # of the attempt before a rollback: its memory is needed
        room = ready.data.room + c.rollout.max_new_tokens
        with jax.set_mesh(parts.mesh):
            reference = parts.reference(self.origin(c), frozen) if c.policy.reference else None
            moment = ledger.moment(self._folder)
            scores = scorer.Scorer(_reward_model(c), parts.mesh, room, moment) if c.reward.model else None
            rewarder = rewards.Rewarder(c.reward, self._process, scores, say)
            self.rollouts = rollouts.Rollouts(parts, frozen, ready.data, rewarder, reference, self._folder)
        if int(state.step) == 0:
            for line in (*policies.first_lines(c), chat.told_ends(self._speaker)):
                say(line)
            if c.reward.tasks and (best := rewards.baseline(ready.data.held_out(_ASKED), rewarder)):
                say(best.line())
        return ready

    def held_out(self, ready: Ready) -> Evaluator | None:
        """What measures the held-out prompts; None if there are none."""
        return self.rollouts.evaluate if ready.data.held_out(1) else None


def _reward_model(config: Config) -> origin.Origin:
    name = config.reward.model
    runs = pathlib.Path(name, "checkpoints").is_dir()
    return origin.open(name, "latest", readers.READERS if runs else readers.SCORERS)
