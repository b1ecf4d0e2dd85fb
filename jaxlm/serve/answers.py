"""Turns the batcher's updates into OpenAI's objects: the text of each answer, its log-probabilities, its end; vectors."""

import base64
import codecs
import dataclasses
import itertools
import secrets
import time
import typing
from collections.abc import Iterable, Sequence

import numpy as np

from jaxlm.data.tokenizer.coder import Coder
from jaxlm.data.tokenizer.stop_strings import Text
from jaxlm.models.decode.schedule import Token, Update
from jaxlm.serve.requests import Prompt, Request
from jaxlm.serve.tools import Calls, joined


class Names:
    """The name of each id in log-probabilities: its text; a control token's name; or bytes that are no whole text."""

    def __init__(self, tokenizer: Coder):
        self.pieces = tokenizer.piece_bytes()
        self._controls = {i: piece for piece, i in tokenizer.controls.items()}

    def raw(self, token: int) -> bytes:
        return self.pieces[token] if token < len(self.pieces) else b""

    def __getitem__(self, token: int) -> str:
        raw = self.raw(token)
        if not raw:
            return self._controls.get(token, f"<|{token}|>")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Placed(typing.NamedTuple):
    """A token and the number of characters of the answer before it."""

    token: Token
    at: int


@dataclasses.dataclass
class Delta:
    """What is new in an answer: text, tokens with their log-probabilities, how it ended, deltas of calls of tools.

    `ended` is OpenAI's `finish_reason`: "stop", "length", "tool_calls" or None.
    """

    text: str = ""
    placed: list[Placed] = dataclasses.field(default_factory=list)
    ended: str | None = None
    calls: list[dict[str, typing.Any]] = dataclasses.field(default_factory=list)
    pooled: np.ndarray | None = None

    def __add__(self, other: "Delta") -> "Delta":
        ended, pooled = other.ended or self.ended, self.pooled if other.pooled is None else other.pooled
        return Delta(self.text + other.text, self.placed + other.placed, ended, self.calls + other.calls, pooled)


class Answer:
    """One answer as its updates arrive. All deltas together have the same text and log-probabilities, however it is split."""

    def __init__(self, tokenizer: Coder, names: Names, request: Request, prompt: Prompt):
        self._tokenizer, self._names, self._prompt, self._echo = tokenizer, names, prompt, request.asks[0].echo
        spelled = [piece for piece in tokenizer.controls if request.form and any(piece in s for s in request.form)]
        self._text = Text(tokenizer, request.stops, spelled)
        self._calls = Calls(request.form) if request.form else None
        self._places = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = self._shown = 0  # characters: before the next token; returned so far
        self._waiting: list[Placed] = []
        self.tokens, self.ended = 0, None

    def take(self, update: Update) -> Delta:
        """Returns the text, tokens and end that an update of the batcher adds; an empty Delta after the end."""
        if self.ended:
            return Delta()
        text = self._echoed(update.prompt) if self._echo and update.prompt is not None else ""
        for token in update.tokens:
            self.tokens += 1
            self._place(token)
            text += self._text.feed([token.id])
            if self._text.stopped is not None:
                break
        if update.ended and self._text.stopped is None:
            text += self._text.close()
        if update.ended or self._text.stopped is not None:
            self.ended = update.ended if self._text.stopped is None else "stop"
        self._shown += len(text)
        calls = []
        if self._calls:
            text, calls = self._calls.feed(text, bool(self.ended))
            self.ended = "tool_calls" if self.ended == "stop" and self._calls.told else self.ended
        return Delta(text, self._sure(), self.ended, calls, update.pooled)

    def _echoed(self, prompt: Sequence[Token]) -> str:
        """Queues the prompt's visible tokens; returns their text. The first of them has no log-probability."""
        shown = list(prompt[self._prompt.hidden :])
        text = self._tokenizer.decode([token.id for token in shown if token.id < len(self._names.pieces)])
        self._at = len(text) - len(b"".join(self._names.raw(token.id) for token in shown).decode("utf-8", "replace"))
        for number, token in enumerate(shown):
            self._place(token if number else Token(token.id, None, ()))
        self._at = len(text)
        return text

    def _place(self, token: Token) -> None:
        self._waiting.append(Placed(token, max(self._at, 0)))
        self._at += len(self._places.decode(self._names.raw(token.id)))

    def _sure(self) -> list[Placed]:
        """Returns the tokens whose first character was returned; at the end all others too, unless a stop string ended it."""
        every = self.ended is not None and self._text.stopped is None
        sure = [*itertools.takewhile(lambda one: every or one.at < self._shown, self._waiting)]
        del self._waiting[: len(sure)]
        return sure


