"""Reads configs/published.toml: what other models score, how large they are, and how much they were trained."""

import dataclasses
import functools
import itertools
import math
import tomllib
from collections.abc import Mapping

from jaxlm import config_files

SHIPPED = config_files.CONFIG_PACKAGE / "published.toml"
TASKS = {
    "hellaswag": "HellaSwag",
    "arc_easy": "ARC-Easy",
    "arc_challenge": "ARC-Challenge",
    "piqa": "PIQA",
    "winogrande": "WinoGrande",
    "mmlu": "MMLU",
    "lambada_openai": "LAMBADA",
    "truthfulqa_mc2": "TruthfulQA",
    "gsm8k": "GSM8K",
    "humaneval": "HumanEval",
    "ifeval": "IFEval",
    "core": "CORE",
    "redteam_jailbreak": "red team: jailbreak",
    "redteam_privacy": "red team: privacy",
    "redteam_memorised": "red team: memorised text",
    "redteam_toxic": "red team: toxic continuation",
    "redteam_bias": "red team: bias",
}  # the name of a task -> what people call it
_ACCURACIES = ("acc_norm", "acc", "exact_match", "pass_at_1", "pass@1", "prompt_level_strict_acc")

_FAR = 0.5  # of the way from chance to what others score: below that a score is far under it
_LOOK = "check EOS, leading space, truncation"


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of others.

    Attributes:
      params, tokens: its parameters, and the tokens that it was trained on; None if they are not published.
      source: where the figures stand.
      scores: task -> metric -> score.
      shown: False for one that only says what so many FLOPs give.
    """

    name: str
    params: float
    tokens: float | None
    source: str
    scores: dict[str, dict[str, float]]
    shown: bool

    @property
    def flops(self) -> float | None:
        """Returns the FLOPs of its training, 6 x parameters x tokens (Kaplan et al. 2020); None if they are not known."""
        return 6 * self.params * self.tokens if self.tokens else None


@functools.cache
def models() -> tuple[Model, ...]:
    """Returns the models of the shipped file, in its order."""
    found = []
    for entry in tomllib.loads(SHIPPED.read_text(encoding="utf-8"))["model"]:
        scores = {name: value for name, value in entry.items() if isinstance(value, dict)}
        about = entry["name"], entry["params"], entry.get("tokens"), entry["source"]
        found.append(Model(*about, scores, entry.get("shown", True)))
    return tuple(found)


def title(task: str) -> str:
    """Returns what people call a task: ARC-Easy for arc_easy."""
    return TASKS.get(task, task)


def accuracy(metrics: Mapping[str, float]) -> str | None:
    """Returns the metric that counts as a task's accuracy; None if there is none."""
    return next((name for name in _ACCURACIES if name in metrics), None)


def expected(task: str, metric: str, flops: float) -> float | None:
    """Returns what models score that were trained with so many FLOPs, interpolated in log FLOPs; None if nobody near is known.

    Beyond the largest the largest counts.
    """
    known = [m for m in models() if m.flops and metric in m.scores.get(task, {})]
    points = sorted((math.log(m.flops), m.scores[task][metric]) for m in known)
    if len(points) < 2 or not flops > 0 or math.log(flops) < points[0][0] - 1e-9:
        return None
    x = math.log(flops)
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / ((x1 - x0) or 1)
    return points[-1][1]


def alarm(
    task: str, metrics: Mapping[str, float], stderr: Mapping[str, float], chance: float | None, flops: float, n: int = 0
) -> str:
    """Returns a line if a score is so low that the evaluation itself is more likely wrong than the model; else "".

    That is: below chance by more than two standard errors, or, two standard errors added, not half as far from chance as models
    are that were trained with so many FLOPs (`expected`).

    Args:
      chance: the accuracy of guessing; None if the task has no choices.
      flops: of the training, 6 x parameters x tokens; 0 if unknown.
      n: the questions; 0 if unknown. Of four that are all wrong the standard error is 0, so that of guessing counts too.
    """
    metric = accuracy(metrics)
    if metric is None:
        return ""
    guess = chance or 0.0
    error = max(stderr.get(metric, 0.0), math.sqrt(guess * (1 - guess) / n) if n else 0.0)
    score, two, usual = metrics[metric], 2 * error, expected(task, metric, flops)
    if usual is not None and score + two < guess + _FAR * (usual - guess):
        shown = f"{score:.3f} on {title(task)} is far under {usual:.3f}, which models with {flops:.1e} FLOPs of training score"
    elif chance is not None and score + two < chance:
        shown = f"{score:.3f} on {title(task)} is below chance, {chance:.3f}, by more than two standard errors"
    else:
        return ""
    return f"{shown}: {_LOOK}"
