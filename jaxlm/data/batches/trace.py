"""Traces the batch of a step back to its documents."""

import dataclasses

import numpy as np

from jaxlm.data.batches.rows import Rows


@dataclasses.dataclass(frozen=True)
class TracedDocument:
    """The part of a document that a row holds.

    Attributes:
      doc_id: the id of the document.
      first_token: the first token of the part, counted from the document's separator, which is token 0 (from its text, in
        data of recipe version 2).
      tokens: how many tokens the part has.
      text: the beginning of the part.
    """

    doc_id: str
    first_token: int
    tokens: int
    text: str


@dataclasses.dataclass(frozen=True)
class TracedRow:
    """A row of a batch.

    Attributes:
      slot: the row's place in the batch.
      source: the name of the source that the row is from.
      epoch: how many times all rows of the source were read before.
      row: the row's index i in the source; it holds tokens i*T to (i+1)*T, both included.
      documents: the parts of documents that the row holds, in order.
    """

    slot: int
    source: str
    epoch: int
    row: int
    documents: tuple[TracedDocument, ...]


def documents(order: Rows, step: int) -> list[str]:
    """Returns the ids of the documents in the batch of `step`, counted from 1."""
    traced = describe_batch(order, step - 1, snippet_chars=0)
    return [document.doc_id for row in traced for document in row.documents]


def describe_batch(order: Rows, item: int, snippet_chars: int = 200) -> list[TracedRow]:
    """Returns the rows of the batch of step `item` + 1, in the loader's order, with the documents that they hold.

    Needs no model and no state: a batch follows from the order and the item.

    Args:
      order: the order of the run's rows.
      snippet_chars: the most characters of each document's text to return.
    """
    data, seq_len, coder = order.data, order.seq_len, order.data.tokenizer()
    located = order.plan.locate(order.batch_number(item + 1) - 1, np.arange(order.batch_size))
    traced = []
    for slot, (source, epoch, row) in enumerate(zip(*(array.tolist() for array in located), strict=True)):
        name, start = order.plan.names[source], row * seq_len
        stop = start + seq_len + 1
        documents = []
        for document in data.documents(name, "train", start, stop):
            first, end = max(start, document.start), min(stop, document.start + document.tokens)
            # No character takes more than four tokens, one for each of its bytes.
            text = coder.decode(order.streams[source].read(first, min(end, first + 4 * snippet_chars)))
            documents.append(TracedDocument(document.doc_id, first - document.start, end - first, text[:snippet_chars]))
        traced.append(TracedRow(slot, name, epoch, row, tuple(documents)))
    return traced
