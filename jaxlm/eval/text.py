"""Bits per byte of any text, document by document: `jaxlm eval RUN --text=FOLDER`. Two runs are compared on one text so."""

import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxlm.config import ConfigError
from jaxlm.corpus.sources.units import iterate_documents
from jaxlm.data.shards import manifest
from jaxlm.data.tokenizer import ids
from jaxlm.eval.likelihood import Scorer
from jaxlm.eval.results import Item, TaskResult
from jaxlm.report.benchmarks import BITS

Documents = Sequence[tuple[str, str]]  # (id, text)


def read(path: str, text_key: str) -> Documents:
    """Returns the documents of a file, folder or glob (.txt, .md, .jsonl, .parquet) that are not empty, at least one."""
    documents = [(name, text) for name, text in iterate_documents(path, text_key=text_key) if text]
    if not documents:
        raise ConfigError(f"--text={path}: all its documents are empty")
    return documents


def task(documents: Documents) -> str:
    """Returns the name under which results are kept: it follows from the texts, so that equal names are of equal texts."""
    digest = hashlib.sha256()
    for _, text in documents:
        manifest.add_text(digest, text.encode())
    return f"text-{digest.hexdigest()[:12]}"


def results(scorer: Scorer, documents: Documents, seq_len: int) -> Iterator[TaskResult]:
    """Yields the bits per byte of each document, and of all: bits over bytes of the raw UTF-8. Nothing without documents.

    A document stands behind what opens one in training (EOS), in windows of `seq_len` tokens without overlap, as rows are cut.
    """
    if not documents:
        return
    requests, owners, length = [], [], min(seq_len, scorer.context)
    for number, (_, text) in enumerate(documents):
        row = ids.document(scorer.tokenizer, text)
        for first in range(0, len(row) - 1, length):
            context = first + (1 if first else len(scorer.tokenizer.opening))
            requests.append((row[first:context] or [scorer.opening], row[context : first + length + 1]))
            owners.append(number)
    logp = [score.logp for score in scorer.score(requests, "text")]
    bits = np.bincount(owners, logp, len(documents)) / -math.log(2)
    sizes = np.asarray([len(text.encode()) for _, text in documents])
    parts = zip(documents, (bits / sizes).tolist(), sizes.tolist(), strict=True)
    items = [Item(str(n), {BITS: x}, {"document": name, "bytes": size}) for n, ((name, _), x, size) in enumerate(parts)]
    yield TaskResult(task(documents), {BITS: float(bits.sum() / sizes.sum())}, {}, None, None, items)
