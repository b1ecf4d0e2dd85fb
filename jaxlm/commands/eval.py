"""`jaxlm eval`: the held-out loss of a run's model, and benchmarks."""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import itertools
import pathlib
from collections.abc import Callable, Iterable, Sequence

import jax

from jaxlm.config import Config, ConfigError, RunError
from jaxlm.data.batches.open import open_mixture
from jaxlm.data.chats import chat
from jaxlm.data.shards import vocabulary
from jaxlm.devices.processes import from_first, say, together
from jaxlm.eval import core, harness, held_out, likelihood, model, redteam, results, text
from jaxlm.eval.model import Restored
from jaxlm.eval.results import TaskResult
from jaxlm.host import console
from jaxlm.interop import peft
from jaxlm.run import held_out_texts


def run(config: Config, args: argparse.Namespace) -> int:
    """Prints a table of a checkpoint's scores, and writes them to RUN/eval/STEP."""
    model.check_run(config, args.config)
    folder = pathlib.Path(config.workdir)
    if "sample.weights=int8" not in args.overrides:  # the run's own key is for its texts
        config = dataclasses.replace(config, sample=dataclasses.replace(config.sample, weights="float"))
    if args.limit < 0:
        raise ConfigError(f"--limit={args.limit}: how many questions of each task; 0 = all")
    if args.limit and args.text:
        raise ConfigError(
            "--limit limits questions, but --text measures each document: give a folder with fewer documents"
        )
    names = [] if args.text else list(config.eval.tasks)
    if args.tasks is not None:
        names = [name.strip() for name in args.tasks.split(",")]
    if "" in names:
        raise ConfigError(f"--tasks={args.tasks}: names with a comma between, such as arc_easy,piqa")
    ask = together(lambda: harness.Benchmarks(names, config.eval))
    documents = together(lambda: text.read(args.text, config.data.text_key)) if args.text else ()
    run = model.with_weights(config, model.restore(config, args.checkpoint, peft.READERS))
    say(run.name)
    if ask.chats:
        together(lambda: chat.template(run.tokenizer))
    place = folder / results.FOLDER / str(run.step)
    why = "int8 weights (without --weights=int8 the run's own)" if config.sample.weights == "int8" else ""
    if (names or documents) and not why and (error := from_first(lambda: results.unwritable(folder, run.step))):
        why = f"{place} can't be written ({error})"
    if why and (names or documents):
        say(f"{why}: the results are printed, not kept")
    with jax.set_mesh(run.mesh):
        held_out = {} if documents else _held_out(run, config)
    if not (held_out or names or documents):
        raise ConfigError(f"{config.workdir} has no held-out text: name benchmarks, --tasks=arc_easy,piqa")
    about = _about(run.step, config, args) | {"moment": from_first(lambda: results.moment(folder))}
    keep = (lambda result: ("", True)) if why else (lambda result: from_first(lambda: _kept(folder, result, about)))
    run = dataclasses.replace(run, tokenizer=chat.dated(run.tokenizer, about["moment"]))
    scorer = likelihood.of_restored(run, config)
    answered = itertools.chain(text.results(scorer, documents, config.train.seq_len), ask(scorer, args.limit))
    scored, lost = _asked(answered, keep, run.name)
    if jax.process_index() == 0:
        _show(held_out, scored, args.json)
        flops = harness.training_flops(run.variables, run.step * config.train.batch_size * config.train.seq_len)
        for line in filter(None, (results.alarm(result, flops) for result in scored)):
            say(line)
        if not why and (done := [result.task for result in scored if result.task not in lost]):
            say(f"written to {place}" + (f": {', '.join(done)}" if lost else ""))
    return 1 if lost else 0


def _asked(answered: Iterable[TaskResult], keep: Callable, name: str) -> tuple[list[TaskResult], list[str]]:
    """Returns (results, tasks whose result could not be written). Writes each at once: ctrl-C loses none."""
    scored, lost = [], []
    try:
        for result in answered:
            scored.append(result)
            line, kept = keep(result)
            if line:
                say(line)
            lost += [] if kept else [result.task]
    except likelihood.NotFinite as error:
        raise RunError(f"{name}: {error}") from None
    except KeyboardInterrupt:
        if scored:
            say(f"done: {', '.join(result.task for result in scored)}")
        raise
    return scored, lost


def _kept(folder: pathlib.Path, result: TaskResult, about: dict) -> tuple[str, bool]:
    """Writes a result; returns (a line about it or "", whether it was written). An OSError becomes the line."""
    try:
        return results.add(folder, result, about), True
    except OSError as error:
        return f"{result.task} is not kept in {folder / results.FOLDER / str(about['step'])}: {error.strerror}", False


def _held_out(run: Restored, config: Config) -> dict[str, float]:
    """Returns the metrics of the run's held-out text, as training evaluates it; {} if no text is held out."""
    if run.data is None:  # a model from elsewhere
        return {}
    data, mixture = open_mixture(config.data, config.prepare, vocabulary.required(config))
    if not (evaluate := held_out.of_text(run.model, data, mixture, run.mesh, config)):
        return {}
    if line := from_first(lambda: held_out_texts.since_training(pathlib.Path(config.workdir), data, config)):
        say(line)
    return evaluate(run.variables)


def _about(step: int, config: Config, args: argparse.Namespace) -> dict:
    packages = {}
    for name in ("jaxlm", "jax", "lm_eval"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    asked = {"fewshot": config.eval.fewshot, "chat_template": config.eval.chat_template}
    return {"step": step, "limit": args.limit, **asked, "packages": packages}


def _show(held_out: dict[str, float], scored: Sequence[TaskResult], as_json: bool) -> None:
    rows = [{"task": "held-out", "metric": name, "value": value} for name, value in held_out.items()]
    for result in scored:
        for name, value in result.metrics.items():
            guess = result.chance if name.startswith(("acc", "stereotype")) else None
            row = {"task": result.task, "metric": name, "value": value, "stderr": result.stderr.get(name)}
            rows.append(row | {"chance": guess, "items": len(result.items), "fewshot": result.fewshot})
    if as_json:
        return console.print_table(rows, True)
    header = ["task", "metric", "value", "± 2 s.e.", "chance", "questions", "examples"]
    cells = [[row["task"], row["metric"], f"{row['value']:.4g}", *_rest(row)] for row in rows]
    print(console.table([header, *cells], right=range(2, len(header))))
    for line in filter(None, (core.line(scored), *redteam.lines(scored))):
        print(line)


def _rest(row: dict) -> list[str]:
    """Returns the cells after the value: twice the standard error, chance, items, few-shot examples; "" if unknown."""
    spread = "" if row.get("stderr") is None else f"{2 * row['stderr']:.2g}"
    chance = "" if row.get("chance") is None else f"{row['chance']:.3g}"
    asked = console.count(row["items"]) if row.get("items") else ""
    shots = "" if row.get("fewshot") is None else str(row["fewshot"])
    return [spread, chance, asked, shots]
