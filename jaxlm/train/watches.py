"""Watches of saves, of preferences and of rewards. The watches of the loss are in `stability`.

A `Row` is a sign that something goes wrong, with a sentence in plain words; the sentence is said once, and the run goes on. A
policy that does not begin as its reference ends the run.
"""

import collections
import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jaxlm.config import CheckpointConfig, Config, DpoConfig
from jaxlm.host.console import Say, count
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.step.objectives import dpo
from jaxlm.train.loop import FAILED, REFUSED, Ending, Watch

WINDOW = 50  # steps over which figures are averaged


@dataclasses.dataclass(eq=False)
class SaveInFlight(Watch):
    """Notices a failed save at the next step. Ends the run if saves fail or hang, and too much work is unsaved.

    Args:
      ask: ends the run on all processes (`StopSignal.ask`). With None, or with one process, the watch returns the Ending.
    """

    checkpointer: Checkpointer
    config: CheckpointConfig
    usd_per_hour: float = 0.0
    ask: Callable[[Ending], None] | None = None

    def __call__(self, step: int, record: dict[str, float]) -> Ending | None:
        self.checkpointer.check()
        failing = self.checkpointer.failing or self.checkpointer.hangs()
        if not failing:
            return None
        hours = self.checkpointer.unprotected_s() / 3600
        minutes, usd = self.config.max_unprotected_minutes, self.config.max_unprotected_usd
        if not (0 < minutes < hours * 60 or 0 < usd < hours * self.usd_per_hour):
            return None
        why = f"stopped at step {step}: the work of {hours * 60:.0f} minutes is unsaved, and {failing}"
        ending = Ending(FAILED, why, cause="disk")
        if self.ask is None or jax.process_count() == 1:
            return ending
        self.ask(ending)
        return None


Steps = Mapping[str, np.ndarray]  # metric -> its values, one a step
Quoted = dict[str, object] | None  # values for a sentence
Condition = Callable[[Steps, Steps], Quoted]


class Row(typing.NamedTuple):
    """A sign in the metrics that a run goes wrong, and the sentence that says so in plain words.

    Attributes:
      condition: (metrics of this start's first `window` steps, of its last `window`) -> values for `sentence`; None: all well.
    """

    reads: tuple[str, ...]
    window: int
    condition: Condition
    sentence: str


class SaysOnce(Watch):
    """Says a `Row`'s sentence once, when its condition is first met. The run goes on."""

    def __init__(self, row: Row, say: Say):
        self.reads, self._row, self._say, self._said = row.reads, row, say, False
        self._first: list[list[float]] = []
        self._last: collections.deque[list[float]] = collections.deque(maxlen=row.window)

    def __call__(self, step: int, record: dict[str, float]) -> None:
        values = [record[name] for name in self.reads]
        if self._said or not all(map(math.isfinite, values)):
            return
        self._last.append(values)
        if len(self._first) < self._row.window:
            self._first.append(values)
        if len(self._last) < self._row.window:
            return
        figures = self._row.condition(self._by_name(self._first), self._by_name(self._last))
        if figures is not None:
            self._said = True
            self._say(f"step {step}: {self._row.sentence.format(**figures)}")

    def _by_name(self, steps: Sequence[list[float]]) -> Steps:
        return dict(zip(self.reads, np.asarray(steps).T, strict=True))


def mean_reaches(name: str, least: float, **quoted: object) -> Condition:
    """Returns the condition that a metric's mean over the last steps is at least `least`; `quoted`: more for the sentence."""

    def condition(first: Steps, last: Steps) -> Quoted:
        mean = last[name].mean()
        return {name: mean, **quoted} if mean >= least else None

    return condition


_PINNED = 0.01  # of the loss that the run begins with
_MOVED = 1e-3  # of rewards and scores: below it the policy counts as unchanged
_FALLEN = 0.1  # of the chosen answers' log-probability
_ONLY_LENGTH = 0.9  # correlation of margin and length
_NOTICED = 0.05  # smaller margins don't show what they depend on
_OFF = {"float32": 1e-4, "bfloat16": 5e-3}  # share of a log-probability that two programs may differ by rounding


