"""Reports lengths and problems of examples before training. Changes none: the user decides which to remove."""

import collections
import dataclasses
import itertools
import json
import operator
import pathlib
import tempfile
import typing
from collections.abc import Iterator, Sequence

import numpy as np

from jaxlm.config import PrepareConfig
from jaxlm.corpus.stage import Document
from jaxlm.corpus.stages import registry
from jaxlm.corpus.stages.decontaminate import Decontaminate
from jaxlm.corpus.stages.junk_patterns import GROUPS
from jaxlm.data.batches import encoded
from jaxlm.data.chats import masks
from jaxlm.data.chats.examples import Example, Pair
from jaxlm.data.chats.records import ASSISTANT, Messages
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.host import files
from jaxlm.host.console import share

TEXT, JSON = "examples.txt", "examples.json"  # in a run's folder
_SHOWN = 5  # places of each finding
_QUANTILES = (0.05, 0.5, 0.95, 1.0)


@dataclasses.dataclass
class Finding:
    """A problem that some examples have. `places`: the places of the first few of these examples."""

    what: str
    examples: int = 0
    places: list[str] = dataclasses.field(default_factory=list)

    def add(self, place: str) -> None:
        """Counts one more example."""
        self.examples += 1
        if len(self.places) < _SHOWN:
            self.places.append(place)


class Survey:
    """Collects examples (`encoded.build` calls `see`) and reports their lengths and problems."""

    def __init__(self, seq_len: int, leaks: Decontaminate | None = None):
        self._seq_len, self._leaks = seq_len, leaks
        self._examples = self._pairs = self._answers = self._systems = self._shorter = 0
        self._asked: list[int] = []  # tokens in front of the first that counts, of each segment
        self._said: list[int] = []  # tokens that count, of each segment
        self._found: dict[str, Finding] = {}
        self._seen: dict[bytes, str] = {}  # content -> where it was first
        self._asks: collections.Counter[int] = collections.Counter()

    def see(self, one: Example, sides: Sequence[encoded.Masked]) -> None:
        """Takes in an example and its segments."""
        self._examples += 1
        self._lengths(one, sides)
        self._repeats(one)
        said = _said(one)
        answers = [message["content"] for message in said]
        self._answers += len(answers)
        if any(not message["content"].strip() and "tool_calls" not in message for message in said):
            self._note("empty answers", one)
        for label in {label for answer in answers for label in _junk(answer)}:
            self._note(f"junk in an answer: {label}", one)
        if self._leaks and (leaked := _leak(self._leaks, one)):
            self._note(f"items of benchmarks: {leaked}", one)
        if isinstance(one, Pair):
            self._pair(one)

    def _lengths(self, one: Example, sides: Sequence[encoded.Masked]) -> None:
        for side in sides:
            counts = side.kinds != masks.GIVEN
            self._asked.append(int(counts.argmax()))
            self._said.append(int(np.count_nonzero(counts)))
        if self._asked[-1] >= self._seq_len:
            self._note(f"prompts longer than a row of {self._seq_len:,} tokens", one)
        elif sum(len(side.ids) - 1 for side in sides) > self._seq_len:
            row = f"longer than a row of {self._seq_len:,} tokens"
            pair = isinstance(one, Pair)
            self._note(f"both sides together {row}" if pair else f"{row} together with the answer", one)

    def _repeats(self, one: Example) -> None:
        content, place = encoded.content_key(one), str(one.place)
        if content in self._seen:
            self._note("repeated examples", one, f"{place} = {self._seen[content]}")
        self._seen.setdefault(content, place)
        self._asks[encoded.prompt_key(one)] += 1

    def _pair(self, one: Pair) -> None:
        self._pairs += 1
        self._shorter += _length(one.chosen) < _length(one.rejected)
        if one.chosen == one.rejected:
            self._note("pairs of two equal sides", one)
            return
        turned = dataclasses.replace(one, chosen=one.rejected, rejected=one.chosen, margin=0.0)
        if other := self._seen.get(encoded.content_key(turned)):
            self._note("pairs that occur again with their sides swapped", one, f"{one.place} = {other}")

    def _note(self, what: str, one: Example, place: str = "") -> None:
        self._found.setdefault(what, Finding(what)).add(place or str(one.place))

    def findings(self) -> list[Finding]:
        return sorted(self._found.values(), key=lambda finding: (-finding.examples, finding.what))

    def figures(self) -> dict[str, typing.Any]:
        """Returns figures on the examples, as JSON values. Lengths: the quantiles 5%, 50%, 95% and 100%, in tokens."""
        lengths = (np.quantile(tokens or [0], _QUANTILES) for tokens in (self._asked, self._said))
        asked, said = (quantiles.round().astype(int).tolist() for quantiles in lengths)
        figures = {"examples": self._examples, "pairs": self._pairs, "answers": self._answers}
        figures |= {"asked_alike": self._examples - len(self._asks), "prompt_tokens": asked, "answer_tokens": said}
        if self._pairs:
            figures["chosen_is_shorter"] = self._shorter / self._pairs
        return figures | {"findings": [dataclasses.asdict(finding) for finding in self.findings()]}

    def lines(self) -> list[str]:
        """Returns the figures for people, in a few lines."""
        figures = self.figures()
        what = f"{self._pairs:,} pairs" if self._pairs else f"{self._examples:,} chats, {self._answers:,} answers"
        lines = [f"{what}; {figures['asked_alike']:,} repeat another's prompt"]
        for name, key in (("asked", "prompt_tokens"), ("answered", "answer_tokens")):
            low, half, high, most = figures[key]
            lines.append(f"{name} in {half:,} tokens ({low:,} to {high:,} in 90% of them, {most:,} at most)")
        if self._pairs:
            lines.append(f"the chosen answer is the shorter one in {share(self._shorter, self._pairs)} of the pairs")
        for finding in self.findings():
            more = ["..."] if finding.examples > len(finding.places) else []
            places = ", ".join([*map(_short, finding.places), *more])
            lines.append(f"{finding.what}: {finding.examples:,} ({share(finding.examples, self._examples)}): {places}")
        return lines

    def write(self, folder: pathlib.Path) -> None:
        files.write_atomically(folder / TEXT, "".join(line + "\n" for line in self.lines()).encode())
        files.write_atomically(folder / JSON, (json.dumps(self.figures(), indent=1) + "\n").encode())


