"""Traces the batch of a step back to its documents."""

import dataclasses

import numpy as np

from jaxlm.data import rows


@dataclasses.dataclass(frozen=True)
class TracedDocument:
    """The part of a document that a row holds.

    Attributes:
      doc_id: of the document.
      first_token: the first token of the part, counted from the document's EOS, which is token 0.
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
      slot: its place in the batch.
      source: whose row it is.
      epoch: how often the source was read to its end before.
      row: its index i in the source: tokens [i*T, (i+1)*T].
      documents: whose parts it holds, in order.
    """

    slot: int
    source: str
    epoch: int
    row: int
    documents: tuple[TracedDocument, ...]


def describe_batch(order: rows.Order, step: int, snippet_chars: int = 200) -> list[TracedRow]:
    """Returns the rows of the batch of `step`, in the loader's order, with the documents that they hold.

    Needs no model and no state: a batch follows from the order and the step.

    Args:
      order: of the run.
      snippet_chars: how many characters of each document's text to return at most.
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
            # No character takes more than four tokens, one for each of its bytes.
            text = coder.decode(streams[name].read(first, min(end, first + 4 * snippet_chars)))
            documents.append(TracedDocument(document.doc_id, first - document.start, end - first, text[:snippet_chars]))
        traced.append(TracedRow(slot, name, epoch, row, tuple(documents)))
    return traced
