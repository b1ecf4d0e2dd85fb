"""Constrained decoding: which ids may come next so that the text stays JSON, or follows a JSON schema (llguidance)."""

import functools
import json
import threading
import typing
from collections.abc import Callable, Sequence

import numpy as np

from jaxlm.data.tokenizer.coder import Coder
from jaxlm.serve.body import Refused

# On one line, spaced as in text: with free white space, a small model may write nothing else.
FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MOST_SCHEMA = 2**16  # bytes: reading a schema blocks all other requests
_MISSING = "needs the library llguidance on the server: pip install llguidance"


class Guides:
    """Makes guides for one model, whose vocabulary may be larger than the tokenizer's. `ends`: the ids that end a text."""

    def __init__(self, tokenizer: Coder, vocab_size: int, ends: Sequence[int]):
        self._made_of, self._ends, self._lock = (tokenizer, vocab_size), [*ends], threading.Lock()

    def of_schema(self, schema: dict[str, typing.Any], param: str = "response_format") -> Callable[[], "Guide"]:
        """Returns a function that makes a new row's guide by a JSON schema. Raises Refused if the schema can't be followed.

        `param`: the key of the body that has the schema.
        """
        return self.of_grammar(f"start: %json {json.dumps(schema | {'x-guidance': FORM})}", param)

    def of_grammar(self, grammar: str, param: str) -> Callable[[], "Guide"]:
        """The same by a grammar in llguidance's Lark."""
        llguidance = _library(param)
        if len(grammar) > _MOST_SCHEMA:
            says = (
                f"{param} has {len(grammar):,} bytes of JSON schema, and at most {_MOST_SCHEMA:,} are read: shorten it"
            )
            raise Refused(says, param=param)
        try:
            with self._lock:
                tokens = self._tokens
            wrong, reasons = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, tokens)
        except ValueError as error:
            wrong, reasons = True, [str(error)]
        if wrong:
            raise Refused(f"{param} has a JSON schema that can't be followed: {_first(reasons)}", param=param)
        whole = llguidance.LLMatcher(tokens, grammar)
        words = -(-self._made_of[1] // 32)
        return lambda: Guide(whole.deep_copy(), words)

    @functools.cached_property
    def _tokens(self) -> typing.Any:
        llguidance = _library("response_format")
        wrapped = llguidance.TokenizerWrapper(_Pieces(*self._made_of, self._ends[0]))
        return llguidance.LLTokenizer(wrapped, n_vocab=len(wrapped.tokens), eos_token=self._ends)


class Guide:
    """Says which ids may come next in one row.

    `mask` returns their bits, uint32[ceil(V / 32)]; `accept` takes the id that was drawn.
    """

    def __init__(self, matcher: typing.Any, words: int):
        self._matcher, self._words = matcher, words

    def mask(self) -> np.ndarray:
        # llguidance's mask has one bit more than there are ids, and so perhaps one word more.
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._words]

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise ValueError(f"grammar refuses a token: {_first([self._matcher.get_error()])}")


class _Pieces:
    """A tokenizer as llguidance takes one: the bytes of each id, and how bytes are cut into ids."""

    bos_token_id = None

    def __init__(self, tokenizer: Coder, vocab_size: int, end: int):
        pieces = tokenizer.piece_bytes()[:vocab_size]
        pieces += [b""] * (vocab_size - len(pieces))
        self.special_token_ids = [i for i, raw in enumerate(pieces) if not raw]
        # Each control token needs a name of its own: else a grammar that allows one of them, `<[id]>`, allows all.
        self.tokens = [raw or b"<|%d|>" % i for i, raw in enumerate(pieces)]
        self.eos_token_id = end
        self._tokenizer, self._ids = tokenizer, {raw: i for i, raw in reversed([*enumerate(pieces)]) if raw}
        self._longest = max(map(len, pieces))

    def __call__(self, raw: bytes) -> list[int]:
        ids = self._tokenizer.encode(raw.decode("utf-8", "replace"))
        if b"".join(self.tokens[i] for i in ids) == raw:
            return ids
        return self._longest_first(raw)  # half a character, or a tokenizer that puts a space in front

    def _longest_first(self, raw: bytes) -> list[int]:
        ids = []
        while raw:
            size = next((n for n in range(min(self._longest, len(raw)), 0, -1) if raw[:n] in self._ids), 0)
            ids += [self._ids[raw[:size]]] if size else []
            raw = raw[size or 1 :]
        return ids


def _library(param: str) -> typing.Any:
    try:
        import llguidance
    except ImportError:
        raise Refused(f"{param} {_MISSING}", status=501, param=param) from None
    return llguidance


def _first(reasons: Sequence[str]) -> str:
    return (" ".join(reasons).strip().splitlines() or ["no reason given"])[0][:300]
