"""Tokenizers of Hugging Face models, used unchanged: tokenizer.json by the library `tokenizers`, or tokenizer.model.

Two kinds of vocabulary are supported: byte-level (GPT-2, Llama 3, Qwen) writes each byte as a printable character;
byte-fallback (Llama 2, Mistral) writes a space as U+2581, and bytes without a piece as `<0x0A>`.
"""

import functools
import hashlib
import json
import pathlib
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxlm.config import ConfigError, pip_install
from jaxlm.data.tokenizer.ours import GUARD, Ids, Tokenizer, controls_of, encode_marked
from jaxlm.host.files import json_of

JSON, MODEL, IDS = "tokenizer.json", "tokenizer.model", "tokenizer_ids.json"
# Kept with the tokenizer, for exports: they decide no ids.
JINJA = "chat_template.jinja"
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", JINJA)
_MOST_IDS = 10_000_000  # no tokenizer has so many; a table of raw bytes has a row for each
_SPACE = "\u2581"
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_MISSING = f"this model has a tokenizer.json, which needs the library tokenizers: {pip_install('hf')}"


class _Imported:
    def _identify(self, files: Mapping[str, bytes], name: str) -> None:
        """Reads what the files say of ids; the last step of `__init__`. `name`: the vocabulary's file."""
        self.files, self.sha256 = dict(files), _sha256(files, name)
        self.eos_id, self.bos_id, self.opening, self.separator_id, self.ends = _ids(files, self.vocab_size)
        self._prefix, raw = b"", self.piece_bytes()  # the space that the tokenizer puts in front of every text
        self._prefix = b" " if b"".join(raw[i] for i in self.encode("a")) == b" a" else b""

    def __reduce__(self):
        return type(self), (self.files,)

    def decode(self, ids: Iterable[int], follows: bool = False) -> str:
        """Ids beyond the vocabulary, which a longer embedding may give, become nothing."""
        raw = b"".join([self._raw_bytes[int(i)] for i in ids if int(i) < self.vocab_size])
        return (raw if follows else raw.removeprefix(self._prefix)).decode("utf-8", "replace")


