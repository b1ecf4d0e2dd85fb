"""Says whether two runs measure the same held-out text: else their losses and bits per byte can't be compared."""

import math
import pathlib
from collections.abc import Mapping

from jaxlm.config import Config, ConfigError, RunError, config_files, resolve
from jaxlm.data.shards import manifest, shards
from jaxlm.run import ledger

Texts = dict[str, str]  # source -> sha256 of its held-out text, and how much of the text is measured, if not all


def known(data: object) -> bool:
    """True for a data directory whose manifest has the hashes of its held-out texts."""
    return isinstance(data, shards.DataDir) and manifest.HELD_OUT in data.manifest


def of_data(data: shards.DataDir, config: Config) -> Texts:
    """Returns the texts that a config measures: source -> the text's hash, and how much of it is measured, if not all."""
    texts, e = {}, config.eval
    for source, sha256 in data.held_out_texts().items():
        entry, limit = data.entry(source, "val"), ""
        if e.older_batches and 0 < (rows := math.prod(e.older_batches)) * config.train.seq_len < entry["tokens"]:
            limit = f" {rows} rows of {config.train.seq_len}"
        elif not e.older_batches and 0 < e.max_mb * 1e6 < entry["bytes"]:
            limit = f" {e.max_mb:g} MB"
        if sha256:
            texts[source] = sha256 + limit
    return texts


def of_run(folder: pathlib.Path) -> Texts:
    """Returns the texts that a run measures; {} if unknown: it has no such data, or the data changed or is gone."""
    start = (ledger.read(folder)["starts"] or [{}])[-1]
    if start.get("held_out"):
        return start["held_out"]
    try:
        config = resolve(config_files.from_run(folder / "config.json"))
        data = shards.open_data(config.data.dir)
    except (OSError, ConfigError, RunError):
        return {}
    return of_data(data, config) if data.sha256 == start.get("manifest_sha256") else {}


def differ(a: Mapping[str, str], b: Mapping[str, str], runs: str) -> str:
    """Returns a line, with a remedy that ends with `runs`, if two runs' texts differ; "" if not, or if texts are unknown."""
    names = sorted(source for source in a.keys() | b.keys() if a.get(source) != b.get(source))
    if not (a and b and names):
        return ""
    return (
        f"held-out texts differ ({', '.join(names)}): their losses and bits per byte can't be compared; to "
        f"measure runs on one text: jaxlm eval RUN --text=FOLDER{runs}"
    )


def since_training(folder: pathlib.Path, data: shards.DataDir, config: Config) -> str:
    """Returns a line if the held-out texts of `data` differ from the texts that the run in `folder` measured; else ""."""
    line = differ(of_run(folder), of_data(data, config), "")
    return line and f"not the text that training measured: {line}"
