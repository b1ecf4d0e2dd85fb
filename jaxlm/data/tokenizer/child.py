"""Trains a SentencePiece model, in a process of its own (`jaxlm.host.child`).

SentencePiece ignores signals while it trains, and can't tell an interrupted iterator from a bad one. A process can be ended.
This file imports nothing of jaxlm, so that it starts at once.
"""

import base64
import io
from collections.abc import Callable, Iterator

import sentencepiece


def train(messages: Iterator, tell: Callable[[dict], None]) -> None:
    """Receives settings, lists of texts, then None. Sends the `model` in base64, or SentencePiece's `error`."""
    settings, model = next(messages), io.BytesIO()
    texts = (text for texts in iter(lambda: next(messages), None) for text in texts)
    try:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=texts, model_writer=model, **settings)
    except (RuntimeError, StopIteration) as error:
        for _ in texts:  # the parent listens once it has sent all
            pass
        tell({"error": str(error)})
    else:
        tell({"model": base64.b64encode(model.getvalue()).decode()})
