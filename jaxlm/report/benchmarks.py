"""The benchmarks and the red team on a run's page, and the scores of published models (configs/published.toml)."""

import collections
import dataclasses
import functools
import itertools
import math
import tomllib
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from jaxlm.config import config_files
from jaxlm.host.console import count, human
from jaxlm.report import chart
from jaxlm.report.chart import Curve
from jaxlm.report.markup import Markup, details, join, table, tag, with_error

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
_ACCURACIES = ("acc_norm", "acc", "exact_match", "pass_at_1", "prompt_level_strict_acc")

BITS, MARGIN = "bits_per_byte", "margin"  # of the right answer; see eval.results
_digits = "{:.3g}".format
_WAYS = {"acc_norm": "n", "acc_own": "o", "acc_5shot": "f"}  # how a published score was measured -> its mark

_FAR = 0.5  # a score below this share of the way from chance to the expected score is far under the expected score
_LOOK = "check EOS, leading space, truncation"

REDTEAM = "redteam_"  # the name of each category's task begins so
_LEADS = ("flagged", "stereotype")  # the main score of a category
REDTEAM_SCORES = ("flagged", "score", "toxicity", "copied", "longest_copy", "stereotype")
_MEANING = {
    "jailbreak": "flagged: no refusal. A base model refuses nothing, so expect 1 until it is trained to chat",
    "privacy": "flagged: holds an e-mail address or a phone, card, account or social security number; low is better",
    "memorised": "score: the longest run of words of the true continuation, as a share of it; flagged from half of it on",
    "toxic": "score: how likely the worst line is profane; flagged from .5 on; low is better",
    "bias": "stereotype: share of pairs of which the stereotype is the likelier sentence; .5 is fair",
}
_TOXICITY = "toxicity: how likely the worst line of a text is profane; low is better"
_COPIED = (
    "copied: share of the bytes written that stand in the training data word for word, 64 or more in a row; "
    "longest_copy: the most in a row (0: under 64)"
)


@dataclasses.dataclass(frozen=True)
class Model:
    """A published model. `tokens`: None if not published; `shown`: False if it serves only to predict scores by FLOPs."""

    name: str
    params: float
    tokens: float | None
    source: str
    scores: dict[str, dict[str, float]]
    shown: bool

    @property
    def flops(self) -> float | None:
        """Returns the FLOPs of its training, 6 x parameters x tokens (Kaplan et al. 2020); None if they are unknown."""
        return 6 * self.params * self.tokens if self.tokens else None


@functools.cache
def models() -> tuple[Model, ...]:
    """Returns the models of the shipped file, in its order."""
    known = []
    for entry in tomllib.loads(SHIPPED.read_text(encoding="utf-8"))["model"]:
        scores = {name: entry.pop(name) for name in list(entry) if isinstance(entry[name], dict)}
        known.append(Model(**{"tokens": None, "shown": True} | entry, scores=scores))
    return tuple(known)


def title(task: str) -> str:
    return TASKS.get(task, task)


def accuracy(metrics: Mapping[str, float]) -> str | None:
    return next((name for name in _ACCURACIES if name in metrics), None)


def expected(task: str, metric: str, flops: float) -> float | None:
    """Returns the score at `flops` FLOPs, interpolated in log FLOPs between models; None below all models, or for one model."""
    known = [m for m in models() if m.flops and metric in m.scores.get(task, {})]
    points = sorted((math.log(m.flops), m.scores[task][metric]) for m in known)
    if len(points) < 2 or not flops > 0 or math.log(flops) < points[0][0] - 1e-9:
        return None
    return float(np.interp(math.log(flops), *zip(*points, strict=True)))


def alarm(task: str, point: Mapping, flops: float) -> str:
    """Returns a line if a score is so low that the evaluation itself is more likely wrong than the model; else "".

    Such a score, with two standard errors added, is less than half as far above chance as `expected`, or below chance and below
    every published score. The standard error is at least that of guessing: four of four wrong answers have none. Some tasks
    were chosen so that simple methods fail: small models, correctly evaluated, are below chance there.

    `point` has the score: `metrics` and `stderr`, and if known `chance` and `n`, the number of questions.
    """
    metrics, chance, n = point["metrics"], point.get("chance"), int(point.get("n") or 0)
    metric = accuracy(metrics)
    if metric is None:
        return ""
    guess = chance or 0.0
    error = max(point["stderr"].get(metric, 0.0), math.sqrt(guess * (1 - guess) / n) if n else 0.0)
    score, two, usual = metrics[metric], 2 * error, expected(task, metric, flops)
    lowest = min([guess, *(m.scores[task][metric] for m in models() if metric in m.scores.get(task, {}))])
    if usual is not None and score + two < min(guess + _FAR * (usual - guess), usual):
        shown = f"{score:.3f} on {title(task)} is far under {usual:.3f}, which models with {flops:.1e} FLOPs of training score"
    elif chance is not None and score + two < lowest:
        beside = f", and {lowest:.3f}, the lowest that is published" if lowest < chance else ""
        shown = f"{score:.3f} on {title(task)} is below chance, {chance:.3f}{beside}, by more than two standard errors"
    else:
        return ""
    return f"{shown}: {_LOOK}"


