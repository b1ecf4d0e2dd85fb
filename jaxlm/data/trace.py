"""From a step of training back to its documents."""

import dataclasses

import numpy as np

from jaxlm.data import rows


@dataclasses.dataclass(frozen=True)
class TracedDocument:
    """A document's part in a row: `first_token` and `tokens` count within the document (EOS included)."""

    doc_id: str
    first_token: int
    tokens: int
    text: str


@dataclasses.dataclass(frozen=True)
class TracedRow:
    """Slot `slot` of a batch: row `row` (tokens [row*T, (row+1)*T]) of `source` in its pass number `epoch`."""

    slot: int
    source: str
    epoch: int
    row: int
    documents: tuple[TracedDocument, ...]


def describe_batch(order: rows.Order, step: int, snippet_chars: int = 200) -> list[TracedRow]:
    """The rows of the batch of `step` with the documents they come from, as the loader yields them.

    `snippet_chars` caps the text shown of each document. Uses no model and no state.
    """
    plan, data, seq_len = order.plan(), order.data, order.seq_len
    located = zip(*(array.tolist() for array in plan.locate(step, np.arange(order.batch_size))), strict=True)
    coder = data.tokenizer()
    streams = {name: data.stream(name) for name in plan.names}
    traced = []
    for slot, (source, epoch, row) in enumerate(located):
        name, start = plan.names[source], row * seq_len
        stop = start + seq_len + 1
        documents = []
        for document in data.documents(name, "train", start, stop):
            first, end = max(start, document.start), min(stop, document.start + document.tokens)
            # Four tokens a character is beyond any text (a character is at most four byte tokens).
            text = coder.decode(streams[name].read(first, min(end, first + 4 * snippet_chars)))
            documents.append(TracedDocument(document.doc_id, first - document.start, end - first, text[:snippet_chars]))
        traced.append(TracedRow(slot, name, epoch, row, tuple(documents)))
    return traced
