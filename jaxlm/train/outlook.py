"""Predicts a run's future from its own loss curve: for the report, the end of each phase, and a stop that saves money."""

import contextlib
import dataclasses
import glob
import math
import pathlib
import shlex
from collections.abc import Collection, Iterator, Sequence

from jaxlm.config import Config, ConfigError, StopConfig, config_files, resolve
from jaxlm.data.shards.mixture import Final, final_of, merge_windows
from jaxlm.devices.processes import from_first
from jaxlm.host.files import MANGLED, NUMBER, TEXT, is_number, is_step, json_lines, json_of, json_there, problem
from jaxlm.plan import bends, forecast
from jaxlm.plan.flops import count_params
from jaxlm.run import clock, differences, ledger, lineage, metrics
from jaxlm.step import optim
from jaxlm.train.loop import STOPPED, Ending, Every, Hook, Moment


@dataclasses.dataclass(frozen=True)
class Outlook:
    """Forecasts a run from its metrics.jsonl. Only the first process calls its methods.

    Attributes:
      final: the final mixture; None without one. The forecast leaves out its losses, since they are of other text.
    """

    folder: pathlib.Path
    rate: forecast.Rate
    steps: int
    usd_per_hour: float
    final: Final | None = None

    def losses(self) -> tuple[list[int], list[float | None]]:
        """Returns the steps of the first mixture and their training losses, as logged by all starts."""
        last = self._switch()
        records = metrics.records(self.folder / "metrics.jsonl")
        logged = [(r["step"], r["train/loss"]) for r in records if "train/loss" in r and r["step"] <= last]
        return [step for step, _ in logged], [loss for _, loss in logged]

    def _switch(self) -> int:
        """Returns the last step of the first mixture."""
        passed_over = merge_windows(ledger.read(self.folder)["passed_over"])
        return self.final.switch(passed_over) if self.final else self.steps

    def prices(self) -> tuple[float, float]:
        """Returns (seconds a step, dollars an hour). The seconds include all of the run's time: evaluations, saves, ..."""
        last = lineage.latest(metrics.records(self.folder / "metrics.jsonl"))
        done = (last.get("step") or 0) - _first(ledger.read(self.folder))
        return (last["wall_s"] / done if done > 0 and last.get("wall_s") else 0.0), self.usd_per_hour

    def ahead(self, step: int) -> list[forecast.Future] | forecast.TooEarly:
        """Returns the three futures after `step`, or TooEarly. Raises ValueError or ArithmeticError if no curve fits."""
        fitted = forecast.fit(*self.losses(), self.rate, step, self.steps)
        return fitted if isinstance(fitted, forecast.TooEarly) else forecast.futures(fitted, self.steps, *self.prices())

    def futures(self, step: int) -> list[forecast.Future] | forecast.TooEarly:
        """Returns `ahead(step)`, but TooEarly in place of an error if no curve fits."""
        try:
            return self.ahead(step)
        except (ValueError, ArithmeticError) as error:
            return forecast.TooEarly(f"no forecast: {error}")

    def summary(self, stop: StopConfig) -> dict:
        """Returns the report's summary of the run so far: `gather`'s, bends, and the futures if the run is between its ends."""
        gathered = gather(self.folder)
        weights = ", ".join(f"{name} {weight:g}" for name, weight in (self.final.mixture if self.final else {}).items())
        final = [(self._switch() + 1, f"the final mixture began: {weights}")] * bool(weights)
        gathered["bends"] = bends.of_run(self.folder, gathered, final)
        step = gathered["run"]["step"]
        if not 0 < step < self.steps:
            return gathered
        ahead = self.futures(step)
        return gathered | {"futures": forecast.summary(ahead, forecast.advice(ahead, stop.usd_per_centinat), step)}


def of_run(folder: pathlib.Path, config: Config) -> Outlook:
    steps, final = config.train.steps, final_of(config, config.data.final.weights)
    return Outlook(folder, optim.rates(config.optim, steps), steps, config.hardware.usd_per_hour, final)


