"""`jaxlm verify RUN`: checks a run's receipt, trains some of its steps again in another folder, and compares.

It writes nothing into RUN. Of a run without a receipt, which older versions did not write, it compares the metrics alone.
"""

import argparse
import functools
import itertools
import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import numpy as np

from jaxlm import config as config_lib
from jaxlm.config import Config, ConfigError, config_files
from jaxlm.host import console
from jaxlm.run import differences, ledger, metrics, receipt
from jaxlm.run.checkpoints import keep, meta, store
from jaxlm.run.survive import supervisor, train_in_child

_STEPS = 20
_CLOSE = 0.01  # of the way that the steps moved the weights, on another machine
# The replay writes the metrics of each step, saves at recorded steps alone, and tells nobody.
_KEYS = ("log.every_steps=1", "log.wandb=", "profile.steps=", "checkpoint.mirror=", "checkpoint.every_minutes=0")
_KEYS += ("notify.heartbeat_url=", "runs.notices=()", "distributed.auto=False", "distributed.coordinator=")
_KEYS += ("distributed.num_processes=0", "stability.spike_z=0")  # which batches a spike cost is in run.json
_KEYS += ("checkpoint.max_unprotected_minutes=0.001",)  # a full disk ends it


def run(config: Config, args: argparse.Namespace) -> int:
    """Prints what a receipt proves, what was changed, what a replay costs, and what differs in it. Returns 0, or 3."""
    folder = pathlib.Path(config.workdir).resolve()
    if trained := config_files.averaged(folder):
        raise ConfigError(f"{folder} is an average, and has no steps to replay: jaxlm verify {trained}")
    if not config.workdir or not (folder / "metrics.jsonl").is_file():
        raise ConfigError(f"no run that was trained in {folder}: it has no metrics.jsonl")
    if args.steps is not None and (args.steps < 1 or args.until_digest):
        raise ConfigError("give --steps=N with N above 0, or --until-digest")
    supervisor.wanted("on")  # or says that this needs Linux
    print(receipt.PROVES)
    book = ledger.read(folder, mend=False)
    links, checkpoints = receipt.valid(book), folder / "checkpoints"
    with console.working("reading checkpoints and data"):
        faults = {n: receipt.of_checkpoint(checkpoints / str(n), links.get(n)) for n in keep.steps(checkpoints)}
        data = receipt.of_data(config.data.dir, book) if config.program == "pretrain" else ""
    wrong = [*receipt.changed(folder, book), *filter(None, (*faults.values(), data))]
    of = console.several(len(book["receipt"]), "link")
    sound = f"unchanged: {of}, up to step {max(links, default=0)}, and what they cover"
    for line in wrong or [sound if links else "no receipt: nothing is saved yet, or an older version trained this"]:
        print(line)
    if data:
        print("no replay: its data is gone or changed; if it was moved, --config.data.dir=DIR says where to")
        return 3
    begins, lost = _begins(
        config, book, {n for n, fault in faults.items() if not fault and (n in {0, *links} or not links)}
    )
    logged = () if args.until_digest else metrics.read(folder / "metrics.jsonl", book["rollbacks"])
    ends, steps = {*begins, *links, *logged}, 1 if args.until_digest else args.steps or _STEPS
    last = max(ends, default=0)
    if last <= (first := min(begins, default=last)):
        why = f"{folder} has {'saved' if args.until_digest else 'logged'} no step yet"
        raise ConfigError((lost and f"{lost}, and no later one from which steps could be replayed is left") or why)
    if lost:
        print(f"{lost}: steps 1 to {first} can't be replayed, later ones can")
    begin = max(step for step in begins if step <= max(last - steps, first))
    until = min(step for step in ends if step >= min(begin + steps, last))  # so that something is recorded of its end
    whole, (until, keys) = until, _as_it_was(folder, book["starts"], begin, until)
    print(_price(config, begin, until) + f"; at step {until} the config was changed" * (until < whole))
    keys += [*_KEYS, f"data.dir={config.data.dir}", f"stop.steps={until}"]
    recorded = [step for step in links if begin < step <= until]
    keys += [f"checkpoint.every_steps={_every(recorded, until - begin)}"]
    with tempfile.TemporaryDirectory(prefix="jaxlm-verify-") as place:
        again = config_lib.resolve(config_files.of_run(folder, [*keys, *args.overrides, f"workdir={place}"]))
        if why := _trained(folder, book, begin, until, again):
            print(f"no replay: {why}".replace(place, str(folder)))
            return 3 if wrong else 1
        results = [*_compared(folder, book, pathlib.Path(place), begin, until)]
    everything = (begin, until) == (0, last) and not config.origin_state
    words = f"steps {begin + 1} to {until}{' (all of them)' * everything}"
    same = [same for same, _ in results]
    verdict = "do not repeat" if False in same else "repeat" if True in same else "can't be judged on this machine"
    for line in (*(line for _, line in results), f"{'something was changed (above); ' * bool(wrong)}{words} {verdict}"):
        print(line)
    return 0 if verdict == "repeat" and not wrong else 3


def _begins(config: Config, book: dict, whole: set[int]) -> tuple[set[int], str]:
    """Returns (the steps from which a replay may begin, a line if the run's first weights are lost).

    `whole`: the sound checkpoints. Of those after 0, one without a link was saved before a kill, or a rollback undid it.
    """
    start = (book["starts"] or [{}])[0]
    if config.origin_state:  # a branch begins with its origin's steps
        return whole | {start.get("step", 0)}, ""
    if start.get("manifest_sha256") == "" and 0 not in whole:  # an import or grow, which read no data
        return whole, "checkpoint 0, the weights that this run began with, is gone or damaged"
    return whole | {0}, ""


