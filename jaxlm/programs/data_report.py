"""What `prepare` and `tokenize` know of a corpus, put together in DATA/report.html."""

import json
import pathlib
import typing
from collections.abc import Iterator

from jaxlm.config import Config
from jaxlm.corpus import audit, documents, prepare, sources
from jaxlm.programs import console
from jaxlm.report import data as report

FINDINGS = "findings.json"
PAGE = "report.html"
FIT = "tokenizer_fit.json"
_JUNK_ROWS = 200


def inspect(config: Config, done: prepare.Prepared) -> dict[str, typing.Any]:
    """Audit and mismatch on `prepare.report_mb` of each source, from DATA/findings.json when they are there."""
    if not config.prepare.report_mb:
        return {}
    path = done.path / FINDINGS
    about = {"prepared": done.sha256, "target": config.prepare.target, "report_mb": config.prepare.report_mb}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if {key: known[key] for key in about} == about:
            return known
    except (OSError, ValueError, KeyError, TypeError):
        pass
    kept = {name: files for name, files in documents.find(done.path).items() if _kept(done, name)}
    limit = int(config.prepare.report_mb * 1e6)
    console.say("audit and mismatch report")
    junk = audit.audit({name: sample(files, limit) for name, files in kept.items()})
    target = None
    if config.prepare.target:
        target = (text for _, text in sources.iterate_documents(config.prepare.target, max_bytes=limit))
    compared = None
    if len(kept) > 1 or target:
        from jaxlm.corpus import mismatch  # scikit-learn is slow to import

        texts = {name: (text for _, text in sample(files, limit)) for name, files in kept.items()}
        weights = {name: source.weight for name, source in config.prepare.sources.items() if name in kept}
        compared = mismatch.compare(texts, target, weights=weights or None).to_dict()
    found = about | {"junk": [finding.to_row() for finding in junk[:_JUNK_ROWS]], "mismatch": compared}
    path.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return found


def write(config: Config, done: prepare.Prepared) -> pathlib.Path:
    """Writes DATA/report.html anew from all that is in DATA; returns its path."""
    root, summary = done.path, {"sources": done.manifest["sources"]}
    summary["examples"] = prepare.examples(root, config.prepare.examples)
    for name, file in (("clusters", "clusters.json"), ("tokenizer_fit", FIT)):
        if (root / file).is_file():
            summary[name] = json.loads((root / file).read_text(encoding="utf-8"))
    if "tokenizer_fit" in summary:
        summary["tokenizer_fit"] = summary["tokenizer_fit"]["sources"]
    summary |= inspect(config, done)
    summary["manifest"] = {"sha256": done.sha256, "config": done.manifest["recipe"]}
    report.write(root / PAGE, summary)
    return root / PAGE


def sample(files: list[pathlib.Path], limit: int) -> Iterator[tuple[str, str]]:
    """(id, text) of documents from every file alike, at most about `limit` bytes in all."""
    for path in files:
        left = limit // len(files)
        for document in documents.read_documents(path):
            yield document.id, document.text
            left -= len(document.text)
            if left <= 0:
                break


def _kept(done: prepare.Prepared, name: str) -> int:
    return done.manifest["sources"].get(name, {"kept": {"documents": 0}})["kept"]["documents"]
