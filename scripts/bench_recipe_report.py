"""The tables of scripts/bench_recipe.py: losses; tokens, seconds and dollars to the base's loss; rates; peers."""

import argparse
import pathlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence

import bench_recipe_arms as arms_lib
import bench_recipe_peers
import bench_recipe_runs as runs_lib
import bench_recipe_stats as stats
from bench_recipe_runs import Fields, Run

from jaxlm.host.console import print_table

STEPTIMES = "steptimes.jsonl"  # beside runs.jsonl
NONE = "-"
Row = dict[str, str]


def main(args: argparse.Namespace) -> int:
    """Prints all results in runs.jsonl and steptimes.jsonl."""
    if not args.runs.is_file():
        print(
            f"{args.runs} is no file: give --runs=FILE, or make it by python scripts/bench_recipe.py run",
            file=sys.stderr,
        )
        return 2
    lines = runs_lib.read(args.runs)
    data = next((line["data"] for line in reversed(lines) if line.get("data")), "")
    done = runs_lib.finished(lines, arms_lib.asked, data, arms_lib.defaults())
    peers = runs_lib.finished(lines, bench_recipe_peers.asked, data)
    if only := args.only:
        done = {
            run: line for run, line in done.items() if run.arm in {*only, *(arms_lib.ARMS[arm].base for arm in only)}
        }
    for line in about(done | peers, len(lines), args.runs):
        print(line)
    if not done and not peers:
        return 1
    times = runs_lib.read(args.runs.with_name(STEPTIMES))
    tables = {"Held-out loss in nats a token, bits per byte, and the difference to others, seed by seed": losses(done)}
    tables[
        "Tokens, seconds and dollars to a loss, over the base's; each at rate x1 (the rule, for reference .55 of it)"
    ] = savings(done, times, {})
    best = {arm: arms_lib.chosen(arm, done) for arm in arms_lib.ARMS}
    best = {arm: factor for arm, factor in best.items() if factor != 1}
    if best:
        tables["The same, each at the best of its three rates"] = savings(done, times, best)
    tables |= {
        "Rates at the first budget: what x1 loses to the best": rates(done),
        "Peers on the same tokens and shape": peer_rows(peers, done),
    }
    for title, rows in tables.items():
        if rows:
            print(f"\n{title}")
            print_table(rows, False)
    print()
    for line in notes(done, times, args.usd_per_hour):
        print(line)
    return 0


def about(done: Mapping[Run, Fields], lines: int, path: pathlib.Path) -> Iterator[str]:
    """Yields lines on the origin of the figures: data, machines, commits, load."""
    if not done:
        yield f"no finished run of today's arms among {lines} lines of {path}: python scripts/bench_recipe.py run"
        return
    last = list(done.values())[-1]
    epochs = ", ".join(f"{name} {times:g}" for name, times in last["epochs"].items())
    yield (
        f"{len(done)} finished runs of {lines} lines; data {last['data']}: {last['train_tokens']:,} tokens to train on, "
        f"{last['held_out_tokens']:,} held out, all measured; {arms_lib.BUDGETS[-1] / 1e6:g}M tokens are epochs of {epochs}"
    )
    for what in ("machine", "commit"):
        found = sorted({line[what] or "unknown" for line in done.values()})
        yield f"{what}: {'; '.join(found)}" + (" (several: do they compare?)" if len(found) > 1 else "")
    loaded = [line.get("loaded") for line in done.values()]
    met = f"{loaded.count(True)} of {len(loaded)} runs met a loaded machine, of {loaded.count(None)} it is not known"
    yield f"{met}: their losses count, their seconds do not"


def losses(done: Mapping[Run, Fields]) -> list[Row]:
    """Returns rows of each arm by shape and budget, once at its rule's rate, once at the best of its three rates."""
    rows, points = [], sorted({(run.shape, run.tokens) for run in done})
    by_rule = dict.fromkeys(arms_lib.ARMS, 1.0)
    best = {arm: arms_lib.chosen(arm, done) for arm in arms_lib.ARMS}
    for shape, tokens in points:
        for arm in arms_lib.ARMS:
            for factors in (by_rule, best):
                line = _loss_row(done, arm, shape, tokens, factors)
                if line and line not in rows:
                    rows.append(line)
    return rows


