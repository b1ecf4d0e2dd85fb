"""`jaxlm prepare`: turns sources into clean, deduplicated, decontaminated, audited documents, and reports on them."""

import argparse
import dataclasses

from jaxlm.commands import data_report, folder
from jaxlm.config import Config, ConfigError
from jaxlm.corpus import documents, engine, prepare, removals
from jaxlm.corpus.audit import audit
from jaxlm.corpus.tally import stage_order
from jaxlm.data.batches.document_rows import MOST_PASSES
from jaxlm.host import files
from jaxlm.host.console import print_table, say, size

_STRICT = 3  # the exit code of --strict
_TOKEN_BYTES = 4  # of text, about


def run(config: Config, args: argparse.Namespace) -> int:
    """Writes DATA/documents and DATA/report.html, and prints how much of each source was kept and removed."""
    if not config.data.dir:
        raise ConfigError("no folder for the documents: give --config.data.dir=DIR")
    for line in args.told:
        say(line)
    if config.prepare.target:
        # Refuses a missing path before all the work.
        audit.target_texts(config.prepare.target, 1 << 20, config.prepare.stages["html"])
    with engine.worker_processes(data_report.processes_here(config)):
        done = prepare.prepare(config.prepare, config.data, config.engine, say)
        weights = _weights(config, done, bool(args.preset))
        documents.write_mixture(done.path, weights)
        listed = {name: dataclasses.replace(s, weight=weights[name]) for name, s in config.prepare.sources.items()}
        config = dataclasses.replace(config, prepare=dataclasses.replace(config.prepare, sources=listed))
        _print_counts(done, args.json)
        hints = _say_taken(config, done)
        inspected = data_report.inspect(config, done)
    page = data_report.write(config, done, inspected)
    losses = removals.losses(done.manifest, inspected, config.prepare.stages["junk"]["patterns"])
    losses += [] if args.preset else _passes(config, done)  # a folder has no run of its own
    clusters = files.json_there(done.path / "clusters.json")
    drawn, pairs = clusters.get("drawn"), clusters.get("shared_windows")  # older versions wrote neither
    losses += removals.shared(pairs or [])
    for line in [*(removals.judged(drawn) if drawn else []), *losses]:
        say(line)
    if hints or any("--config.prepare.stages" in line for line in losses):
        another = "--out=ANOTHER" if args.preset else "another --config.data.dir"
        more = "; --preset=docs leaves manuals, tables and code alone" if args.preset == "web" and hints else ""
        say(f"  (such settings go with {another}, or after deleting {done.path / prepare.MANIFEST}{more})")
    kept_bytes = sum(source["kept"]["bytes"] for source in done.manifest["sources"].values())
    say(f"prepared, sha256 {done.sha256[:12]}; open {page}")
    if not kept_bytes:
        raise ConfigError(
            f"prepare kept no document of any source: {done.path / 'removed'} says which stages removed them"
        )
    say(
        f"done: {size(kept_bytes)} of text in {done.path / 'documents'}; what was removed is in {done.path / 'removed'}"
    )
    say(f"next: {folder.command(args, str(done.path), kept_bytes)}")
    if losses and args.strict:
        say(f"--strict: {len(losses)} {'lines' if len(losses) > 1 else 'line'} above on what was lost")
        return _STRICT
    return 0


def _say_taken(config: Config, done: prepare.Prepared) -> bool:
    """Names the stages that removed much, and the settings that would keep it. Returns True if it names a setting."""
    much = removals.much(
        done.manifest, done.path, {name: source.stages for name, source in config.prepare.sources.items()}
    )
    for line in (line for took in much for line in took.lines):
        say(line)
    return any(took.keep for took in much)


def _passes(config: Config, done: prepare.Prepared) -> list[str]:
    """Returns lines on the sources that the config's own run would read too often, at about 4 bytes a token."""
    tokens = {name: source["kept"]["bytes"] / _TOKEN_BYTES for name, source in done.manifest["sources"].items()}
    mixture = {name: source.weight for name, source in config.prepare.sources.items() if tokens[name]}
    trained = config.train.steps * config.train.batch_size * config.train.seq_len / (sum(mixture.values()) or 1)
    times = {name: trained * weight / tokens[name] for name, weight in mixture.items()}
    return [
        f"{name} would be read about {number:,.0f} times in the config's {config.train.steps:,} steps: beyond "
        f"{MOST_PASSES} times a token teaches less than a new one"
        for name, number in times.items()
        if number > MOST_PASSES
    ]


def _weights(config: Config, done: prepare.Prepared, by_size: bool) -> dict[str, float]:
    kept = {name: source["kept"]["bytes"] / 1e6 for name, source in done.manifest["sources"].items()}
    return {name: source.weight * (kept[name] if by_size else 1) for name, source in config.prepare.sources.items()}


def _print_counts(done: prepare.Prepared, as_json: bool) -> None:
    rows = []
    for name, source in done.manifest["sources"].items():
        read, kept = source["read"], source["kept"]
        row = {"source": name, "read": read["documents"], "failed": sum(read["failed"].values())}
        row |= {stage["name"]: sum(stage["removed"].values()) for stage in source["stages"]}
        rows.append(row | {"kept": kept["documents"], "read_mb": read["bytes"] / 1e6, "kept_mb": kept["bytes"] / 1e6})
    order = stage_order([[stage["name"] for stage in source["stages"]] for source in done.manifest["sources"].values()])
    if not as_json:
        order = [stage for stage in order if any(row.get(stage) for row in rows)]
        columns = ["source", "read", "failed", *order, "kept", "read_mb", "kept_mb"]
        rows = [{key: row.get(key, "") for key in columns} for row in rows]
    print_table(rows, as_json)