def of_dpo(config: Config, say: Say) -> list[Watch]:
    """Returns the watches of `objectives.dpo`."""
    c, own = config.dpo, dpo.at_start(config.dpo)
    rows = [falling(c), ONLY_LENGTH, SWAPPED]
    first = []
    if own is not None:
        first = [FirstStep(c, _OFF[config.model.dtype])]
        rows = [pinned(own, ("chosen_reward", "rejected_reward"), config.train.steps, c.nll_weight), *rows]
    return [*first, *(SaysOnce(row, say) for row in rows)]


def of_reward(config: Config, say: Say) -> list[Watch]:
    stays = pinned(math.log(2), ("score", "margin"), config.train.steps)
    return [SaysOnce(row, say) for row in (stays, ONLY_LENGTH, SWAPPED)]


class FirstStep(Watch):
    """Ends a run whose policy is not its reference at the first step: it would mostly learn the difference.

    If they are equal, every margin is 0, and the loss is `objectives.dpo.at_start`.

    Args:
      off: how much policy and reference may differ by rounding, as a share of a log-probability.
    """

    def __init__(self, config: DpoConfig, off: float):
        self._config, self._off, self._own = config, off, dpo.at_start(config)

    def __call__(self, step: int, record: dict[str, float]) -> Ending | None:
        if step != 1:
            return None
        c = self._config
        size = record["nll"] if dpo.by_token(c) else max(abs(record[name]) for name in ("chosen_logp", "rejected_logp"))
        apart = max(abs(record[name]) for name in ("margin", "chosen_reward", "rejected_reward")) / c.beta
        loss = record["loss"] - c.nll_weight * record["nll"]
        if apart <= self._off * size and abs(loss - self._own) <= 10 * self._off * self._own:
            return None
        unit = "nats a token" if dpo.by_token(c) else "nats an answer"
        why = (
            f"the reference is not the policy: before the first update their log-probabilities are {apart:.3g} {unit} apart, "
            f"not 0, and the loss is {loss:.4f}, not {self._own:.4f}: begin in a new workdir, without what another run left"
        )
        return Ending(REFUSED, why, keep=False)