def _as_it_was(folder: pathlib.Path, starts: list[dict], begin: int, until: int) -> tuple[int, list[str]]:
    """Returns (the last step trained with one config, overrides that take back what later starts changed in the config)."""
    keys, undone = {*config_files.flat_keys(config_files.of_run(folder, []))}, []
    for start in reversed(starts):
        if (step := start.get("step", 0)) <= begin:
            break
        changed = {row["name"]: row["was"] for row in start.get("changed", ()) if row["name"] in keys}
        undone += [f"{key}={tuple(was) if isinstance(was, list) else was}" for key, was in changed.items()]
        until = min(until, step) if changed else until
    return until, undone


def _price(config: Config, begin: int, until: int) -> str:
    folder, steps = pathlib.Path(config.workdir), console.several(until - begin, "step")
    seconds = (until - begin) * metrics.step_s(folder / "metrics.jsonl", config)
    price = console.costs(seconds, config.hardware.usd_per_hour)
    price = f"{price} at the run's own speed" if seconds else "a time unknown as yet"
    where = f"checkpoint {begin}" if (folder / f"checkpoints/{begin}").is_dir() else "its beginning"
    return f"replaying steps {begin + 1} to {until} from {where}: {steps}, {price}, and a start"


def _trained(folder: pathlib.Path, book: dict, begin: int, until: int, config: Config) -> str:
    """Trains the steps in `config.workdir`, an empty folder, from checkpoint `begin`. Returns "", or why it failed."""
    place = pathlib.Path(config.workdir)
    (place / "config.json").write_text(config_lib.to_json(config))
    (place / "run.json").write_text(json.dumps(book | {"starts": [], "phases": [], "receipt": []}))
    for path in (path for pattern in receipt.FILES for path in folder.glob(pattern)):
        shutil.copy(path, place)
    saved = pathlib.Path("checkpoints", str(begin))
    if (folder / saved).is_dir():  # 0 too: an imported or grown model. Links to its files: what is written stays here
        shutil.copytree(folder.resolve() / saved, place / saved, copy_function=os.symlink)
    with console.working("replaying", end=False, quiet=True):
        code = train_in_child.supervised(config).run()
    if code == 4:
        raise KeyboardInterrupt
    done = max(metrics.read(place / "metrics.jsonl"), default=0)
    ended = ((ledger.read(place)["starts"] or [{}])[-1].get("ended") or {}).get("why")
    return "" if done >= until and code != 1 else (ended or train_in_child.last_words(place)).removeprefix("jaxlm: ")


def _every(recorded: list[int], steps: int) -> int:
    """Returns after how many steps a replay saves, to meet most of the recorded ones by twice as many saves at most."""
    # A stop saves at any step: such a one may not be compared. The last state is in any case.
    tried = {*recorded, *itertools.starmap(math.gcd, itertools.pairwise(recorded))}
    few = [every for every in tried if 2 * len(recorded) * every >= steps]
    return max(few, key=lambda every: (sum(step % every == 0 for step in recorded), every), default=0)


def _compared(folder: pathlib.Path, book: dict, place: pathlib.Path, begin: int, until: int) -> Iterator[tuple]:
    """Yields (True if it repeats, False if not, None if it proves neither; a line) for code, machine, metrics and states."""
    here, inputs = ledger.read(place), differences.of_runs((folder, place))
    was, now = ((books["starts"] or [{}])[-1] for books in (book, here))
    rows = [row for row in inputs if was and row["what"] in ("code", "packages", "hardware", "choices")]
    for row in rows:
        yield None, "{what} {name}: {0} then, {1} now".format(*row["values"], **row)
    if (now["git"] or {}).get("dirty"):
        yield None, "code: now with changes that are in no commit"
    hardware = now["hardware"]
    alike = hardware["platform"] != "cpu" or hardware["host"] == (was.get("hardware") or {}).get("host")
    differs = False if was and alike and all(row["what"] == "code" for row in rows) else None
    try:
        differing = differences.compare(folder, place)
        yield differs if differing["parted"] else True, f"metrics: {differing['verdict']}"
    except ConfigError:
        yield None, "metrics: none of these steps was logged"
    links, replayed = receipt.valid(book), receipt.valid(here)
    for step in (step for step in links if begin < step <= until):
        new, old, begun = (at / f"checkpoints/{n}" for at, n in ((place, step), (folder, step), (folder, begin)))
        if step not in replayed:
            yield None, f"step {step}: the state was not compared, since the replay did not save it"
        elif replayed[step]["state"] == links[step]["state"]:
            yield True, f"step {step}: all arrays are equal to the bit"
        elif all(path.is_dir() for path in (new, old, begun)):
            share = _apart(new, old, begun)
            line = f"step {step}: the weights differ by {100 * share:.2g}% of their way since step {begin}"
            yield (share <= _CLOSE if differs is None else False), line
        else:
            yield differs, f"step {step}: the arrays differ"


def _apart(new: pathlib.Path, old: pathlib.Path, begun: pathlib.Path) -> float:
    """Returns how far the weights of two checkpoints are apart, as a share of the way of `old` from `begun`."""
    read, moved, apart = functools.cache(store.reader), 0.0, 0.0
    for item, _, name in (name.partition("/") for name in meta.read(old)["digests"] if not name.startswith("train/")):
        a, b, c = (read(place, item)(name).astype(np.float64) for place in (new, old, begun))
        moved, apart = moved + float(np.sum((b - c) ** 2)), apart + float(np.sum((a - b) ** 2))
    return (apart / moved) ** 0.5 if moved else float(apart > 0)
