"""Continues fixed prompts: the quickest way to see what a model has learned."""

import dataclasses
import json
import pathlib
import time
import typing
from collections.abc import Callable, Iterator, Sequence

from jaxlm import files
from jaxlm.config import SampleConfig
from jaxlm.data import chat
from jaxlm.data.coder import Coder, Encoded
from jaxlm.data.ids import document
from jaxlm.data.text import Text
from jaxlm.eval import degeneration
from jaxlm.models import decode, generate
from jaxlm.models.transformer import Transformer
from jaxlm.processes import together, working


def prompt_ids(tokenizer: Coder, prompt: str, settings: SampleConfig) -> list[int]:
    """Returns the ids of a prompt: of a document that begins so, or with `chat_template` of a chat in which a user says it."""
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

    Raises:
      ConfigError: a prompt is too long for the model. `make` itself raises it, so that training does not start.
    """
    tokenizer, prompts = data.tokenizer(), settings.prompts
    ways = [settings]  # how each prompt is continued
    if settings.also_greedy and settings.temperature > 0:
        ways.insert(0, dataclasses.replace(settings, temperature=0.0))
    decode.check_prompts(model, [prompt_ids(tokenizer, prompt, settings) for prompt in prompts])

    def sample(variables: dict, step: int) -> tuple[list[str], dict[str, float]]:
        if not prompts:
            return [], {}
        written = []
        for way in ways:
            with working("sampling"):
                texts = _continued(model, variables, tokenizer, prompts, way, seed)
            written += [_Written(prompt, way.temperature, *text) for prompt, text in zip(prompts, texts, strict=True)]
        lines = together(lambda: _write(workdir / "samples", step, written), first_only=True) or []
        ended = sum(one.ended for one in written) / len(written)
        return lines, {"samples/ended": ended} if settings.chat_template else {}

    return sample


class _Written(typing.NamedTuple):
    prompt: str
    temperature: float
    text: str
    ended: bool  # by itself


def _write(folder: pathlib.Path, step: int, written: list[_Written]) -> list[str]:
    """Writes the samples of a step, with how each degenerates; returns the lines to show."""
    folder.mkdir(exist_ok=True)
    lines = [{"step": step} | one._asdict() | degeneration.of_text(one.text) for one in written]
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    files.write_atomically(folder / f"{step}.jsonl", content.encode())  # a whole file: this step has its samples
    return [f"step {step}  [{one.prompt}]{one.text}" for one in written]
