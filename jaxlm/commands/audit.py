"""`jaxlm audit`: lists junk in prepared documents, in existing shards or in the sources themselves, worst first."""

import argparse
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterator

from jaxlm.config import Config, ConfigError, nearest
from jaxlm.corpus import documents
from jaxlm.corpus.audit import audit
from jaxlm.corpus.sources.base import SourceSpec, SourceStats
from jaxlm.corpus.sources.units import read_unit, split_source
from jaxlm.data.shards import search, shards
from jaxlm.host.console import count, print_table, say, size, working
from jaxlm.report import findings

Documents = Iterator[tuple[str, str]]
_UNIT_BYTES = 8 << 20


def run(config: Config, args: argparse.Namespace) -> int:
    """Prints the junk in DATA/documents; without documents, in DATA's shards; without shards, in the sources.

    Each source is compared with the others, so all are read; --source shows the findings of one source.
    """
    for option in ("top", "max_bytes"):
        if getattr(args, option) < 0:
            raise ConfigError(f"--{option.replace('_', '-')}={getattr(args, option)}: it must not be negative")
    what, readers = _find(config, args.max_bytes)
    if args.source and args.source not in readers:
        raise ConfigError(f"--source={args.source}: no such source; {nearest(args.source, readers)}")
    began, counts = time.monotonic(), []
    for name, read in readers.items():
        counts.append(audit.scan(name, documents.within(read(), args.max_bytes)))
        say(f"{name}: {count(counts[-1].documents)} documents, {size(counts[-1].bytes)} of {what}")
    with working("reading text to compare with"):
        like = audit.contrast_of([each.bytes for each in counts], config.prepare.target, config.prepare.stages["html"])
    ranked = [finding for finding in audit.rank(counts, like) if args.source in ("", finding.source)]
    shown = ranked[: args.top or None]
    lost = max(counted.lost for each in counts for counted in each.tables)
    say(
        f"{len(ranked)} findings" + (f", the worst {len(shown)} shown" if len(shown) < len(ranked) else "")
        + f"; {time.monotonic() - began:.1f} s; " + (f"counts may be up to {lost} too low" if lost else "counts are exact")
    )  # fmt: skip
    if args.json:
        print_table([finding.to_row() for finding in shown], as_json=True)
    else:
        settings = config.prepare.stages["junk"]
        findings.show(shown, settings["patterns"], settings["level"])
    return 0


def _find(config: Config, max_bytes: int) -> tuple[str, dict[str, Callable[[], Documents]]]:
    """Returns (the kind of text in words, source -> function that reads it); raw sources up to `max_bytes` (0: all)."""
    root = pathlib.Path(config.data.dir) if config.data.dir else None
    if root and (prepared := documents.find(root)):
        what = "prepared documents"
        readers = {name: functools.partial(documents.read_texts, files) for name, files in prepared.items()}
        if any(source.path for source in config.data.sources.values()):
            say(f"{root} holds prepared documents: these are audited; for the files of data.path give another data.dir")
    elif root and (root / shards.MANIFEST).is_file():
        data = shards.open_data(root)
        what, readers = "tokens", {name: functools.partial(_decoded, data, name) for name in data.sources}
    else:
        specs = _raw_specs(config, max_bytes)
        what, readers = "raw text", {spec.name: functools.partial(_raw, spec) for spec in specs}
    if not readers:
        raise ConfigError("nothing to audit: give --config.data.path=FILES, or the --config.data.dir of existing data")
    return what, readers


def _decoded(data: shards.DataDir, source: str) -> Documents:
    """Decodes both splits of a source."""
    tokenizer = data.tokenizer()
    for split in shards.SPLITS:
        for each, ids_N in search.each_document(data, source, split):
            yield each.doc_id, tokenizer.decode(ids_N[ids_N != data.separator_id])


def _raw_specs(config: Config, max_bytes: int) -> list[SourceSpec]:
    """Returns the sources of `data`, else of `prepare`, each limited to `max_bytes` in parts spread over it (0: no limit)."""
    d = config.data
    plain = {"format": "plain", "text_key": d.text_key, "max_bytes": d.max_bytes, "tfds_dir": d.tfds_dir}
    specs = [SourceSpec(name, s.path, **plain, hub_dir=d.hub_dir) for name, s in d.sources.items() if s.path]
    specs = specs or [SourceSpec.of(name, source, d) for name, source in config.prepare.sources.items()]
    return [
        dataclasses.replace(s, max_bytes=min(n for n in (s.max_bytes, max_bytes) if n)) if max_bytes else s
        for s in specs
    ]


def _raw(spec: SourceSpec) -> Documents:
    stats = SourceStats()
    for unit in split_source(spec, _UNIT_BYTES):
        for document in read_unit(unit, spec, stats):
            yield document.id, document.text
    if stats.skipped or stats.repaired or not stats.documents:
        say(f"{spec.name}: {stats.summary()}")