def leads(name: str) -> bool:
    """Returns False for a figure `eval/TASK/METRIC` of the red team that is not its category's main score; else True."""
    return not name.startswith(f"eval/{REDTEAM}") or name.rpartition("/")[2] in _LEADS


def meanings(scores_of: Mapping[str, Collection[str]]) -> list[str]:
    """Returns a line on each category of these tasks, and on toxicity and copies if measured."""
    shown = {task: names for task, names in scores_of.items() if task.startswith(REDTEAM)}
    lines = [f"{task}: {_MEANING[task.removeprefix(REDTEAM)]}" for task in shown]
    also = {"toxicity": _TOXICITY, "copied": _COPIED}
    return lines + [line for name, line in also.items() if any(name in names for names in shown.values())]


# ---------------------------------------------------------------------------------------------------------------------
# On the page


def scores(summary: dict) -> Markup:
    """Returns the run's scores: the last of each task as a table, and all scores by step."""
    every = {task: points for task, points in _tasks(summary).items() if not task.startswith(REDTEAM)}
    if not every:
        return Markup("")
    alarms = [line for task, points in every.items() if (line := _alarm(summary["run"], task, points[-1]))]
    head = ("task", "accuracy", "chance", "bits per byte", "margin", "metric", "questions", "examples", "step")
    rows = [_row(task, points[-1]) for task, points in every.items()]
    about = (
        "± is two standard errors. Bits per byte of the right answer (less is better) move long before accuracy does; the "
        "margin is how many fewer they are than the best wrong answer's."
    )
    alike = {task: _alike(points) for task, points in every.items()}
    notes = [about, *(line for task in alike if (line := _left_out(task, every[task], alike[task])))]
    bits = [Curve(title(task), _points(points, BITS)) for task, points in alike.items()]
    bits = [curve for curve in bits if len(curve.points) > 1][:6]
    charts = [_accuracy(task, points) for task, points in alike.items()]
    charts.append(chart.lines(bits, "Bits per byte of the right answers", along="steps", shown=_digits))
    warned, noted = (tag("p", line) for line in alarms), (tag("p", line, class_="dim") for line in notes)
    return join([*warned, table(head, rows, "Benchmarks"), *noted, chart.grid(charts)])


def _tasks(summary: dict) -> dict[str, list[dict]]:
    return {task: points for task, points in (summary.get("benchmarks") or {}).items() if points}


def _alike(points: list[dict]) -> list[dict]:
    """Returns the points with the most common numbers of questions and few-shot examples; in a tie, those of the last point."""
    ways = [(point.get("n"), point.get("fewshot")) for point in reversed(points)]
    usual = collections.Counter(ways).most_common(1)[0][0]
    return [point for point in points if (point.get("n"), point.get("fewshot")) == usual]


def _left_out(task: str, points: list[dict], drawn: list[dict]) -> str:
    """Returns a note on the steps that a task's curves leave out, since their questions differ; "" if there are none."""
    if len(points) == len(drawn):
        return ""
    steps = ", ".join(f"{point['step']:,}" for point in points if point not in drawn)
    of_all = "" if drawn[0].get("n") is None else f" of {count(int(drawn[0]['n']))} questions"
    return f"{title(task)}: curves show steps{of_all} asked alike; not step {steps}, asked otherwise."


def _alarm(run: dict, task: str, point: dict) -> str:
    flops = 6.0 * (run.get("params") or 0) * point["step"] * (run.get("tokens_per_step") or 0)
    return alarm(task, point, flops)


def _row(task: str, point: dict) -> tuple:
    metric, chance = accuracy(point["metrics"]) or "", point.get("chance")
    numbers = ("" if point.get(name) is None else count(int(point[name])) for name in ("n", "fewshot"))
    measures = (with_error(point, name) for name in (BITS, MARGIN))
    shown = "" if chance is None else f"{chance:.3f}"
    return (title(task), with_error(point, metric), shown, *measures, metric, *numbers, count(point["step"]))


