"""Bits per byte of any text, by document: `jaxlm eval RUN --text=FOLDER`. On the same text, two runs can be compared."""

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
    """Returns the non-empty documents of a file, folder or glob (.txt, .jsonl, .parquet). Raises ConfigError if none."""
    documents = [(name, text) for name, text in iterate_documents(path, text_key=text_key) if text]
    if not documents:
        raise ConfigError(f"--text={path}: all its documents are empty")
    return documents


def task(documents: Documents) -> str:
    """Returns the task name of results on these texts. It has a hash of the texts, so that equal names mean equal texts."""
    digest = hashlib.sha256()
    for _, text in documents:
        manifest.add_text(digest, text.encode())
    return f"text-{digest.hexdigest()[:12]}"


def results(scorer: Scorer, documents: Documents, seq_len: int) -> Iterator[TaskResult]:
    """Yields one result: the bits per raw UTF-8 byte of all documents and, as items, of each. Yields none without documents.

    As in training, a document begins with the opening token (EOS), and is cut into windows of `seq_len` tokens, no overlap.
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
