"""`jaxlm report RUN ...`: one page with everything that a run's files say, also while the run goes on; or on several runs."""

import argparse
import json
import pathlib

from jaxlm.config import Config, ConfigError, config_files
from jaxlm.host.console import say, table
from jaxlm.report import markup, run_page, runs_page
from jaxlm.run import differences, held_out_texts, lineage
from jaxlm.train import outlook

_UNKNOWN = "{}"  # the held-out text of a run whose data is gone
_NAMED = 3  # runs in the name of the page


def run(config: Config, args: argparse.Namespace) -> int:
    """Writes RUN/report.html, or with --json prints the same numbers. With --took, also prints the commands' times."""
    folder = pathlib.Path(config.workdir)
    if args.words:
        if args.took:
            raise ConfigError("--took goes with one run")
        return _several([folder, *map(pathlib.Path, args.words)], args)
    if args.out:
        raise ConfigError("--out goes with several runs; the page of one is RUN/report.html")
    _check(folder, args.config)
    took = lineage.commands(pathlib.Path(args.took), config.hardware.usd_per_hour) if args.took else []
    summary = outlook.of_run(folder, config).summary(config.stop) | {"commands": took}
    if args.json:
        print(json.dumps(summary))
        return 0
    run_page.write(folder / markup.NAME, summary)
    if took:
        print(table(run_page.command_cells(took), right=(1, 2)))
    for row in summary["bends"]:
        say(f"the curve bends at step {row['step']:,}, by {row['change']:+.3f} nats: {row['why']}")
    if not summary["bends"]:
        say("no bend of the curve stands out from its noise")
    say(f"open {folder / markup.NAME}")
    return 0


def _check(folder: pathlib.Path, word: str) -> None:
    if not (folder / "metrics.jsonl").is_file():
        raise ConfigError(f"{config_files.no_run(folder, word)}: it has no metrics.jsonl; train first")


def _several(folders: list[pathlib.Path], args: argparse.Namespace) -> int:
    """Writes a page with the curves of several runs over each other, what came of each, and what differs."""
    for folder in folders:
        _check(folder, str(folder))
    summaries, differing, texts = gather(folders)
    if args.json:
        print(json.dumps({"runs": summaries, "differing": differing, "held_out": texts}))
        return 0
    short = [name.replace("/", "-") for name in summaries]
    page = pathlib.Path(
        args.out or f"report-{'-'.join(short[:_NAMED])}{f'-and-{len(short) - _NAMED}' * (len(short) > _NAMED)}.html"
    )
    runs_page.write(page, summaries, differing, texts)
    say(f"open {page}")
    return 0


def gather(folders: list[pathlib.Path]) -> tuple[dict[str, dict], list[dict], dict[str, list[str]]]:
    """Returns the summaries, the differing inputs and the held-out texts of several runs, as `runs_page.write` takes them."""
    names = _names(folders)
    summaries = {name: outlook.gather(folder) for name, folder in zip(names, folders, strict=True)}
    groups: dict[str, list[str]] = {}
    for name, folder in zip(names, folders, strict=True):
        groups.setdefault(json.dumps(held_out_texts.of_run(folder), sort_keys=True), []).append(name)
    unknown = groups.pop(_UNKNOWN, []) if len(groups) > 1 else []
    texts = {f"held-out loss{f', text of {runs[0]}' * (len(groups) > 1)}": runs for runs in groups.values()}
    texts |= {"held-out loss, text unknown": unknown} if unknown else {}
    return summaries, differences.of_runs(folders), texts


def _names(folders: list[pathlib.Path]) -> list[str]:
    """Returns each folder's name, or its path if two have the same name. Raises ConfigError for a run given twice."""
    places = [folder.resolve() for folder in folders]
    if twice := [folder for folder, place in zip(folders, places, strict=True) if places.count(place) > 1]:
        raise ConfigError(f"{twice[0]} is given twice")
    names = [place.name for place in places]
    return names if len(set(names)) == len(names) else list(map(str, folders))
