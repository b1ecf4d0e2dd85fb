"""Decodes tokens as they come, and ends the text at the first stop string."""

import codecs
from collections.abc import Collection, Iterable, Sequence

from jaxlm.data.tokenizer.coder import Coder


class Text:
    """Decodes a row whose ids come a few at a time; how the ids are split does not matter.

    Holds back what may be half a character or the beginning of a stop string. The first whole stop string ends the text,
    and is `stopped`. Control tokens become nothing, except those of `spelled`.
    """

    def __init__(self, tokenizer: Coder, stops: Sequence[str] = (), spelled: Collection[str] = ()):
        self._pieces, self._stops = [*tokenizer.piece_bytes()], tuple(stops)
        for piece in spelled:
            self._pieces[tokenizer.controls[piece]] = piece.encode()
        self._longest = max(map(len, self._stops), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped: str | None = None

    def feed(self, ids: Iterable[int]) -> str:
        """Returns the new text that is certain. Ids beyond the vocabulary become nothing."""
        raw = b"".join(self._pieces[i] for i in map(int, ids) if i < len(self._pieces))
        return self._take(self._decoder.decode(raw))

    def close(self) -> str:
        """Returns the rest: what was held back, with U+FFFD for a character that was never whole."""
        return self._take(self._decoder.decode(b"", final=True), whole=True)

    def _take(self, new: str, whole: bool = False) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + new
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.stopped = min(ends)
            self._held = ""
            return text[:at]
        held = 0 if whole else self._unsure(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _unsure(self, text: str) -> int:
        """Returns the length of a text's longest suffix that is a proper prefix of a stop string."""
        ends = (text[-n:] for n in range(min(len(text), self._longest - 1), 0, -1))
        return next((len(end) for end in ends if any(len(end) < len(s) and s.startswith(end) for s in self._stops)), 0)