class HfTokenizer(_Imported, Ids):
    """A tokenizer.json, with the interface of `Tokenizer`."""

    def __init__(self, files: Mapping[str, bytes]):
        self._tokenizer, spec = _open(files[JSON])
        self._raw_bytes = _raw_bytes(spec)
        added = spec.get("added_tokens") or ()
        self.controls = {token["content"]: token["id"] for token in added if token.get("special")}
        self.vocab_size = len(self._raw_bytes)
        self._tokenizer.encode_special_tokens = True  # a text that spells a control token is ordinary text
        self._identify(files, JSON)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(_sound(text), add_special_tokens=False).ids

    def encode_marked(self, text: str) -> list[int]:
        """Lets the library split at control tokens, since it handles spaces there; splits only texts with a GUARD itself."""
        if GUARD in text:
            return encode_marked(self, text)
        return self._marking.encode(_sound(text), add_special_tokens=False).ids

    def encode_cut(self, texts: Sequence[str], cuts: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        parts = [*zip(texts, cuts, map(self._behind_controls, texts), strict=True)]
        heads = (text[:cut] for text, places, ends in parts for cut in places if cut not in ends)
        asked = list(dict.fromkeys([*texts, *heads]))
        ids = dict(zip(asked, self._encode_marked_batch(asked), strict=True))
        return [(ids[text], self._in_front(text, places, ends, ids)) for text, places, ends in parts]

    def _behind_controls(self, text: str) -> dict[int, int]:
        """Returns control token's end -> number of control tokens up to it. A cut at such an end needs no encoding."""
        if GUARD in text:
            return {}
        return {match.end(): number for number, match in enumerate(controls_of(self).finditer(text), 1)}

    def _in_front(
        self, text: str, cuts: Sequence[int], ends: Mapping[int, int], ids: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """Returns the number of ids before each cut; see `Tokenizer.encode_cut`."""
        whole = ids[text]
        controls = np.flatnonzero(np.isin(whole, list(self.controls.values()))) if ends else ()
        at = []
        for cut in cuts:
            if cut in ends:
                at.append(int(controls[ends[cut] - 1]) + 1 if len(controls) == len(ends) else -1)
            else:
                head = ids[text[:cut]]
                at.append(len(head) if np.array_equal(whole[: len(head)], head) else -1)
        return np.asarray(at, np.int64)

    def _encode_marked_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        plain = [_sound("" if GUARD in text else text) for text in texts]
        coded = self._marking.encode_batch_fast(plain, add_special_tokens=False)
        ids = (encode_marked(self, text) if GUARD in text else one.ids for text, one in zip(texts, coded, strict=True))
        return [np.asarray(of_text, np.int32) for of_text in ids]

    @functools.cached_property
    def _marking(self) -> typing.Any:
        return _open(self.files[JSON])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The library chooses its threads itself (RAYON_NUM_THREADS)."""
        coded = self._tokenizer.encode_batch_fast([_sound(text) for text in texts], add_special_tokens=False)
        return [np.asarray(one.ids, np.int32) for one in coded]

    def byte_ids(self) -> np.ndarray:
        return np.asarray(sorted(_single_bytes(json_of(self.files[JSON]))), np.int32)

    def find(self, piece: str) -> int | None:
        return self._tokenizer.token_to_id(piece)


class HfSentencePiece(_Imported, Tokenizer):
    """An imported tokenizer.model, as SentencePiece itself reads it."""

    def __init__(self, files: Mapping[str, bytes]):
        super().__init__(files[MODEL])
        self._identify(files, MODEL)

    def _split(self, text: str) -> Iterator[str | None]:
        """Does not split for a model that puts a space in front of every text: it would put one in front of every part."""
        if self._prefix:
            return iter([_sound(text)] if text else [])
        return super()._split(text)


def ids_file(folder: pathlib.Path, files: Mapping[str, bytes]) -> bytes:
    """Returns the content of `IDS` for a model's folder; `ends` are all ids that the folder calls EOS.

    Raises ConfigError if no file names the token that ends a text, or a file is no JSON.
    """
    settings = settings_of(files, "tokenizer_config.json")
    named = settings_of(files, "special_tokens_map.json") | {k: v for k, v in settings.items() if v is not None}
    beside, ends = {}, []
    for name in ("generation_config.json", "config.json"):  # the later one wins
        if (folder / name).is_file():
            said = settings_of({name: (folder / name).read_bytes()}, name)
            beside |= said
            ends += said["eos_token_id"] if isinstance(said.get("eos_token_id"), list) else [said.get("eos_token_id")]
    id_of = _open(files[JSON])[0].token_to_id if JSON in files else Tokenizer(files[MODEL]).find

    def find(kind: str) -> int | None:
        token = named.get(f"{kind}_token")
        own = id_of(token["content"] if isinstance(token, dict) else token) if token else None
        other = beside.get(f"{kind}_token_id")
        other = other[0] if isinstance(other, list) and other else other
        return own if own is not None else other if type(other) is int else None

    eos, bos = find("eos"), find("bos")
    if eos is None:
        raise ConfigError("it does not say which token ends a text: name it as eos_token in tokenizer_config.json")
    if JSON in files:  # transformers 5 then ignores add_bos_token and add_eos_token
        opening = _put_in_front(files[JSON])
    else:  # with neither setting, BOS: LlamaTokenizer was trained so, and transformers 4 does so
        said = {"add_bos_token", "add_eos_token"} & settings.keys()
        opening = [bos] if bos is not None and (settings.get("add_bos_token") or not said) else []
    ends = [i for i in dict.fromkeys([eos, *ends]) if type(i) is int]
    return json_line({"eos_id": eos, "bos_id": bos, "opening": opening, "ends": ends})


def _put_in_front(content: bytes) -> list[int]:
    """Returns the ids that the post-processor of a tokenizer.json puts in front of a text."""
    tokenizer, _ = _open(content)
    plain, whole = (tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True))
    return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(plain)] == plain), [])


def _open(content: bytes) -> tuple[typing.Any, dict]:
    """Returns (the tokenizer, the JSON), without padding, truncation and BPE dropout: a text always has the same ids."""
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(_MISSING) from None
    try:
        tokenizer, spec = tokenizers.Tokenizer.from_str(content.decode()), json_of(content)
    except Exception as error:  # the library raises Exception itself
        said = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"{JSON} can't be read ({said}): copy it again, or update tokenizers") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if isinstance(tokenizer.model, tokenizers.models.BPE):
        tokenizer.model.dropout = None
    return tokenizer, spec


def with_controls(content: bytes, pieces: Iterable[str]) -> bytes:
    """Returns a tokenizer.json with these control tokens; missing ones get the next ids."""
    tokenizer, _ = _open(content)
    tokenizer.add_special_tokens([*pieces])
    return tokenizer.to_str().encode()


def _ids(files: Mapping[str, bytes], vocab_size: int) -> tuple[int, int | None, tuple[int, ...], int, tuple[int, ...]]:
    """Returns (EOS, BOS, opening, separator, ends) of `IDS`; files written before 28 November 2026 have no ends."""
    stored = settings_of(files, IDS)
    opening = tuple(stored["opening"])
    for i in (stored["eos_id"], *opening, stored["bos_id"] or 0):
        if type(i) is not int or not 0 <= i < vocab_size:
            raise ConfigError(f"it names the token id {i!r:.60}, but has {vocab_size:,} ids: copy its files again")
    if not all(isinstance(piece, str) for piece in stored.get("rows", [])):
        raise ConfigError(f"{IDS} is damaged (rows={stored['rows']!r:.60}): copy it again")
    ends = tuple(i for i in stored.get("ends", ()) if type(i) is int and 0 <= i < vocab_size)
    return stored["eos_id"], stored["bos_id"], opening, opening[0] if opening else stored["eos_id"], ends


def json_line(content: dict) -> bytes:
    return (json.dumps(content) + "\n").encode()


def settings_of(files: Mapping[str, bytes], name: str) -> dict:
    """Returns the settings in one of a tokenizer's files; {} without the file. Raises ConfigError if it is damaged."""
    try:
        return json_of(files.get(name, b"{}"))
    except ValueError as error:
        raise ConfigError(f"{name} is damaged ({error}): copy it again") from None


def _sha256(files: Mapping[str, bytes], name: str) -> str:
    ids = settings_of(files, IDS)
    return hashlib.sha256(files[name] + json_line({k: ids[k] for k in ("eos_id", "bos_id", "opening")})).hexdigest()


def _sound(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _kinds(part: object) -> set[str]:
    """Returns all values of "type" anywhere in a part of a tokenizer.json."""
    return set(re.findall(r'"type": "(\w+)"', json.dumps(part)))


def _vocabulary(spec: dict) -> dict[str, int]:
    """Returns piece -> id of the model, without added tokens."""
    vocabulary = spec["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: [piece, score]
        return {piece: i for i, (piece, _) in enumerate(vocabulary)}
    return vocabulary


def _raw_bytes(spec: dict) -> list[bytes]:
    """Returns the raw text of each id of a tokenizer.json; b"" for control tokens and unused ids."""
    decoder = _kinds(spec.get("decoder"))
    if "ByteLevel" in decoder:
        raw_of = _byte_level
    elif decoder & {"ByteFallback", "Metaspace", "Replace"}:
        raw_of = _with_spaces
    else:
        kind = f"{spec['model'].get('type', 'unknown')} with the decoder {', '.join(sorted(decoder)) or 'none'}"
        known = "only byte-level and byte-fallback vocabularies are"
        raise ConfigError(f"{JSON} is of a kind that is not supported ({kind}): {known}")
    pieces = {i: raw_of(piece) for piece, i in _vocabulary(spec).items()}
    unknown = spec["model"].get("unk_token")
    if isinstance(unknown, str) and unknown in _vocabulary(spec):
        pieces[_vocabulary(spec)[unknown]] = b""
    for added in spec.get("added_tokens") or ():
        pieces[added["id"]] = b"" if added.get("special") else added["content"].encode()
    if max(pieces) > _MOST_IDS:
        raise ConfigError(f"{JSON} is damaged: it has an id {max(pieces):,}; copy it again")
    return [pieces.get(i, b"") for i in range(max(pieces) + 1)]


def _single_bytes(spec: dict) -> Iterator[int]:
    """Yields the ids of single bytes."""
    byte_level = "ByteLevel" in _kinds(spec.get("decoder"))
    for piece, i in _vocabulary(spec).items():
        if (piece in _bytes_of_characters()) if byte_level else _BYTE.fullmatch(piece):
            yield i


def _with_spaces(piece: str) -> bytes:
    if byte := _BYTE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    return piece.replace(_SPACE, " ").encode()


def _byte_level(piece: str) -> bytes:
    table = _bytes_of_characters()
    return bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()


@functools.cache
def _bytes_of_characters() -> dict[str, int]:
    """Returns character -> the byte that it stands for in a byte-level vocabulary (openai/gpt-2, encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
