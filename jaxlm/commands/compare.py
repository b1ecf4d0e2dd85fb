"""`jaxlm compare RUN_A RUN_B`: whether two models can be told apart, by benchmarks, by votes or by a command's scores."""

import argparse
import dataclasses
import json
import math
import pathlib
import shlex
import subprocess

from jaxlm.config import Config, ConfigError, RunError
from jaxlm.eval import compare, results
from jaxlm.eval.compare import Comparison
from jaxlm.host import files
from jaxlm.host.console import table, working
from jaxlm.interop import hf_config
from jaxlm.report.benchmarks import title


def run(config: Config, args: argparse.Namespace) -> int:
    """Prints a sentence for each task, and a table of the figures."""
    folders = [pathlib.Path(config.workdir), pathlib.Path(args.other or config.workdir)]
    if args.votes and args.command:
        raise ConfigError("--votes and --command are two ways to judge: give one of them")
    if args.lower_is_better and not args.command:
        raise ConfigError("--lower-is-better is for --command's scores: the direction of benchmarks and votes is known")
    steps = _steps(args.checkpoint, one_run=not args.other)
    if args.votes:
        comparisons = [compare.votes(_votes(args.votes))]
    elif args.command:
        a, b = (_scored(args.command, folder, step) for folder, step in zip(folders, steps, strict=True))
        if len(a) != len(b):
            raise ConfigError(f"the command scored {len(a)} items of A and {len(b)} of B: not the same items")
        items = (dict(enumerate(a)), dict(enumerate(b)))
        comparisons = compare.adjust([compare.scores("the command", "score", *items, lower=args.lower_is_better)])
    else:
        if absent := [folder for folder in folders if not folder.is_dir()]:
            raise ConfigError(f"no run in {absent[0]}: there is no such folder")
        steps = [_found(folder, step) for folder, step in zip(folders, steps, strict=True)]
        read = [results.read(folder / results.FOLDER / step) for folder, step in zip(folders, steps, strict=True)]
        comparisons = compare.benchmarks(*read)
    names = _names(folders, steps)
    lines = compare.words(comparisons, *names)
    if args.json:
        sides = [{"run": str(f), "step": step} for f, step in zip(folders, steps, strict=True)]
        rows = [dataclasses.asdict(test) | {"apart": test.apart} for test in comparisons]
        print(json.dumps({"a": sides[0], "b": sides[1], "comparisons": rows, "words": lines}))
        return 0
    print("\n".join(lines))
    print(table(_rows(comparisons, names)))
    return 0


def _steps(words: str, one_run: bool) -> list[str]:
    """Returns the steps of A and of B, "latest" if not given. Raises ConfigError if `words` are no steps."""
    steps = [word.strip() for word in words.split(",")] if words else []
    if one_run and len(steps) != 2:
        raise ConfigError("compare what? jaxlm compare RUN_A RUN_B, or two checkpoints of one run: --checkpoint=A,B")
    steps = steps * 2 if len(steps) == 1 else steps or ["latest", "latest"]
    if len(steps) != 2 or not all(files.is_step(step) or step == "latest" for step in steps):
        raise ConfigError(f"--checkpoint={words}: give two steps, or latest, as A,B")
    return [step if step == "latest" else str(int(step)) for step in steps]


def _found(folder: pathlib.Path, step: str) -> str:
    there = results.steps(folder)
    if step == "latest" and there:
        return str(there[-1])
    if not files.is_step(step) or int(step) not in there:
        which = f" --checkpoint={step}" if files.is_step(step) else ""
        has = f"no results of step {step} in {folder}, only of {', '.join(map(str, there))}" if there else ""
        command = f"jaxlm eval {shlex.quote(str(folder))}{which}"
        has = has or f"no results of jaxlm eval in {folder}"
        raise ConfigError(f"{has}: first {command} --tasks=arc_easy,piqa, or --text=FILES of your own")
    return step


def _names(folders: list[pathlib.Path], steps: list[str]) -> list[str]:
    if folders[0].resolve() != folders[1].resolve():
        names = [folder.resolve().name for folder in folders]
        if names[0] != names[1] and steps[0] == steps[1]:
            return names
        names = names if names[0] != names[1] else [str(folder) for folder in folders]
        at = ["" if hf_config.is_model(f) else f" at {step}" for f, step in zip(folders, steps, strict=True)]
        return [f"{name}{step}" for name, step in zip(names, at, strict=True)]
    return [f"step {int(step):,}" if files.is_step(step) else step for step in steps]


def _votes(path: str) -> list[dict]:
    from jaxlm.corpus.benchmarks import reading  # late: it imports pyarrow

    def refuse(number: int) -> None:
        raise ConfigError(f'{path}, line {number} is no JSON object; it must be {{"winner": "a", "item": ...}}')

    return [vote for _, vote in reading.records(path, refuse)]


def _scored(command: str, folder: pathlib.Path, step: str) -> list[float]:
    call = f"{command} {shlex.quote(str(folder))} {step}"
    with working(f"running {call}"):
        done = subprocess.run(call, shell=True, stdout=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        raise RunError(f"the command failed with exit code {done.returncode}: {call}")
    scores = []
    for number, line in enumerate(done.stdout.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            scores.append(float(line))
        except ValueError:
            scores.append(math.nan)
        if not math.isfinite(scores[-1]):
            raise ConfigError(
                f"line {number} of {call} is {line.strip()[:40]!r}: it must print a number a line, and no more"
            )
    if not scores:
        raise ConfigError(f"{call} printed no scores")
    return scores


def _rows(comparisons: list[Comparison], names: list[str]) -> list[list[str]]:
    short = [name if len(name) <= 18 else f"…{name[-17:]}" for name in names]
    rows = [["task", "metric", "items", *short, "difference, 95%", "p"]]
    for test in comparisons:
        gap = f"{test.difference:+.4f}, {test.low:+.3f} to {test.high:+.3f}"
        p = compare.probability(test.adjusted).removeprefix("= ")
        rows.append([title(test.task), test.metric, f"{test.n:,}", f"{test.a:.4f}", f"{test.b:.4f}", gap, p])
    return rows