def _loss_row(
    done: Mapping[Run, Fields], arm: str, shape: str, tokens: int, factors: Mapping[str, float]
) -> Row | None:
    factor = factors[arm]
    ours = arms_lib.curve(arm, shape, factor, done).get(tokens, {})
    if not ours:
        return None
    bits = [line["bits_per_byte"] for run, line in done.items() if _of(run, arm, shape, tokens, factor)]
    bits = [value for value in bits if value is not None]
    row = {"shape": shape, "tokens": f"{tokens / 1e6:g}M", "arm": arm, "rate": f"x{factor:g}", "seeds": str(len(ours))}
    row["loss"] = f"{statistics.fmean(ours.values()):.4f}"
    row["bits/byte"] = f"{statistics.fmean(bits):.4f}" if bits else NONE
    for against, base in (("- its base", arms_lib.ARMS[arm].base), ("- reference", "reference")):
        theirs = arms_lib.curve(base, shape, factors[base], done).get(tokens, {})
        gap = stats.difference(ours, theirs) if base != arm else None
        row[against] = f"{gap.value:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]" if gap else NONE
        if gap:
            row[against] += f" {base}" * (against == "- its base") + f" x{factors[base]:g}"
    return row


def _of(run: Run, arm: str, shape: str, tokens: int, factor: float) -> bool:
    return (run.arm, run.shape, run.tokens, run.factor) == (arm, shape, tokens, factor)


def savings(done: Mapping[Run, Fields], times: Sequence[Fields], factors: Mapping[str, float]) -> list[Row]:
    """Returns rows of the tokens, seconds and dollars that an arm takes to a loss, as ratios to its base's.

    Args:
      factors: arm -> the factor of its rate; 1 for the others.
    """
    rows = []
    for shape in arms_lib.SHAPES:
        curves = {arm: arms_lib.curve(arm, shape, factors.get(arm, 1.0), done) for arm in arms_lib.ARMS}
        for arm in arms_lib.ARMS:
            before = arms_lib.MAIN[: arms_lib.MAIN.index(arm)] if arm in arms_lib.MAIN else ()
            for base in dict.fromkeys((arms_lib.ARMS[arm].base, *before)):
                if arm != base and curves[arm] and curves[base]:
                    rows += _saved(arm, base, shape, curves[arm], curves[base], times)
    return rows


def _saved(
    arm: str, base: str, shape: str, ours: stats.Curve, theirs: stats.Curve, times: Sequence[Fields]
) -> list[Row]:
    """Returns one pair's rows: to the base's loss at each of its budgets, or if the arm has only one, to the arm's loss."""
    if len(theirs) < 2 and len(ours) < 2:
        return []  # two points are no curve; the table of losses has them
    of_base = len(ours) > 1
    rows = []
    for tokens in sorted(theirs if of_base else ours):
        found = stats.ratio(ours, theirs, tokens, of_base)
        if not found:
            continue
        row = {"arm": arm, "base": base, "shape": shape, "loss of": f"{base if of_base else arm} at {tokens / 1e6:g}M"}
        row |= {"loss": f"{found.target:.4f}", "seeds": str(found.seeds), "tokens": found.shown()}
        for what, line in (
            ("seconds (mixed)", small_time(times, shape)),
            ("dollars (mixed)", large_time(times) or small_time(times, shape)),
        ):
            step = step_ratio(line, arm, base)
            row[what] = found.shown(step) if step else NONE
        rows.append(row)
    return rows


def small_time(times: Sequence[Fields], shape: str) -> Fields | None:
    """Returns the newest step times of a shape that were measured without other load."""
    return next((line for line in reversed(times) if line.get("shape") == shape and not line.get("loaded")), None)


def large_time(times: Sequence[Fields]) -> Fields | None:
    """Returns the newest step times of a shipped model, for dollars, as `small_time`; None if there are none."""
    shipped = (line for line in reversed(times) if line.get("shape") not in (None, *arms_lib.SHAPES))
    return next((line for line in shipped if not line.get("loaded")), None)


def step_ratio(line: Fields | None, arm: str, base: str) -> float:
    """Returns the median ratio of an arm's seconds per step to its base's; exactly 1 for the same arm; 0 if not measured."""
    taken = line["times"] if line else {}
    if arm not in taken or base not in taken:
        return 0.0
    return statistics.median(ours / theirs for ours, theirs in zip(taken[arm], taken[base], strict=True))