_NEXT = {
    "": "jaxlm train {}",  # an interrupted run
    "pretrain": 'jaxlm sample {} "The"',
    "reward": "jaxlm train ppo --config.origin=SFT_RUN --config.reward.model={} --config.data.path=PROMPTS",
}


def _first(book: dict) -> int:
    """Returns the step at which a run began: a branch begins at its origin's."""
    return (book["starts"] or [{}])[0].get("step") or 0


def next_command(program: str, folder: pathlib.Path) -> str:
    """Returns the next command to try after a complete run of a program, or an interrupted one ("")."""
    return _NEXT.get(program, "jaxlm chat {}").format(shlex.quote(config_files.in_words(folder)))


# The metrics of the report's curves.
_CURVES = ("step", "tokens", "cost_usd", "train/loss", "train/grad_norm", "train/lr", "tokens_per_second", "mfu_palm")


def gather(folder: pathlib.Path) -> dict:
    """Returns the summary of the run in `folder` that `run_page.write` takes, without the futures."""
    records, book, origins = lineage.records(folder), ledger.read(folder), lineage.origins(folder)
    config, last, held_out = lineage.config_of(folder), lineage.latest(records), _held_out(records)
    logged = [record for record in records if record.get("train/loss") is not None]
    return {
        "run": _run(folder, records, held_out, book),
        "curves": {name.removeprefix("train/"): [record.get(name) for record in logged] for name in _CURVES},
        "held_out": held_out,
        "average": lineage.points(records, metrics.AVERAGE),
        "decays": [*_decays(folder)],
        "figures": lineage.curves(config.program, records) if config else {},
        "activities": {name: last.get(f"time/{name}_s", 0.0) for name in clock.ACTIVITIES},
        "phases": book["phases"],
        "benchmarks": _benchmarks(folder / "eval"),
        "junk": _junk(folder / "junk"),
        "before": [_before(*origin) for origin in origins],
        "stages": lineage.stages(origins, folder),
        "samples": _samples(folder / "samples"),
        "spikes": json_lines(folder / "spikes.jsonl"),
        "rollbacks": book["rollbacks"],
        "starts": [_start(start) for start in book["starts"]],
    }


def _run(folder: pathlib.Path, records: list[dict], held_out: dict, book: dict) -> dict:
    planned = {"model": "", "data": "", "steps": 0, "params": 0, "tokens_per_step": 0, "next": ""}
    start = book["starts"][-1] if book["starts"] else {}
    ended = start.get("ended") or {}
    code = ended.get("code")
    with contextlib.suppress(ConfigError, OSError):
        config = resolve(config_files.from_run(folder / "config.json"))
        model, train = config.model, config.train
        planned = {
            "model": f"{model.family}, {model.n_layers} layers of d {model.d_model}, "
            f"{train.batch_size} rows of {train.seq_len} tokens a step",
            "data": config.data.dir,
            "steps": train.steps,
            "params": count_params(model),
            "tokens_per_step": train.batch_size * train.seq_len,
            "next": next_command("" if code else config.program, folder) if code in (0, 1, 4) else "",
        }
    latest, last = lineage.latest(records), records[-1] if records else {}
    trained = [r["train/loss"] for r in records if r.get("train/loss") is not None]
    evaluated = [{"step": step, "loss": loss} for step, loss in held_out.get("", ()) if math.isfinite(loss)]
    step = last.get("step", 0)
    done = step - _first(book)
    left_s = (latest.get("wall_s") or 0.0) / done * max(0, planned["steps"] - step) if done > 0 else 0.0
    return {
        "name": folder.resolve().name,
        **planned,
        "step": step,
        "tokens": last.get("tokens") or 0,
        "loss": trained[-1] if trained else None,
        "held_out": evaluated[-1]["loss"] if evaluated else None,
        "best": min(evaluated, key=lambda point: point["loss"], default=None),
        "wall_s": latest.get("wall_s") or 0.0,
        "cost_usd": latest.get("cost_usd") or 0.0,
        "goodput": latest.get("goodput"),
        "ended": ended.get("why", ""),
        "time": latest.get("time"),
        "left_s": left_s,
        "left_usd": left_s / 3600 * (start.get("usd_per_hour") or 0.0),
    }


