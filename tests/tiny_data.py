"""A small data directory of two sources, for tests of what comes after the data."""

import random

from jaxlm.data.shards import build

WORDS = "one two three four five six seven eight nine ten red green blue sun moon sea is was and"


def make(path, sources: dict[str, float], documents: int = 60, vocab_size: int = 300):
    """Builds `path` from random sentences and opens it."""
    rng = random.Random(0)
    texts = {
        name: [" ".join(rng.choices(WORDS.split(), k=rng.randint(4, 40))) + "." for _ in range(documents)]
        for name in sources
    }

    def read(source, stats):
        for i, text in enumerate(texts[source.name]):
            stats.documents += 1
            yield f"{source.name}:{i}", text

    settings = build.BuildSettings(vocab_size=vocab_size, chat_tokens=False, val_fraction=0.2, block_tokens=256)
    listed = [build.Source(name, f"test:{name}", weight) for name, weight in sources.items()]
    return build.build_data(path, listed, settings, read=read, log=lambda line: None)
