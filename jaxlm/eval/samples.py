"""Continues fixed prompts, the quickest way to see what a model has learned, and measures how the texts degenerate."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

from jaxlm.config import SampleConfig
from jaxlm.corpus.stages.junk_patterns import SURE
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer.coder import Coder, Encoded
from jaxlm.data.tokenizer.ids import document
from jaxlm.data.tokenizer.stop_strings import Text
from jaxlm.devices.processes import together, working
from jaxlm.host import files
from jaxlm.models.decode import engine, generate, schedule
from jaxlm.models.transformer import Transformer

_N = 4  # words in an n-gram whose repetition is counted
_LOOP, _TIMES = 16, 3  # the most words that a loop repeats; how often a loop repeats them, at least
_FEWEST = 8  # words in all repetitions of a loop, at least: "no no no" is speech
_SHOWN, _WIDEST = 2, 140  # prompts that the terminal shows, and characters of each


def prompt_ids(tokenizer: Coder, prompt: str, settings: SampleConfig) -> list[int]:
    if settings.chat_template:
        return chat.ids(tokenizer, [{"role": "user", "content": prompt}])
    return document(tokenizer, prompt)


def continue_prompts(
    model: Transformer, variables: dict, tokenizer: Coder, prompts: Sequence[str], settings: SampleConfig, seed: int
) -> list[str]:
    """Returns the text that follows each prompt, up to an end token (`chat.ends`) or `settings.max_new_tokens`.

    Continues `prompts`; `settings.prompts` is ignored.
    """
    return [text for text, _ in _continued(model, variables, tokenizer, prompts, settings, seed)]


def _continued(
    model: Transformer, variables: dict, tokenizer: Coder, prompts: Sequence[str], settings: SampleConfig, seed: int
) -> list[tuple[str, bool]]:
    """Returns (the text that follows the prompt, whether an end token ended it) for each prompt."""
    ids, stop_ids = [prompt_ids(tokenizer, prompt, settings) for prompt in prompts], chat.ends(tokenizer)
    new = generate.generate(model, variables, ids, settings, stop_ids=stop_ids, seed=seed)
    texts = (tokenizer.decode([i for i in row if i not in stop_ids], follows=True) for row in new)
    return [(text, bool({*row[-1:]} & {*stop_ids})) for text, row in zip(texts, new, strict=True)]


class Stream:
    """Streams the texts that follow some prompts. The constructor compiles the model and reads the prompts.

    Iterating yields (prompt number, next piece of its text). The first prompt's text comes first, token by token; then the
    second's, most of which was generated meanwhile, and so on. Together the pieces are the texts of `continue_prompts`. A
    piece holds whole characters only.

    Attributes:
      tokens: how many tokens were generated after the first of each row.
      seconds: how long generating them took, without the caller's time between two pieces.
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
        stops = chat.ends(tokenizer)
        ids = [prompt_ids(tokenizer, prompt, settings) for prompt in prompts]
        tickets = [schedule.Ticket(ask) for ask in generate.asks(ids, settings, stops, seed)]
        self._rows, self._stops = [_Row(Text(tokenizer)) for _ in prompts], frozenset(stops)
        # All the places at once, since each further length of the ring pauses to compile.
        places = max(map(len, ids), default=0) + settings.max_new_tokens
        decoder = engine.Engine(model, variables, shortest=min(places, model.config.max_seq_len), prefix_bytes=0)
        self._updates = schedule.answers(decoder, tickets, burst=decoder.burst)
        self.tokens, self.seconds = 0, 0.0
        self._take()

    def __iter__(self) -> Iterator[tuple[int, str]]:
        for number, row in enumerate(self._rows):
            while row.new or not row.ended:
                if row.new:
                    yield number, row.new
                    row.new = ""
                else:
                    began = time.perf_counter()
                    self._take()
                    self.seconds += time.perf_counter() - began

    def _take(self) -> None:
        """Adds the next new tokens of a row to its text."""
        number, update = next(self._updates)
        row = self._rows[number]
        self.tokens += len(update.tokens) * row.begun
        row.begun, row.ended = True, bool(update.ended)
        row.new += row.text.feed(token.id for token in update.tokens if token.id not in self._stops)
        row.new += row.text.close() if row.ended else ""


@dataclasses.dataclass
class _Row:
    """The text that follows one prompt; `new` is the part that was not yielded yet."""

    text: Text
    new: str = ""
    begun: bool = False
    ended: bool = False


def make(
    settings: SampleConfig, seed: int, model: Transformer, data: Encoded, workdir: pathlib.Path
) -> Callable[[dict, int], tuple[list[str], dict[str, float]]]:
    """Returns a function `(variables, step) -> (lines to show, metrics)` that lets the model continue the prompts.

    On the first process the function also writes WORKDIR/samples/<step>.jsonl, a line for each prompt and temperature; on
    the others it returns no lines. If that file can't be written, the function raises on all processes. With `chat_template`
    the metric `samples/ended` is the share of the answers that end within `max_new_tokens`.

    Raises ConfigError if a prompt is too long for the model, before training starts.
    """
    tokenizer, prompts = data.tokenizer(), settings.prompts
    ways = [settings]  # each prompt is continued once with each
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
    """Writes the samples of a step, each with its `degeneration`; returns the lines to show."""
    folder.mkdir(exist_ok=True)
    lines = [{"step": step} | entry | degeneration(entry["text"]) for entry in written]
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    files.write_atomically(folder / f"{step}.jsonl", content.encode())  # the file exists only if it is complete
    prompts = [entry["prompt"] for entry in written][:_SHOWN]
    return [_in_short(step, entry) for entry in written if entry["prompt"] in prompts]


def _in_short(step: int, entry: dict) -> str:
    text = " ".join(f"[{entry['prompt']}]{entry['text']}".split())
    end = " ..." * (len(text) > _WIDEST)
    return f"step {step}  {'drawn' if entry['temperature'] else 'greedy'}: {text[:_WIDEST]}{end}"


def degeneration(text: str) -> dict[str, float | int | None]:
    """Returns measures of how a generated text degenerates.

    repetition is seq-rep-n of Welleck et al. 2020 (arXiv:1908.04319), distinct_2 distinct-n of Li et al. 2016
    (arXiv:1510.03055). N-grams are of words split at white space, so that models with different tokenizers compare.

    repetition: the share of 4-grams that occurred before in the text; 0 for a text of fewer words.
    distinct_2: the number of different 2-grams divided by the number of all 2-grams; 1 for a text of fewer words.
    degenerates_at: the number of words before the loop in which the text ends; None if it does not end in a loop.
    junk: the share of characters that are surely junk (see `junk`).
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
    """Returns how many words come before the loop in which a text ends; None if it does not end in a loop.

    A loop is 1 to 16 words, at least three times in a row and at least 8 words in all; the last time may be cut short.
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
    for group in SURE:
        for match in group.matches(text):
            hit[match.start() : match.end()] = b"\1" * (match.end() - match.start())
    for place, character in enumerate(text):
        hit[place] |= character == "\ufffd"
    return sum(hit) / len(text) if text else 0.0