def _held_out(records: list[dict]) -> dict[str, list[tuple[int, float]]]:
    """Returns source -> (step, loss) of each evaluation; the source "" is the mean of all sources."""
    losses: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, loss in record.items():
            if name.startswith("val/") and name.endswith("loss") and isinstance(loss, int | float):
                source = name.removeprefix("val/").removesuffix("loss").rstrip("/")
                losses.setdefault(source, []).append((record["step"], loss))
    return losses


def _decays(folder: pathlib.Path) -> Iterator[dict]:
    """Yields a row for each finished decay of the rate, in the run or a branch beside it, with an average measured before.

    A branch's is that of its trunk at the branch's last step, if the trunk went so far: at equal tokens.
    """
    for run in [folder, *sorted(folder.parent.glob(f"{glob.escape(folder.name)}-decay-*"))]:
        config = lineage.config_of(run)
        begin = optim.decay_begins(config.optim, config.train.steps) if config else 0
        end = config.train.steps if begin else 0
        decay = dict(lineage.points(lineage.records(run), metrics.HELD_OUT)).get(end)
        branched = bool(begin and config.origin_state and config.optim.decay_at_step)
        trunk, last = (pathlib.Path(config.origin), end) if branched else (run, begin)
        before = [record for record in lineage.records(trunk) if record["step"] <= last]
        weights, averages = (dict(lineage.points(before, name)) for name in (metrics.HELD_OUT, metrics.AVERAGE))
        for step in sorted(weights.keys() & averages.keys())[-1:] if decay is not None else ():
            stood = {"step": step, "weights": weights[step], "average": averages[step]}
            yield {"name": run.name, "end": end, "decay": decay, **stood}


def _samples(folder: pathlib.Path) -> dict[str, list[dict]]:
    texts: dict[str, list[dict]] = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem) if is_step(path.stem) else -1):
        for line in json_lines(path):
            if isinstance(line.get("prompt"), str) and isinstance(line.get("text"), str):
                texts.setdefault(line["prompt"], []).append(line)
    return texts


def _benchmarks(folder: pathlib.Path) -> dict[str, list[dict]]:
    """Returns task -> its scores, by step. Another program may have written these files, so malformed ones are skipped."""
    scores: dict[str, list[dict]] = {}
    paths = [path for path in folder.glob("*/results.json") if is_step(path.parent.name)]
    for step, path in sorted((int(path.parent.name), path) for path in paths):
        with contextlib.suppress(OSError, *MANGLED):
            for task, entry in json_of(path.read_text(encoding="utf-8", errors="replace"))["tasks"].items():
                point = {"step": step} | {key: _numbers(entry.get(key)) for key in ("metrics", "stderr")}
                for key in ("chance", "n", "fewshot"):
                    point[key] = entry.get(key) if is_number(entry.get(key)) else None
                scores.setdefault(task, []).append(point)
    return scores


def _junk(folder: pathlib.Path) -> dict:
    """Returns the last result of `jaxlm junk`, {} without one."""
    steps = [int(path.stem) for path in folder.glob("*.json") if is_step(path.stem)]
    result = json_there(folder / f"{max(steps, default=0)}.json")
    return {} if problem(result, {"step": NUMBER, "strings": [{"string": TEXT, "texts": NUMBER}]}) else result


def _numbers(scores: object) -> dict[str, float]:
    return {name: score for name, score in scores.items() if is_number(score)} if isinstance(scores, dict) else {}


