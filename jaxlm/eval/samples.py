"""Continues fixed prompts: the quickest way to see what a model has learned. And how their texts fall apart."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

from jaxlm.config import SampleConfig
from jaxlm.corpus.stages.junk_patterns import GROUPS
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer.coder import Coder, Encoded, Text
from jaxlm.data.tokenizer.ids import document
from jaxlm.devices.processes import together, working
from jaxlm.host import files
from jaxlm.models.decode import engine, generate
from jaxlm.models.transformer import Transformer

_N = 4  # words of an n-gram whose repetition counts
_LOOP, _TIMES = 16, 3  # words of the longest loop; rounds of it that count as one
_FEWEST = 8  # words that such rounds have together, at least: "no no no" is speech
_SURE = 0.8  # a severity of `GROUPS`: of patterns that are junk in any text


def prompt_ids(tokenizer: Coder, prompt: str, settings: SampleConfig) -> list[int]:
    if settings.chat_template:
        return chat.ids(tokenizer, [{"role": "user", "content": prompt}])
    return document(tokenizer, prompt)


def continue_prompts(
    model: Transformer, variables: dict, tokenizer: Coder, prompts: Sequence[str], settings: SampleConfig, seed: int
) -> list[str]:
    """Returns the text that follows each prompt, up to its end (`ends`) or `settings.max_new_tokens`.

    Continues `prompts`; those of `settings` are ignored.
    """
    return [text for text, _ in _continued(model, variables, tokenizer, prompts, settings, seed)]


def _continued(
    model: Transformer, variables: dict, tokenizer: Coder, prompts: Sequence[str], settings: SampleConfig, seed: int
) -> list[tuple[str, bool]]:
    """The text that follows each prompt, and whether it ended by itself."""
    ids, stop_ids = [prompt_ids(tokenizer, prompt, settings) for prompt in prompts], chat.ends(tokenizer)
    new = generate.generate(model, variables, ids, settings, stop_ids=stop_ids, seed=seed)
    texts = (tokenizer.decode([i for i in row if i not in stop_ids], follows=True) for row in new)
    return [(text, bool({*row[-1:]} & {*stop_ids})) for text, row in zip(texts, new, strict=True)]


class Stream:
    """The texts that follow some prompts, as they come. When it is made, all is compiled and the prompts are read.

    Iterating yields (number of the prompt, a piece of its text). The first prompt's text comes first, token by token, then
    the second's, of which most is there by then, and so on; together these are the texts of `continue_prompts`. A piece holds
    whole characters only.

    Attributes:
      tokens: how many tokens have come after the first of each row.
      seconds: how long they took, without what the caller does between two pieces.
    """

    def __init__(
        self,
        model: Transformer,
        variables: dict,
        tokenizer: Coder,
        prompts: Sequence[str],
        settings: SampleConfig,
        seed: int,
    ):
        generator, stops = generate.Generator(model, variables), chat.ends(tokenizer)
        ids = [prompt_ids(tokenizer, prompt, settings) for prompt in prompts]
        self._rows, self._stops = [_Row(Text(tokenizer)) for _ in prompts], frozenset(stops)
        self._chunks = generator.stream(ids, settings, stop_ids=stops, seed=seed)
        self.tokens, self.seconds = 0, 0.0

    def __iter__(self) -> Iterator[tuple[int, str]]:
        first, began = True, time.perf_counter()
        for number, row in enumerate(self._rows):
            while True:
                if row.new:
                    yield number, row.new
                    row.new, began = "", time.perf_counter()
                if row.ended:
                    break
                chunk = next(self._chunks, None)
                if chunk and not first:
                    self.tokens += sum(map(len, chunk))
                    self.seconds += time.perf_counter() - began
                self._take(chunk)
                first, began = False, time.perf_counter()

    def _take(self, chunk: list[list[int]] | None) -> None:
        """Takes the new ids of each row; None: there are no more."""
        for row, ids in zip(self._rows, chunk or [[]] * len(self._rows), strict=True):
            if not row.ended:
                row.ended = chunk is None or bool(self._stops & {*ids[-1:]})
                row.new += row.text.feed(i for i in ids if i not in self._stops)
                row.new += row.text.close() if row.ended else ""


@dataclasses.dataclass
class _Row:
    """What comes of one prompt: its text, of which `new` is not given out yet."""

    text: Text
    new: str = ""
    ended: bool = False


def make(
    settings: SampleConfig, seed: int, model: Transformer, data: Encoded, workdir: pathlib.Path
) -> Callable[[dict, int], tuple[list[str], dict[str, float]]]:
    """Returns a function `(variables, step) -> (lines to show, figures)` that lets the model continue the prompts.

    On the first process that function also writes WORKDIR/samples/<step>.jsonl, a line for each prompt and temperature; on
    the others it returns no lines. If it can't be written, the function raises on all processes. With `chat_template` the
    figure `samples/ended` is the share of the answers that end within `max_new_tokens`.

    Raises ConfigError if a prompt is too long for the model, before training starts.
    """
    tokenizer, prompts = data.tokenizer(), settings.prompts
    ways = [settings]  # how each prompt is continued
    if settings.also_greedy and settings.temperature > 0:
        ways.insert(0, dataclasses.replace(settings, temperature=0.0))
    engine.check_prompts(model, [prompt_ids(tokenizer, prompt, settings) for prompt in prompts])

    def sample(variables: dict, step: int) -> tuple[list[str], dict[str, float]]:
        if not prompts:
            return [], {}
        written = []
        for way in ways:
            with working("sampling"):
                texts = _continued(model, variables, tokenizer, prompts, way, seed)
            for prompt, (text, ended) in zip(prompts, texts, strict=True):
                written.append({"prompt": prompt, "temperature": way.temperature, "text": text, "ended": ended})
        lines = together(lambda: _write(workdir / "samples", step, written), first_only=True) or []
        ended = sum(entry["ended"] for entry in written) / len(written)
        return lines, {"samples/ended": ended} if settings.chat_template else {}

    return sample


def _write(folder: pathlib.Path, step: int, written: list[dict]) -> list[str]:
    """Writes the samples of a step, with how each degenerates; returns the lines to show."""
    folder.mkdir(exist_ok=True)
    lines = [{"step": step} | entry | degeneration(entry["text"]) for entry in written]
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    files.write_atomically(folder / f"{step}.jsonl", content.encode())  # a whole file: this step has its samples
    return [f"step {step}  [{entry['prompt']}]{entry['text']}" for entry in written]


def degeneration(text: str) -> dict[str, float | int | None]:
    """Returns how a generated text falls apart.

    rep-n and distinct-n are those of Welleck et al. 2020 (arXiv:1908.04319, "seq-rep-n") and Li et al. 2016 (arXiv:1510.03055).
    Words are what stands between white space; n-grams are of words, so that models with different tokenizers compare.

    repetition: the share of its 4-grams of words that stood in it before; 0 for a text of fewer words.
    distinct_2: the share of its 2-grams of words that are different; 1 for a text of fewer words.
    degenerates_at: the number of words before it only repeats itself up to its end; None if it does not.
    junk: the share of its characters that known junk has (the groups of `corpus.audit_patterns` that are sure).
    """
    words = text.split()
    return {
        "repetition": round(1 - _different(words, _N), 4),
        "distinct_2": round(_different(words, 2), 4),
        "degenerates_at": degenerates_at(words),
        "junk": round(junk(text), 4),
    }


def _different(words: list[str], n: int) -> float:
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def degenerates_at(words: list[str]) -> int | None:
    """Returns how many words stand before a loop that lasts to the end of a text; None if it does not end in one.

    A loop is at most 16 words, three times or more, the last time perhaps cut short.
    """
    starts = []
    for period in range(1, _LOOP + 1):
        start = len(words) - period
        while start > 0 and words[start - 1] == words[start - 1 + period]:
            start -= 1
        if len(words) - start >= max(_TIMES * period, _FEWEST) and start >= 0:
            starts.append(start)
    return min(starts, default=None)


def junk(text: str) -> float:
    """Returns the share of a text's characters that are known junk: chat tokens, labels of data sets, <unk>, U+FFFD."""
    hit = bytearray(len(text))
    for group in GROUPS.values():
        if group.severity >= _SURE:
            for match in group.matches(text):
                hit[match.start() : match.end()] = b"\1" * (match.end() - match.start())
    for place, character in enumerate(text):
        hit[place] |= character == "\ufffd"
    return sum(hit) / len(text) if text else 0.0
