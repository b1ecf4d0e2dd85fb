"""What is asked of the batcher, and what it answers."""

import dataclasses
import typing
from collections.abc import Mapping

import numpy as np


class Guide(typing.Protocol):
    """Says which tokens may come next (constrained decoding)."""

    def mask(self) -> np.ndarray:
        """Returns uint32[ceil(V / 32)], the bits of the ids that are allowed next."""

    def accept(self, token: int) -> None:
        """Takes the token that was drawn."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
      ids: the prompt, with what a document begins with; the caller checks it (`models.decode.check_prompts`).
      max_new_tokens: 0 for nothing new, only the prompt's log-probabilities, with `echo`.
      temperature: 0 takes the likeliest token.
      top_k: draws among the k likeliest; 0 among all.
      top_p: draws among the likeliest that together have this probability.
      seed: a row's tokens depend on its prompt, its settings and its seed alone, not on its neighbours.
      bias: id -> what is added to its logit.
      stop_ids: end the text; they are not among its tokens.
      logprobs: n asks for the log-probability of each token and of the n likeliest, at most 20; None for none.
      echo: True for those of the prompt's tokens too; the first one has None.
      guide: says which tokens may come next.
    """

    ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    echo: bool = False
    guide: Guide | None = None


class Token(typing.NamedTuple):
    """A token, with log-probabilities of the model's own distribution: before temperature, bias, top-k, top-p and guide."""

    id: int
    logp: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Update(typing.NamedTuple):
    """What is new of a request.

    Attributes:
      tokens: the new tokens.
      prompt: the prompt's tokens, once, if `echo` asks for them.
      ended: "" goes on; "stop", "length", "cancelled", "failed".
      why: why it failed.
    """

    tokens: tuple[Token, ...]
    prompt: tuple[Token, ...] | None = None
    ended: str = ""
    why: str = ""


class Busy(Exception):
    """The queue is full; `retry_after_s` says when there may be room."""

    def __init__(self, retry_after_s: float):
        super().__init__(f"all rows are busy and the queue is full: try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class Stats(typing.NamedTuple):
    """What the batcher did so far, and does now. Counts are of requests, but for tokens."""

    rows: int
    busy: int  # rows that have a request
    queued: int
    ring: int  # slots
    prompts: int  # requests so far
    prompt_tokens: int
    prefix_tokens: int  # of these, found in the cache of prefixes
    tokens: int  # new tokens
    steps: int
    step_bytes: int  # of weights and cache, read by these
    ended: Mapping[str, int]  # how requests ended
    down: str = ""  # why it answers no more
