"""A small data directory of three sources of numbered documents whose text tells which document it is."""

import dataclasses
import json
import pathlib
import random

import pytest

from jaxlm.data.shards import build, shards

MIXTURE = {"prose": 87, "math": 10, "code": 3}
COUNTS = {"prose": 260, "math": 90, "code": 60}
SETTINGS = build.BuildSettings(vocab_size=325, chat_tokens=True, val_fraction=0.1, block_tokens=64, shard_blocks=16)


_LETTERS = random.Random(0)
WORDS = ["".join(_LETTERS.choices("abcdefghijklmnoprstuvw", k=_LETTERS.randint(2, 8))) for _ in range(300)]


def document(source: str, i: int) -> str:
    """A text unlike any other, of very different lengths, of words that a small BPE can learn."""
    rng = random.Random(f"{source}{i}")
    return f"{source} {i}: " + " ".join(rng.choices(WORDS, k=1 + i * i % 23))


@pytest.fixture(scope="session")
def make_document():
    """The function `document(source, i)`."""
    return document


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Raw files in `folder`, and how to build data from them."""

    folder: pathlib.Path
    sources: tuple[build.Source, ...]
    settings: build.BuildSettings = SETTINGS

    def build(self, path: pathlib.Path, engine=None, **changes) -> shards.DataDir:
        """A data directory; `changes` are fields of BuildSettings."""
        settings = dataclasses.replace(self.settings, **changes)
        return build.build_data(path, self.sources, settings, engine=engine, log=lambda _: None)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Corpus:
    """One jsonl file a source; read-only."""
    folder, made = tmp_path_factory.mktemp("raw"), []
    for name, count in COUNTS.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": document(name, i)}) + "\n" for i in range(count)))
        made.append(build.Source(name, str(path), MIXTURE[name]))
    return Corpus(folder, tuple(made))


@pytest.fixture(scope="session")
def data(corpus, tmp_path_factory) -> shards.DataDir:
    """The corpus, built once; read-only."""
    return corpus.build(tmp_path_factory.mktemp("data") / "built")