def _before(origin: pathlib.Path, last: float) -> dict:
    """Returns an earlier run's last benchmark scores and its samples up to step `last`, where the next run branched off."""

    def until(lines: list[dict]) -> list[dict]:
        return [line for line in lines if is_number(line.get("step")) and line["step"] <= last]

    points = {task: until(points)[-1:] for task, points in _benchmarks(origin / "eval").items()}
    texts = {prompt: until(lines) for prompt, lines in _samples(origin / "samples").items()}
    return {
        "name": origin.resolve().name,
        "benchmarks": {task: point for task, point in points.items() if point},
        "samples": {prompt: lines for prompt, lines in texts.items() if lines},
    }


def _start(start: dict) -> dict:
    hardware, git, ended = start.get("hardware") or {}, start.get("git") or {}, start.get("ended") or {}
    return {
        "time": start.get("time", ""),
        "step": start.get("step", 0),
        "usd_per_hour": start.get("usd_per_hour", 0.0),
        "device": hardware.get("device_kind", "?"),
        "devices": hardware.get("devices", "?"),
        "commit": git.get("commit", ""),
        "dirty": git.get("dirty", False),
        "changed": differences.words(start.get("changed") or []),
        "ended": f"{ended.get('code', '')} {ended.get('why', '')}".strip(),
    }


class Report(Hook):
    """Shows the three futures at the end of each phase."""

    name = "report"
    decoration = True

    def __init__(self, outlook: Outlook, stop: StopConfig, milestones: Collection[int]):
        self._outlook, self._stop, self._every = outlook, stop, Every(0, milestones, end=False)

    def due(self, step: int, end: int) -> bool:
        return self._every.due(step, end)

    def done(self, step: int) -> bool:
        return True

    def __call__(self, moment: Moment) -> None:
        for line in from_first(lambda: self._lines(moment.step)):
            moment.say(line)

    def _lines(self, step: int) -> Sequence[str]:
        ahead = self._outlook.futures(step)
        shown = [] if isinstance(ahead, forecast.TooEarly) else forecast.table(ahead)
        return [*shown, f"forecast: {forecast.advice(ahead, self._stop.usd_per_centinat).line}"]


@dataclasses.dataclass(eq=False)
class StopByForecast(Hook):
    """Looks at the forecast every `every_steps` steps. Ends the run if its rest costs more than it is worth.

    That is, if 0.01 nats cost more than `stop.usd_per_centinat` in every future. The advice to decay now is shown once and
    does not end the run, since the rest of the plan may serve other ends than the loss.
    """

    name = "futures"
    outlook: Outlook
    config: StopConfig
    every_steps: int
    _advised: str = ""

    def due(self, step: int, end: int) -> bool:
        return self.config.usd_per_centinat > 0 and Every(self.every_steps, end=False).due(step, end)

    def done(self, step: int) -> bool:
        return True  # a later start looks at the next multiple of `every_steps`

    def __call__(self, moment: Moment) -> Ending | None:
        line, why = from_first(lambda: self._advice(moment.step))
        if line:
            moment.say(line)
        return Ending(STOPPED, why, cause="gate") if why else None

    def _advice(self, step: int) -> tuple[str, str]:
        """Returns (a line to show or "", why the run should end or "")."""
        try:
            ahead = self.outlook.ahead(step)
        except (ValueError, ArithmeticError) as error:  # an unexpected curve must not end a run
            return f"no forecast at step {step}: {error}", ""
        advice = forecast.advice(ahead, self.config.usd_per_centinat)
        new, self._advised = advice.word != self._advised, advice.word
        if advice.word not in (forecast.STOP, forecast.DECAY):
            return "", ""
        steps = next(future.steps for future in ahead if future.name == forecast.DECAY)
        branch = f"jaxlm train {shlex.quote(str(self.outlook.folder))} --branch=decay --steps={steps}"
        line = f"{advice.line.removeprefix('stop: ')}; {branch} finishes the model from here"
        if advice.word == forecast.STOP:
            return "", f"stopped at step {step}: {line}"
        return line if new else "", ""