class Writer:
    """Writes the objects of one request's answers."""

    def __init__(self, names: Names, request: Request, model: str):
        self._names, self._request, self._model = names, request, model
        self._id = ("chatcmpl-" if request.chat else "cmpl-") + secrets.token_hex(12)
        self._created = int(time.time())

    def whole(self, deltas: Sequence[Delta], usage: dict[str, int]) -> dict[str, typing.Any]:
        if self._request.embeds:
            vectors = ({"embedding": self._embedded(delta.pooled)} for delta in deltas)
            data = [{"object": "embedding", "index": index, **vector} for index, vector in enumerate(vectors)]
            return {"object": "list", "data": data, "model": self._model, "usage": usage}
        kind = "chat.completion" if self._request.chat else "text_completion"
        return self._object(kind, [self._choice(*one, "message") for one in enumerate(deltas)]) | {"usage": usage}

    def _embedded(self, pooled_D: np.ndarray) -> list[float] | str:
        vector_D = (pooled_D / np.linalg.norm(pooled_D)).astype("<f4")
        return vector_D.tolist() if self._request.embeds == "float" else base64.b64encode(vector_D.tobytes()).decode()

    def opening(self, index: int) -> dict[str, typing.Any]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._piece([choice])

    def piece(self, index: int, delta: Delta) -> dict[str, typing.Any]:
        return self._piece([self._choice(index, delta, "delta")])

    def usage(self, usage: dict[str, int]) -> dict[str, typing.Any]:
        return self._piece([]) | {"usage": usage}

    def _piece(self, choices: list) -> dict[str, typing.Any]:
        kind = "chat.completion.chunk" if self._request.chat else "text_completion"
        return self._object(kind, choices) | ({"usage": None} if self._request.include_usage else {})

    def _object(self, kind: str, choices: list) -> dict[str, typing.Any]:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return head | {"system_fingerprint": None, "choices": choices}

    def _choice(self, index: int, delta: Delta, key: str) -> dict[str, typing.Any]:
        logprobs = None
        if self._request.asks[0].logprobs is not None:
            logprobs = self._of_chat(delta.placed) if self._request.chat else self._of_completion(delta.placed)
        content: dict[str, typing.Any] = {"text": delta.text}
        if self._request.chat and key == "message":
            text = None if delta.calls and not delta.text.strip() else delta.text
            content = {key: {"role": "assistant", "content": text, "refusal": None}}
        elif self._request.chat:
            content = {key: {"content": delta.text} if delta.text or (delta.placed and not delta.calls) else {}}
        if delta.calls:
            content[key]["tool_calls"] = delta.calls if key == "delta" else joined(delta.calls)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": delta.ended}

    def _of_completion(self, placed: Sequence[Placed]) -> dict[str, typing.Any]:
        tops = []
        for token, _ in placed:
            named = {self._names[i]: logp for i, logp in reversed(token.top)}  # of two ids with one name the likelier
            if token.logp is not None:
                named.setdefault(self._names[token.id], token.logp)
            tops.append(named if token.logp is not None else None)
        return {
            "tokens": [self._names[one.token.id] for one in placed],
            "token_logprobs": [one.token.logp for one in placed],
            "top_logprobs": tops,
            "text_offset": [one.at for one in placed],
        }

    def _of_chat(self, placed: Sequence[Placed]) -> dict[str, typing.Any]:
        content = [
            self._one(one.token.id, one.token.logp) | {"top_logprobs": [self._one(*top) for top in one.token.top]}
            for one in placed
        ]
        return {"content": content, "refusal": None}

    def _one(self, token: int, logp: float | None) -> dict[str, typing.Any]:
        return {"token": self._names[token], "logprob": logp, "bytes": [*self._names.raw(token)]}


def usage(request: Request, answers: Iterable[Answer]) -> dict[str, int]:
    """Returns how many tokens were read and written. A prompt counts once, however many answers it has."""
    read, written = sum(len(prompt.ids) for prompt in request.prompts), sum(answer.tokens for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