def pinned(own: float, moves: Sequence[str], steps: int, nll_weight: float = 0.0) -> Row:
    """Returns the row for a loss that stays where it began; its sentence says whether the model moved at all.

    Args:
      own: the loss of a policy that can't tell the answers apart.
    """
    reads = ("loss", "lr", "update_norm", *moves, *(("nll",) if nll_weight else ()))

    def condition(first: Steps, last: Steps) -> Quoted:
        loss = last["loss"] - (nll_weight * last["nll"] if nll_weight else 0.0)
        recent, rate = loss[len(loss) // 2 :].mean(), last["lr"].max()
        if abs(recent - own) > _PINNED * own:
            return None
        if not last["update_norm"].any():
            why = f": no update has changed anything (optim.lr is {rate:.2g}, all updates are 0)"
        elif max(np.abs(last[name]).max() for name in moves) < _MOVED:
            why = f": the model has hardly moved; raise optim.lr, which is {rate:.2g}"
        else:
            why = ", though the model moves: it can't tell chosen from rejected answers; look at the data"
        return {"loss": recent, "why": why}

    sentence = "the loss stays at {loss:.4f}, where it began{why}"
    return Row(reads, min(max(steps // 4, 20), 4 * WINDOW), condition, sentence)


def falling(c: DpoConfig) -> Row:
    """Returns the row for chosen answers that become much less likely."""

    def condition(first: Steps, last: Steps) -> Quoted:
        began = 0.0 if dpo.has_reference(c) else first["chosen_reward"].mean() / c.beta
        size = last["nll"].mean() if dpo.by_token(c) else abs(last["chosen_logp"].mean())
        fallen = (began - last["chosen_reward"].mean() / c.beta) / size
        return {"fallen": fallen} if fallen >= _FALLEN else None

    return Row(
        ("chosen_reward", "chosen_logp", "nll"),
        WINDOW,
        condition,
        "the chosen answers become less likely too: their log-probability fell by {fallen:.0%}; dpo.nll_weight=0.2, a lower "
        "optim.lr or a higher dpo.beta holds it",
    )


def _only_length(first: Steps, last: Steps) -> Quoted:
    """Tests whether margins follow the difference of lengths and little else."""
    # Changes from step to step: a margin's growth over time would hide that it follows the lengths.
    margin, length = np.diff(last["margin"]), np.diff(last["length_margin"])
    if np.abs(last["margin"]).mean() < _NOTICED or not margin.any() or not length.any():
        return None
    together = np.corrcoef(margin, length)[0, 1]
    which = "longer" if together > 0 else "shorter"
    return {"together": together, "which": which} if abs(together) >= _ONLY_LENGTH else None


def _swapped(first: Steps, last: Steps) -> Quoted:
    """Tests whether fewer than half of the pairs are ranked as labelled, by more than chance (three standard errors)."""
    accuracy = last["accuracy"]
    error = accuracy.std(ddof=1) / math.sqrt(len(accuracy))
    return {"accuracy": accuracy.mean(), "pairs": "of the pairs"} if accuracy.mean() + 3 * error < 0.5 else None


_SWAPPED = "{accuracy:.0%} {pairs} are ranked as labelled, fewer than half: are chosen and rejected swapped?"
SWAPPED = Row(("accuracy",), 2 * WINDOW, _swapped, _SWAPPED)
ONLY_LENGTH = Row(
    ("margin", "length_margin"),
    2 * WINDOW,
    _only_length,
    "the margin is little but length (correlation {together:.2f}): what is learnt is to prefer the {which} answer; "
    "dpo.loss=simpo compares by token, or balance the lengths in the data",
)


_FLAT_STEPS = 3
_BEGINNING = 5  # steps that stand for the beginning of the run, and as many for its present
_WORD_SHARE, _WORD_TIMES = 0.25, 2.5  # of all words; times its share at the beginning
_LONGER, _FOLLOWS = 1.5, 0.9  # times the tokens at the beginning; correlation of reward and length
_ENTROPY = 0.15  # of that at the beginning
_KL = 0.5  # nats a token
_GAP = 0.05  # nats a token
_CUT = 0.5  # of the answers


def of_policy(config: Config, common_word: Callable[[], str], say: Say) -> list[Watch]:
    """Returns the watches of `objectives.policy`."""
    p, most = config.policy, config.rollout.max_new_tokens
    counted = "do not count" if p.mask_truncated else "count as if they had ended"
    rows = [
        Row(
            ("reward", "reward_std", "flat_groups"),
            _FLAT_STEPS,
            functools.partial(_flat, config.program == "grpo"),
            "{same}: no gradient; {mend}",
        ),
        Row(
            ("reward", "top_word"),
            _BEGINNING,
            functools.partial(_word, common_word),
            'the reward rose from {low:.3g} to {high:.3g} while one word, "{word}", went from {before:.0%} to {now:.0%} of all '
            "words: repeating it earns the reward; look at rollouts/",
        ),
        *_OF_ANSWERS,
        Row(
            ("truncated",),
            _BEGINNING,
            mean_reaches("truncated", _CUT, most=most, counted=counted, masked=p.mask_truncated),
            "{truncated:.0%} of the answers do not end within rollout.max_new_tokens={most}: they {counted} "
            "(policy.mask_truncated={masked}); raise it, make long answers cost (policy.overlong_tokens), or teach the model "
            "to end (SFT) first",
        ),
    ]
    if p.reference:
        far = (
            "the policy is {kl:.2g} nats a token from where it began (KL): beyond that, rewards often rise by tricks; a lower "
            "optim.lr or a higher policy.beta, {beta:g} now, holds it"
        )
        rows.append(Row(("kl",), _BEGINNING, mean_reaches("kl", _KL, beta=p.beta), far))
    return [SaysOnce(row, say) for row in rows]


def _flat(by_group: bool, first: Steps, last: Steps) -> Quoted:
    """Tests whether all rewards are the same; with `by_group`, also whether they are the same within each group."""
    if not last["reward_std"].any():
        same = f"all answers of {_FLAT_STEPS} steps earned the same, {last['reward'].mean():.3g}"
        return {"same": same, "mend": "look at rollouts/ and at the reward"}
    if by_group and last["flat_groups"].min() == 1:
        same = f"in {_FLAT_STEPS} steps no two answers to one prompt earned different rewards"
        return {"same": same, "mend": "take easier or harder prompts, or more answers to each (rollout.answers)"}
    return None


def _word(common_word: Callable[[], str], first: Steps, last: Steps) -> Quoted:
    """Tests whether rewards rise while one word fills the answers."""
    before, now = first["top_word"].mean(), last["top_word"].mean()
    low, high = first["reward"].mean(), last["reward"].mean()
    if now < max(_WORD_SHARE, _WORD_TIMES * before) or high <= low:
        return None
    return {"low": low, "high": high, "word": common_word(), "before": before, "now": now}


def _length(first: Steps, last: Steps) -> Quoted:
    """Tests whether rewards rise with the answers' length and little else."""
    rewards, tokens = last["reward"], last["answer_tokens"]
    before, now = first["answer_tokens"][:_BEGINNING].mean(), tokens[-_BEGINNING:].mean()
    rises = rewards[-_BEGINNING:].mean() > first["reward"][:_BEGINNING].mean()
    if now < _LONGER * before or not rises or not rewards.std():
        return None
    together = np.corrcoef(rewards, tokens)[0, 1]
    return {"together": together, "before": before, "now": now} if together >= _FOLLOWS else None


def _collapse(first: Steps, last: Steps) -> Quoted:
    """Tests whether the policy has stopped trying different answers."""
    before, now = first["entropy"].mean(), last["entropy"].mean()
    if now >= _ENTROPY * before:
        return None
    return {"before": before, "now": now, "unique": last["unique"].mean()}


_OF_ANSWERS = (
    Row(
        ("reward", "answer_tokens"),
        4 * _BEGINNING,
        _length,
        "the reward follows the answers' length (correlation {together:.2f}), which went from {before:.0f} to {now:.0f} "
        "tokens: does it pay for length alone? policy.overlong_tokens, or a reward that does not grow with length, ends it",
    ),
    Row(
        ("entropy", "unique"),
        _BEGINNING,
        _collapse,
        "the entropy fell from {before:.3g} to {now:.3g} nats a token, and {unique:.0%} of the answers are different: the "
        "policy tries little that is new; a higher policy.clip_high, some policy.beta or a lower optim.lr keeps it trying, "
        "unless it has learnt all there is",
    ),
    Row(
        ("sampler_gap",),
        1,
        mean_reaches("sampler_gap", _GAP),
        "sampler and trainer differ by {sampler_gap:.2g} nats a token on what was drawn: rollout.importance_cap=2 corrects "
        "for it, model.dtype=float32 avoids it",
    ),
)


def first_lines(config: Config) -> list[str]:
    """Returns lines that the user should read before the first step."""
    r, p = config.rollout, config.policy
    updates = p.epochs * p.minibatches
    lines = [
        f"a step: {count(r.prompts)} prompts x {count(r.answers)} answers of at most {count(r.max_new_tokens)} tokens, then "
        f"{updates} update{'s' * (updates > 1)}; the answers are in rollouts/ of the run"
    ]
    if config.program == "grpo":
        lines.append(
            "a loss of about 0.0 is normal here: the advantages of a group add up to 0. What should rise is the reward"
        )
    return lines
