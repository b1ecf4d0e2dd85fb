"""Says in plain words what goes wrong while a policy learns from rewards. Each line is said once, and the run goes on."""

import functools
from collections.abc import Callable

import numpy as np

from jaxlm.config import Config
from jaxlm.host.console import Say, count
from jaxlm.train.loop import Watch
from jaxlm.train.watches import Row, SaysOnce, Steps, mean_reaches

_FLAT_STEPS = 3
_BEGINNING = 5  # steps that stand for the beginning of the run, and as many for its present
_WORD_SHARE, _WORD_TIMES = 0.25, 2.5  # of all words; times its share at the beginning
_LONGER, _FOLLOWS = 1.5, 0.9  # times the tokens at the beginning; correlation of reward and length
_ENTROPY = 0.15  # of that at the beginning
_KL = 0.5  # nats a token
_GAP = 0.05  # nats a token
_CUT = 0.5  # of the answers
Quoted = dict[str, object] | None


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
