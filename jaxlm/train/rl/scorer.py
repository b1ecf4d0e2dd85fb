"""Scores answers by a reward model: a run of `reward`, or a model from elsewhere whose head gives one number.

Legend: B rows, S segments of a row, N answers.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlm import models
from jaxlm.config import ConfigError
from jaxlm.data.batches import rows
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer.ids import conversation
from jaxlm.devices import sharding
from jaxlm.plan import settle
from jaxlm.step.objectives import reward
from jaxlm.step.step import cast
from jaxlm.train.origin import Origin

Messages = Sequence[Mapping[str, str]]
_ROWS = 8  # that are scored at one time


class Scorer:
    """Scores chats that end with an answer, by the score of the token that ends it.

    Args:
      found: the reward model, as `origin.open` returns it.
      mesh: where it lies.
      tokens: how long a chat may be; a longer one loses its oldest tokens.
      moment: what its chat template takes for now (`chat.dated`).

    Attributes:
      model: the model below the head.
      kernel: the head's, float32[D].

    Raises:
      ConfigError: the model has no such head, or no chat template.
    """

    def __init__(self, origin: Origin, mesh: Mesh, tokens: int, moment: str = ""):
        name, trained = origin.provenance["path"], origin.trained()
        if reward.HEAD not in trained:
            raise ConfigError(
                f"config.reward.model={name} gives no scores: it is no run of jaxlm train reward, and no Hugging Face model "
                "with one label (ForSequenceClassification)"
            )
        self._tokenizer, self._mesh = chat.dated(origin.tokenizer(), moment), mesh
        self._writer = chat.Writer(self._tokenizer)
        config = settle.to_read(origin.config.model, mesh.devices.flat[0].platform)
        self._room = min(tokens, config.max_seq_len)
        self.model = model = models.build(config, config.attention)
        abstract = models.abstract_params(model)
        params = origin.params(abstract, sharding.tree_shardings(abstract, models.logical_axes(model), mesh))
        head = jax.device_put(trained[reward.HEAD], sharding.replicated(mesh))
        self.kernel = np.asarray(jax.tree.leaves(trained[reward.HEAD])[0], np.float32)
        self._variables = jax.jit(cast, static_argnums=1)(
            {"params": params, reward.HEAD: head}, jnp.dtype(config.dtype)
        )
        score = lambda variables, batch: reward.scores(model, variables, batch, None, 1)  # noqa: E731
        self._score: Callable = jax.jit(score, out_shardings=sharding.replicated(mesh))

    def __call__(self, chats: Sequence[Messages]) -> np.ndarray:
        """Returns the score of each chat, whose last message is the answer, float32[N]."""
        texts, scores = [self._ids(messages) for messages in chats], []
        length = _power_of_two(max(map(len, texts)))
        for first in range(0, len(texts), _ROWS):
            part = texts[first : first + _ROWS]
            # One text a row, and one target more than the text has: else its last token would not be read.
            groups = [[rows.Segment([*ids, ids[-1]], np.zeros(len(ids)))] for ids in part]
            packed = [rows.pack([group], length, 1)[0] for group in groups]
            packed += packed[:1] * (_ROWS - len(packed))
            batch = {name: np.concatenate([row[name] for row in packed]) for name in packed[0]}
            scores_BxS = self._score(self._variables, self._placed(batch))
            scores += np.asarray(scores_BxS)[: len(part), 0].tolist()
        return np.asarray(scores, np.float32)

    def _placed(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return jax.device_put(batch, sharding.replicated(self._mesh))

    def _ids(self, messages: Messages) -> list[int]:
        """The ids of a chat up to the token that ends its last message."""
        text, spans, *_ = self._writer.written(messages, None, last=True)
        ids = conversation(self._tokenizer, text[: spans[-1].behind] if spans else text)
        over = len(ids) - self._room
        return ids if over <= 0 else [ids[0], *ids[over + 1 :]]


def _power_of_two(tokens: int) -> int:
    return max(16, 1 << (tokens - 1).bit_length())
