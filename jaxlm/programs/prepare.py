"""`jaxlm prepare`: turns sources into clean, deduplicated, decontaminated, audited documents, and reports on them."""

import argparse

from jaxlm.config import Config, ConfigError
from jaxlm.console import print_table, say
from jaxlm.corpus import contrast, prepare
from jaxlm.corpus.tally import stage_order
from jaxlm.programs import data_report


def run(config: Config, args: argparse.Namespace) -> int:
    """Makes DATA/documents and DATA/report.html, and prints how much of each source was kept and removed."""
    if not config.data.dir:
        raise ConfigError("no folder for the documents: give --config.data.dir=DIR")
    if config.prepare.target:
        # Refuses a path that is not there before all the work.
        contrast.target_texts(config.prepare.target, 1 << 20, config.prepare.stages["html"])
    done = prepare.prepare(config.prepare, config.data, config.engine, say)
    rows = []
    for name, source in done.manifest["sources"].items():
        read, kept = source["read"], source["kept"]
        row = {"source": name, "read": read["documents"], "failed": sum(read["failed"].values())}
        row |= {stage["name"]: sum(stage["removed"].values()) for stage in source["stages"]}
        rows.append(row | {"kept": kept["documents"], "read_mb": read["bytes"] / 1e6, "kept_mb": kept["bytes"] / 1e6})
    order = stage_order([[stage["name"] for stage in source["stages"]] for source in done.manifest["sources"].values()])
    columns = ["source", "read", "failed", *order, "kept", "read_mb", "kept_mb"]
    print_table(rows if args.json else [{key: row.get(key, "") for key in columns} for row in rows], args.json)
    for row in rows:
        if not row["kept"]:
            most = max(("failed", *order), key=lambda stage: row.get(stage, 0))
            say(
                f"nothing of {row['source']} is left: {most} took {row[most]:,} of {row['read']:,}; removed/ has examples"
            )
    page = data_report.write(config, done)
    say(f"prepared, sha256 {done.sha256}; report: {page}")
    return 0
