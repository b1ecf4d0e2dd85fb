"""Writes DATA/report.html, a page with all results of `prepare` and `tokenize` on a corpus."""

import json
import pathlib
from collections.abc import Callable, Iterator

from jaxlm.config import Config, PrepareConfig
from jaxlm.corpus import documents, engine, prepare
from jaxlm.corpus.audit import audit, counts
from jaxlm.data.shards import shards
from jaxlm.host import console, files
from jaxlm.report import data_page, markup

FINDINGS = "findings.json"
FIT = "tokenizer_fit.json"
_JUNK_ROWS = 200
_SAMPLED_FILES = 256  # at most, of each source


def inspect(config: Config, done: prepare.Prepared) -> dict:
    """Returns audit and mismatch report of `prepare.report_mb` megabytes of each source; cached in DATA/findings.json."""
    if not config.prepare.report_mb:
        return {}
    about = {"prepared": done.sha256, "target": config.prepare.target, "report_mb": config.prepare.report_mb}
    about["weights"] = {name: source.weight for name, source in config.prepare.sources.items()}
    about["audit"] = 2  # findings of older versions call words of a domain junk
    about["html"] = config.prepare.stages["html"]
    return remembered(done.path / FINDINGS, about, lambda: _inspect(config, done))


def remembered(path: pathlib.Path, about: dict, make: Callable[[], dict]) -> dict:
    """Returns `about` merged with what `make` returns, cached in a JSON file as long as `about` is the same."""
    known = files.json_there(path)
    if about.items() <= known.items():
        return known
    made = about | make()
    try:
        files.write_atomically(path, (json.dumps(made, ensure_ascii=False, indent=1) + "\n").encode())
    except OSError as error:  # finished data may be on a read-only disk
        console.say(f"{path} can't be written: {error.strerror}")
    return made


def processes_here(config: Config) -> int:
    """Returns how many worker processes this machine gets; on a cluster few, since `prepare.workers` counts its tasks."""
    return (config.prepare.workers or files.cores()) if config.engine == "local" else files.threads()


def _inspect(config: Config, done: prepare.Prepared) -> dict:
    filled = {name for name, source in done.manifest["sources"].items() if source["kept"]["documents"]}
    paths = {name: of_source for name, of_source in documents.find(done.path).items() if name in filled}
    limit = int(config.prepare.report_mb * 1e6)
    with console.working("audit and mismatch report"), engine.worker_processes(processes_here(config)) as pool:
        compared = pool.submit(_mismatch, paths, config.prepare)
        scans = [[pool.submit(_counts, *source, limit, half) for half in counts.HALVES] for source in paths.items()]
        sources = [counts.joined(*(scan.result() for scan in halves)) for halves in scans]
        like = [source.bytes for source in sources], config.prepare.target, config.prepare.stages["html"]
        halves = [pool.submit(audit.contrast_of, *like, (half,)) for half in counts.HALVES]
        words, lines = (half.result() for half in halves)
        contrast = words and counts.joined(words, lines)
        junk = [finding.to_row() for finding in audit.rank(sources, contrast)[:_JUNK_ROWS]]
        return {"junk": junk, "mismatch": compared.result()}


def _counts(source: str, paths: list[pathlib.Path], limit: int, half: str) -> counts.Counts:
    return counts.scan(source, sample(paths, limit), halves=(half,))


def _mismatch(paths: dict[str, list[pathlib.Path]], settings: PrepareConfig) -> dict | None:
    if len(paths) < 2 and not settings.target:
        return None
    from jaxlm.corpus.audit import mismatch  # scikit-learn is slow to import

    limit = int(settings.report_mb * 1e6)
    texts = {name: (text for _, text in sample(of_source, limit)) for name, of_source in paths.items()}
    target = audit.target_texts(settings.target, limit, settings.stages["html"]) if settings.target else None
    like = (text for _, text in target) if target else None
    weights = {name: source.weight for name, source in settings.sources.items() if name in paths}
    return mismatch.compare(texts, like, weights=weights if sum(weights.values()) else None)


def write(config: Config, done: prepare.Prepared, inspected: dict) -> pathlib.Path:
    """Writes DATA/report.html from `inspected` and the present files in DATA, and returns the path of the report."""
    root, summary = done.path, {"sources": done.manifest["sources"]}
    if config.workdir and (pathlib.Path(config.workdir) / markup.NAME).is_file():
        summary["run"] = config.workdir
    summary["examples"] = prepare.examples(root)
    summary["clusters"] = files.json_there(root / "clusters.json") or None
    if (files.json_there(root / shards.MANIFEST).get("recipe") or {}).get("prepared") == done.sha256:
        summary["tokenizer_fit"] = files.json_there(root / FIT).get("sources")
    summary |= inspected
    summary["manifest"] = {"sha256": done.sha256, "config": done.manifest["recipe"]}
    data_page.write(root / markup.NAME, summary)
    return root / markup.NAME


def sample(paths: list[pathlib.Path], limit: int) -> Iterator[tuple[str, str]]:
    """Yields (id, text) of about `limit` bytes of documents, from files spread over the whole list."""
    chosen = paths[:: -(-len(paths) // _SAMPLED_FILES)] if paths else []
    for path in chosen:
        yield from documents.within(documents.read_texts([path]), max(1, limit // len(chosen)))
