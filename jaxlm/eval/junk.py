"""Finds attractors: words that a model writes after many different prompts, since a small source of its text repeats them.

A model writes what it read about as often as it read it, so how often it writes a word tells no junk. The training text does:
junk is almost all in one small source, and most documents that hold it there repeat it over and over, which few do with
a source's ordinary words. In texts cut out of seven mixtures, as a perfect model would write them, all ten planted words
passed, and at most three others.
"""

import collections
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxlm.data.shards import search
from jaxlm.data.shards.shards import DataDir
from jaxlm.devices.processes import working
from jaxlm.host import files
from jaxlm.host.console import Tell

_words = re.compile(r"\w{3,}").findall  # phrases too were tried: they named the same junk many times over
_FEWEST = 3  # prompts whose texts hold a word, and documents that hold it
_SMALL = 0.1  # a source with less of the training text may be junk
_MOST = 0.8  # the source has this share of a word, and this share of its documents with the word repeat it
_REPEATS = 5  # times that a document holds a word
_ROWS = 15
_BEGINNING = 8  # tokens of a held-out document that are a prompt
_TEXT = {"prompt": files.TEXT, "text": files.TEXT}
Taught = tuple[DataDir, Mapping[str, float]]  # the shards that a run read, and the weight of each source


def kept(folder: pathlib.Path, drawn: pathlib.Path) -> list[dict]:
    """Returns the texts of the run in `folder` that exist: its samples, and those of the file `drawn`."""
    lines = (line for path in (*sorted(folder.glob("samples/*.jsonl")), drawn) for line in files.json_lines(path))
    pairs = dict.fromkeys((line["prompt"], line["text"]) for line in lines if not files.problem(line, _TEXT))
    return [{"prompt": prompt, "text": text} for prompt, text in pairs]


def prompts(taught: Taught, count: int, seed: int) -> Iterator[str]:
    """Yields beginnings of held-out documents, drawn from the sources by their weights; nothing if none is held out."""
    data, weights = taught
    documents = {name: data.documents(name, "val", 0, data.entry(name, "val")["tokens"]) for name in weights}
    shares = np.array([weight * bool(documents[name]) for name, weight in weights.items()])
    rng, decode = np.random.default_rng(seed), data.decoder()
    for name in rng.choice([*weights], count, p=shares / shares.sum()) if shares.any() else ():
        each = documents[name][rng.integers(len(documents[name]))]
        ids = data.stream(name, "val").read(each.start, each.start + min(each.tokens, _BEGINNING))
        yield decode(ids)[0].decode("utf-8", "ignore")


def texts_with(texts: Sequence[Mapping[str, str]]) -> dict[str, int]:
    """Returns word -> how many prompts without it have a text with it, from three on. An empty prompt counts for each text."""
    prompts_of = collections.defaultdict(set)
    for number, text in enumerate(texts):
        for word in {*_words(text["text"])} - {*_words(text["prompt"])}:
            prompts_of[word].add(text["prompt"].strip() or number)
    return {word: len(where) for word, where in prompts_of.items() if len(where) >= _FEWEST}


def _holders(data: DataDir, words: Mapping[str, int], tell: Tell) -> Iterator[tuple[str, str, dict[str, int]]]:
    """Yields (source, id, word -> times) of the training documents that hold any of the words."""
    decode, done = data.decoder(), 0
    for source in data.sources:
        for each, ids_N in search.each_document(data, source, "train"):
            text = decode(ids_N)[0].decode("utf-8", "replace")
            if held := collections.Counter(word for word in _words(text) if word in words):
                yield source, each.doc_id, held
            tell(done := done + len(ids_N))


def ranked(texts: Mapping[str, int], taught: Taught | None) -> list[dict]:
    """Returns a row for each attractor, best first: by texts, and by its source's share of it.

    string; texts: how many hold it; source: the small one; share, of_text: the source's share of the string and of all text, as
    often as training drew it; times, documents: in the source; example: the document that repeats it most. Without the training
    text, only string and texts, of the commonest words.
    """
    if not taught:
        return [{"string": s, "texts": count} for s, count in collections.Counter(texts).most_common(_ROWS)]
    rows, (data, weights) = [], taught
    tokens, whole = data.token_counts(), sum(weights.values())
    times, held_by = collections.Counter(), collections.defaultdict(list)
    with working("searching the training text", sum(tokens.values()), "tokens") as tell:
        for source, doc_id, held in _holders(data, texts, tell):
            for string, count in held.items():
                times[string, source] += count
                if 0 < weights.get(source, 0) < _SMALL * whole:
                    held_by[string, source].append((count, doc_id))
    for (string, source), held in held_by.items():
        drawn = {name: weight * times[string, name] / max(1, tokens[name]) for name, weight in weights.items()}
        share, repeats = drawn[source] / sum(drawn.values()), sum(count >= _REPEATS for count, _ in held) / len(held)
        if share >= _MOST and repeats >= _MOST and len(held) >= _FEWEST:
            row = {"string": string, "texts": texts[string], "source": source, "share": share}
            row |= {"of_text": weights[source] / whole, "times": times[string, source]}
            rows.append(row | {"documents": len(held), "example": max(held)[1]})
    return sorted(rows, key=lambda row: (-row["texts"] * row["share"], row["string"]))[:_ROWS]