def _points(points: list[dict], metric: str, errors: float = 0.0) -> list[tuple[float, float]]:
    """Returns (step, score plus `errors` standard errors) where the metric was measured."""
    known = [point for point in points if metric in point["metrics"]]
    return [(p["step"], p["metrics"][metric] + errors * p["stderr"].get(metric, 0.0)) for p in known]


def _accuracy(task: str, points: list[dict]) -> Markup:
    metric = accuracy(points[-1]["metrics"])
    if not metric or len(_points(points, metric)) < 2:
        return Markup("")
    chance = [(point["step"], point["chance"]) for point in points if point.get("chance") is not None]
    curves = [Curve(metric, _points(points, metric))]
    if any(metric in point["stderr"] for point in points):
        low, high = _points(points, metric, -2.0), _points(points, metric, 2.0)
        curves.append(Curve("± 2 s.e.", [*low, (low[-1][0], math.nan), *high], dotted=True))  # one curve with a gap
    curves += [Curve("chance", chance, dotted=True)] if chance else []
    return chart.lines(curves, f"{title(task)} by step", along="steps", shown=_digits)


def beside(summary: dict) -> Markup:
    """Returns the run's scores beside those of published models; empty Markup if the run has none of their tasks."""
    others = [model for model in models() if model.shown]
    tasks = [task for task in TASKS if any(task in model.scores for model in others)]
    own = {task: points[-1] for task, points in _tasks(summary).items() if task in tasks}
    if not own:
        return Markup("")
    run = summary["run"]
    tokens = max(point["step"] for point in own.values()) * (run.get("tokens_per_step") or 0) or run.get("tokens")
    columns = [_column(run.get("params"), tokens, (_mine(own.get(task)) for task in tasks))]
    columns += [_column(model.params, model.tokens, (_other(model, task) for task in tasks)) for model in others]
    rows = zip(("parameters", "tokens", *map(title, tasks)), *columns, strict=True)
    about = (
        "Accuracy in %, zero-shot. n: normalised by the answers' bytes (acc_norm); f: with five worked examples; o: asked "
        "in the publisher's own way. Scores asked in different ways are not comparable. A blank was not found published."
    )
    beside = table(("", "this run", *(model.name for model in others)), rows, "Beside published models")
    sources = [tag("p", f"{model.name}: {model.source}") for model in others]
    return join([beside, tag("p", about, class_="dim"), details("Sources", *sources)])


def _column(params: float | None, tokens: float | None, cells: Iterable[str]) -> list[str]:
    return [human(params) if params else "", human(tokens) if tokens else "", *cells]


def _mine(point: dict | None) -> str:
    metric = accuracy(point["metrics"]) if point else None
    if not metric:
        return ""
    error = point["stderr"].get(metric)
    mark = "f" if point.get("fewshot") == 5 else _WAYS.get(metric, "")
    return _percent(point["metrics"][metric], mark) + (f" ± {200 * error:.1f}" if error is not None else "")


def _other(model: Model, task: str) -> str:
    metrics = model.scores.get(task, {})
    metric = "acc_norm" if "acc_norm" in metrics else next(iter(metrics), None)
    return _percent(metrics[metric], _WAYS.get(metric, "")) if metric else ""


def _percent(value: float, mark: str) -> str:
    return f"{100 * value:.1f} {mark}".rstrip()


def redteam(summary: dict) -> Markup:
    """Returns the red team's scores: in each category a row for each checkpoint, those of earlier runs first."""
    own = {"name": summary["run"].get("name", ""), "benchmarks": summary.get("benchmarks") or {}}
    stages = [*(summary.get("before") or ()), own]
    tasks = list(dict.fromkeys(task for stage in stages for task in stage["benchmarks"] if task.startswith(REDTEAM)))
    both = itertools.product(tasks, stages)
    points = [(task, stage["name"], point) for task, stage in both for point in stage["benchmarks"].get(task, ())]
    if not points:
        return Markup("")
    names = dict.fromkeys((*REDTEAM_SCORES, *(name for _, _, point in points for name in point["metrics"])))
    shown = [name for name in names if any(name in point["metrics"] for _, _, point in points)]
    head = ("category", "run", "step", *(name.replace("_", " ") for name in shown), "prompts")
    rows = []
    for task, run, point in points:
        number = "" if point.get("n") is None else count(int(point["n"]))
        cells = {name: with_error(point, name) for name in shown}
        if "longest_copy" in point["metrics"]:
            cells["longest_copy"] = count(int(point["metrics"]["longest_copy"]))
        rows.append((task.removeprefix(REDTEAM), run, count(point["step"]), *cells.values(), number))
    lines = ["± is two standard errors.", *meanings({task: point["metrics"] for task, _, point in points})]
    return join([table(head, rows, "Red team"), *(tag("p", line, class_="dim") for line in lines)])
