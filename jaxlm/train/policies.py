"""Says in plain words what goes wrong while a policy learns from rewards. Each line is said once, and the run goes on."""

from collections.abc import Callable

import numpy as np

from jaxlm.config import Config
from jaxlm.console import Say, count
from jaxlm.train.loop import Watch
from jaxlm.train.watches import Told

_FLAT_STEPS = 3
_BEGINNING = 5  # steps that are taken for how the run began, and as many for how it is now
_WORD_SHARE, _WORD_TIMES = 0.25, 2.5  # of all words that are said; of its share at the beginning
_LONGER, _FOLLOWS = 1.5, 0.9  # times the tokens at the beginning; correlation of reward and length
_ENTROPY = 0.15  # of that at the beginning
_KL = 0.5  # nats a token
_GAP = 0.05  # nats a token
_CUT = 0.5  # of the answers


def of_policy(config: Config, common_word: Callable[[], str], say: Say) -> list[Watch]:
    """Returns the watches of `objectives.policy`.

    Args:
      common_word: returns the most frequent word of the newest answers.
    """
    watches = [Flat(config.program == "grpo", say), Word(common_word, say), Length(say), Collapse(say), Gap(say)]
    watches.append(CutOff(config.rollout.max_new_tokens, config.policy.mask_truncated, say))
    return [*watches, RunAway(config.policy.beta, say)] if config.policy.reference else watches


def first_lines(config: Config) -> list[str]:
    """Returns what to know before the first step."""
    r, p = config.rollout, config.policy
    updates = p.epochs * p.minibatches
    lines = [
        f"a step: {count(r.prompts)} prompts x {count(r.answers)} answers of at most {count(r.max_new_tokens)} tokens, then "
        f"{updates} update{'s' * (updates > 1)}; the answers stand in rollouts/ of the run"
    ]
    if config.program == "grpo":
        lines.append(
            "a loss of about 0.0 is normal here: the advantages of a group add up to 0. What should rise is the reward"
        )
    return lines


class Flat(Told):
    """Says that rewards do not differ, so that there is nothing to learn.

    Args:
      groups: True if only differences within a group count.
    """

    def __init__(self, groups: bool, say: Say):
        super().__init__(say, _FLAT_STEPS)
        self._groups = groups
        self.reads = ("reward", "reward_std", "flat_groups")

    def line(self) -> str:
        reward = self.mean("reward")
        if not self.every("reward_std").any():
            return (
                f"all answers of {_FLAT_STEPS} steps earned the same, {reward:.3g}: no gradient; look at rollouts/ and at the "
                "reward"
            )
        if self._groups and self.every("flat_groups").min() == 1:
            return (
                f"in {_FLAT_STEPS} steps no two answers to one prompt earned different rewards: no gradient; take easier or "
                "harder prompts, or more answers to each (rollout.answers)"
            )
        return ""


class _Since(Told):
    """Compares the newest steps with the first ones of this start."""

    def __init__(self, say: Say, steps: int = _BEGINNING):
        super().__init__(say, steps)
        self._first: list[dict[str, float]] = []

    def __call__(self, step: int, record: dict[str, float]) -> None:
        super().__call__(step, record)
        if self.last and len(self._first) < _BEGINNING:
            self._first.append(self.last[-1])

    def first(self, name: str) -> float:
        """Returns a figure's mean over the first steps."""
        return float(np.mean([record[name] for record in self._first]))


class Word(_Since):
    """Says that rewards rise while one word fills the answers. `word` returns it."""

    reads = ("reward", "top_word")

    def __init__(self, word: Callable[[], str], say: Say):
        super().__init__(say)
        self._word = word

    def line(self) -> str:
        before, now = self.first("top_word"), self.mean("top_word")
        if now < max(_WORD_SHARE, _WORD_TIMES * before) or self.mean("reward") <= self.first("reward"):
            return ""
        return (
            f'the reward rose from {self.first("reward"):.3g} to {self.mean("reward"):.3g} while one word, "{self._word()}", '
            f"went from {before:.0%} to {now:.0%} of all that is said: the reward can be had by repeating it; look at rollouts/"
        )


class Length(_Since):
    """Says that rewards rise with the answers' length and little else."""

    reads = ("reward", "answer_tokens")

    def __init__(self, say: Say):
        super().__init__(say, 4 * _BEGINNING)

    def line(self) -> str:
        rewards, tokens = self.every("reward"), self.every("answer_tokens")
        before, now = self.first("answer_tokens"), float(tokens[-_BEGINNING:].mean())
        if not _LONGER * before <= now or rewards[-_BEGINNING:].mean() <= self.first("reward") or not rewards.std():
            return ""
        together = float(np.corrcoef(rewards, tokens)[0, 1])
        if together < _FOLLOWS:
            return ""
        return (
            f"the reward follows the answers' length (correlation {together:.2f}), which went from {before:.0f} to {now:.0f} "
            "tokens: does it pay for length alone? policy.overlong_tokens, or a reward that does not grow with length, ends it"
        )


class Collapse(_Since):
    """Says that the policy has stopped trying different answers."""

    reads = ("entropy", "unique")

    def line(self) -> str:
        before, now = self.first("entropy"), self.mean("entropy")
        if now >= _ENTROPY * before:
            return ""
        return (
            f"the entropy fell from {before:.3g} to {now:.3g} nats a token, and {self.mean('unique'):.0%} of the answers are "
            "different: the policy tries little that is new; a higher policy.clip_high, some policy.beta or a lower optim.lr "
            "keeps it trying, unless it has learnt all there is"
        )


class RunAway(Told):
    """Says that the policy went far from its reference."""

    reads = ("kl",)

    def __init__(self, beta: float, say: Say):
        super().__init__(say, _BEGINNING)
        self._beta = beta

    def line(self) -> str:
        now = self.mean("kl")
        if now < _KL:
            return ""
        return (
            f"the policy is {now:.2g} nats a token from where it began (KL): beyond that, rewards often rise by tricks; a "
            f"lower optim.lr or a higher policy.beta, {self._beta:g} now, holds it"
        )


class Gap(Told):
    """Says that the sampler and the trainer do not agree on what the policy is."""

    reads = ("sampler_gap",)

    def __init__(self, say: Say):
        super().__init__(say, 1)

    def line(self) -> str:
        gap = self.mean("sampler_gap")
        if gap < _GAP:
            return ""
        return (
            f"sampler and trainer differ by {gap:.2g} nats a token on what was drawn: rollout.importance_cap=2 corrects for "
            "it, model.dtype=float32 avoids it"
        )


class CutOff(Told):
    """Says that most answers do not end."""

    reads = ("truncated",)

    def __init__(self, most: int, masked: bool, say: Say):
        super().__init__(say, _BEGINNING)
        self._most, self._masked = most, masked

    def line(self) -> str:
        cut = self.mean("truncated")
        if cut < _CUT:
            return ""
        return (
            f"{cut:.0%} of the answers do not end within rollout.max_new_tokens={self._most}: they "
            f"{'do not count' if self._masked else 'count as if they had ended'} (policy.mask_truncated={self._masked}); raise "
            "it, make long answers cost (policy.overlong_tokens), or teach the model to end (SFT) first"
        )