def rates(done: Mapping[Run, Fields]) -> list[Row]:
    """Returns rows of each arm's three rates at the first budget: the losses, the best rate, how much worse the rule's is.

    The best rate is marked as an edge if it is the lowest or the highest tried: a rate beyond it may be better still.
    """
    rows, shape = [], next(iter(arms_lib.SHAPES))
    for arm in arms_lib.ARMS:
        found = dict(sorted((factor, losses) for factor, losses in arms_lib.sweep(arm, done).items() if losses))
        if len(found) < 2 or 1.0 not in found:
            continue
        row = {"arm": arm}
        for factor in arms_lib.FACTORS:
            lr = [line["lr"] for run, line in done.items() if _of(run, arm, shape, arms_lib.BUDGETS[0], factor)]
            there = lr and factor in found
            row[f"x{factor:g}"] = f"{statistics.fmean(found[factor].values()):.4f} ({lr[0]:.3g})" if there else NONE
        best = min(found, key=lambda factor: statistics.fmean(found[factor].values()))
        gap = stats.difference(found[1.0], found[best])
        row |= {
            "best": f"x{best:g}" + ", an edge" * (arms_lib.swept(arm, done) and best in (min(found), max(found))),
            "x1 loses": f"{gap.value:.4f} nats [{gap.low:.4f}, {gap.high:.4f}]" if gap else NONE,
        }
        own = arms_lib.curve(arm, shape, 1.0, done)
        tuned = (
            stats.ratio({arms_lib.BUDGETS[0]: found[best]}, own, arms_lib.BUDGETS[0], of_base=False)
            if len(own) > 1
            else None
        )
        row["in tokens"] = (
            f"{tuned.base_tokens / arms_lib.BUDGETS[0] - 1:+.0%}"
            if tuned and 0 < tuned.base_tokens < float("inf")
            else NONE
        )
        rows.append(row)
    return rows


def peer_rows(peers: Mapping[Run, Fields], done: Mapping[Run, Fields]) -> list[Row]:
    """Returns rows of the peers and of our main arms, at the shapes and budgets of the peers' runs."""
    rows = []
    for shape, tokens in sorted({(run.shape, run.tokens) for run in peers}):
        for name in (*dict.fromkeys(run.arm for run in peers), *arms_lib.MAIN):
            lines = [line for run, line in (peers | done).items() if _of(run, name, shape, tokens, 1.0)]
            bits = [line["bits_per_byte"] for line in lines if line["loss"] is not None]
            if bits:
                row = {"who": name, "shape": shape, "tokens": f"{tokens / 1e6:g}M", "seeds": str(len(bits))}
                row |= {
                    "bits/byte": f"{statistics.fmean(bits):.4f}",
                    "from": f"{min(bits):.4f}",
                    "to": f"{max(bits):.4f}",
                }
                rows.append(row)
    return rows


def notes(done: Mapping[Run, Fields], times: Sequence[Fields], usd_per_hour: float) -> Iterator[str]:
    """Yields notes on the tables: which arms were stopped, where step times are from, what the intervals mean."""
    for arm, why in arms_lib.stopped(arms_lib.ARMS, done).items():
        yield f"{arm} is stopped: {why}"
    yield f"[a, b]: paired bootstrap over the seeds, {stats.LEVEL:.0%}; with three seeds that is the range of the seeds."
    yield "Tokens between finished budgets are interpolated in log tokens; beyond them nothing is said."
    small = [line for shape in arms_lib.SHAPES if (line := small_time(times, shape))]
    last = {line["shape"]: line.get("loaded") for line in times if line.get("shape")}
    if again := [shape for shape, loaded in last.items() if loaded]:
        yield f"step times that met a loaded machine are left out: measure those of {', '.join(again)} again"
    for line in (*small, large_time(times)):
        if line:
            taken = ", ".join(f"{arm} {statistics.median(s) * 1e3:.4g}" for arm, s in line["times"].items())
            load = "load unknown" if line.get("loaded") is None else "idle"
            yield f"step times, {line['shape']}: ms {taken} ({line['machine']}, {load}, {line['commit']})"
    if priced := large_time(times) or (small[-1] if small else None):
        of = priced["shape"]
        yield "mixed: tokens measured here x step times measured apart. Dollars are at one price of an hour, and their step"
        yield f"times are those of {of}; seconds have the shape's own."
    for arm in arms_lib.MAIN if usd_per_hour else ():
        hours = sum(line["seconds"] for run, line in done.items() if run.arm == arm) / 3600
        yield f"{arm}: its runs took {hours:.2f} hours, ${hours * usd_per_hour:.2f}"
