"""`jaxlm prepare`: turns sources into clean, deduplicated, decontaminated, audited documents, and reports on them."""

import argparse
import dataclasses

from jaxlm.commands import data_report, folder
from jaxlm.config import Config, ConfigError
from jaxlm.corpus import documents, prepare, removals
from jaxlm.corpus.audit import audit
from jaxlm.corpus.tally import stage_order
from jaxlm.host.console import megabytes, print_table, say


def run(config: Config, args: argparse.Namespace) -> int:
    """Writes DATA/documents and DATA/report.html, and prints how much of each source was kept and removed."""
    if not config.data.dir:
        raise ConfigError("no folder for the documents: give --config.data.dir=DIR")
    for line in args.told:
        say(line)
    if config.prepare.target:
        # Refuses a missing path before all the work.
        audit.target_texts(config.prepare.target, 1 << 20, config.prepare.stages["html"])
    done = prepare.prepare(config.prepare, config.data, config.engine, say)
    weights = _weights(config, done, bool(args.preset))
    documents.write_mixture(done.path, weights)
    listed = {name: dataclasses.replace(s, weight=weights[name]) for name, s in config.prepare.sources.items()}
    config = dataclasses.replace(config, prepare=dataclasses.replace(config.prepare, sources=listed))
    _print_counts(done, args.json)
    _say_taken(config, done, args.preset)
    page = data_report.write(config, done)
    kept = sum(source["kept"]["bytes"] for source in done.manifest["sources"].values())
    say(f"prepared, sha256 {done.sha256[:12]}; open {page}")
    say(f"done: {megabytes(kept)} of text in {done.path / 'documents'}; what was removed is in {done.path / 'removed'}")
    if kept:
        say(f"next: {folder.command(args, str(done.path), kept)}")
    return 0


def _say_taken(config: Config, done: prepare.Prepared, preset: str | None) -> None:
    """Names the stages that removed much, and the settings that would keep it."""
    much = removals.much(
        done.manifest, done.path, {name: source.stages for name, source in config.prepare.sources.items()}
    )
    for line in (line for took in much for line in took.lines()):
        say(line)
    if any(took.keep for took in much):
        more = "; --preset=docs leaves manuals, tables and code alone" if preset == "web" else ""
        say(f"  (with another data directory, or after deleting {done.path / prepare.MANIFEST}{more})")


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
