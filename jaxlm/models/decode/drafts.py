"""Proposes the next tokens of a text from what followed the same tokens earlier in it: no second model is needed.

One step then reads the weights once for several tokens. The text is the one that would be drawn without proposals (prompt
lookup decoding: Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding).
"""

import collections
from collections.abc import Iterable

_N = 3  # tokens that must have stood together before
_WINDOW, _FEWEST = 64, 16  # steps by which it is judged whether proposals pay, at most and at least
SIZES = (1, 2, 4, 8)  # tokens of a step that are tried
_LIKELY = 0.7  # how often a proposed token is right, where `best` chooses the size


def best(seconds: dict[int, float]) -> tuple[int, float]:
    """Returns (how many tokens to propose, tokens that a step must give to pay), by the time of a step of each size."""
    size = max(seconds, key=lambda size: (1 - _LIKELY**size) / seconds[size])
    return size - 1, seconds[size] / seconds[1]


class Draft:
    """The tokens of one text, in order.

    Attributes:
      size: how many tokens to propose.
    """

    def __init__(self, ids: Iterable[int], size: int, least: float):
        self.size, self._least = size, least
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # the newest place after each sequence of tokens
        self._given = collections.deque[int](maxlen=_WINDOW)
        self.add(ids)

    def add(self, ids: Iterable[int]) -> None:
        for token in ids:
            for n in (_N - 1, _N):
                if len(self._ids) >= n:
                    self._after[tuple(self._ids[-n:])] = len(self._ids)
            self._ids.append(token)

    def judge(self, tokens: int) -> None:
        """Takes how many tokens a step gave. After steps that did not pay nothing is proposed any more."""
        self._given.append(tokens)
        if len(self._given) >= _FEWEST and sum(self._given) < self._least * len(self._given):
            self.size = 0

    @property
    def near(self) -> bool:
        """False if the text can't be known one token further on, so that it is no use to wait for that token."""
        return self.size > 0 and tuple(self._ids[1 - _N :]) in self._after

    def propose(self) -> list[int]:
        """Returns `size` tokens, or none. Where the earlier text reaches its end, it goes on with what is proposed."""
        place = self._after.get(tuple(self._ids[-_N:]))
        if place is None and self.near:
            self.judge(1)  # to wait for the last token has cost something too
        if place is None or not self.size:
            return []
        text = self._ids[place : place + self.size]
        while len(text) < self.size:
            text += text
        return text[: self.size]
