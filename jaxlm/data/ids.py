"""The one way from a text to the ids that a model reads: what its documents begin with, then the text.

Attention never crosses documents, and each document of the training data begins with EOS. A text without it is one that
the model has never seen the like of. So every program that feeds text to a model gets its ids here.
"""

import numpy as np

from jaxlm.data.coder import Coder


def document(tokenizer: Coder, text: str) -> list[int]:
    """Returns the ids of a document that begins with this text: `tokenizer.opening` once, then the text."""
    return [*tokenizer.opening, *tokenizer.encode(text)]


def documents(tokenizer: Coder, texts: list[str], num_threads: int) -> list[np.ndarray]:
    """Returns the ids of each document as `document` does, int32[n] each, encoded in `num_threads` threads."""
    opening = np.asarray(tokenizer.opening, np.int32)
    return [np.concatenate([opening, ids]) for ids in tokenizer.encode_batch(texts, num_threads)]