def leaks_of(benchmarks: str, prepare: PrepareConfig) -> Decontaminate | None:
    """Returns a finder of a benchmark folder's items; None for "". Raises ConfigError for an unknown layout."""
    if not benchmarks:
        return None
    asked = registry.typed_settings(registry.parse("decontaminate", prepare.stages, "prepare.stages"))
    settings = dataclasses.replace(asked, paths=(benchmarks,))
    with tempfile.TemporaryDirectory(prefix="jaxlm-") as folder:
        Decontaminate.build(settings, pathlib.Path(folder))
        return Decontaminate(settings, pathlib.Path(folder))


def shown(found: encoded.Coded, tokenizer: Coder, example: int = 0, most: int = 1200) -> list[tuple[str, bool]]:
    """Returns the text of an example as parts, (text, True if it counts), each shortened to about `most` characters."""
    parts: list[tuple[str, bool]] = []
    names, raw = {i: piece for piece, i in tokenizer.controls.items()}, tokenizer.piece_bytes()
    for ids, kinds in found.segments(example):
        counted = (kinds != masks.GIVEN).tolist()
        for counts, run in itertools.groupby(zip(ids.tolist(), counted, strict=True), key=operator.itemgetter(1)):
            text = b"".join(names[i].encode() if i in names else raw[i] for i, _ in run if i < len(raw))
            parts.append((_shortened(text.decode("utf-8", "replace"), most), counts))
        parts.append(("\n", False))
    return parts[:-1]


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def _short(place: str) -> str:
    return " = ".join(pathlib.PurePath(part).name for part in place.split(" = "))


def _said(one: Example) -> Messages:
    """Returns the assistant's messages in an example, without given ones."""
    if isinstance(one, Pair):
        return tuple(message for message in one.chosen + one.rejected if message["role"] == ASSISTANT)
    return tuple(one.messages[number] for number in sorted(one.trained()))


def _length(messages: Messages) -> int:
    return sum(len(message["content"]) for message in messages)


def _junk(text: str) -> Iterator[str]:
    for name, group in GROUPS.items():
        for match in group.matches(text):
            yield f"{name} ({group.label_of(match)})"
            break


def _leak(leaks: Decontaminate, one: Example) -> str:
    """Returns the benchmark that leaked into an example; "" if none did."""
    sides = (one.prompt + one.chosen, one.rejected) if isinstance(one, Pair) else (one.messages,)
    for messages in sides:
        text = "\n\n".join(message["content"] for message in messages)
        if removal := leaks.apply(Document(text, str(one.place)), collections.Counter()):
            return removal.reason.removeprefix("contains ")
    return ""
