"""A data directory whose small source repeats three words in a tenth of its documents."""

import random

from jaxlm.data.shards import build

PLANTED = ("PersonX", "lorem", "ipsum")
SMALL, LARGE = "alpha bravo gamma delta epsilon zulu kappa sigma", "one two three four five six seven eight nine ten"


def make(path):
    """Builds `path`: the source `small` (3 of 100), with the words five times or more in each tenth document, and `large`.

    `shared` is repeated in those documents and stands once in each tenth of the other source; `twofold` is repeated in two
    documents.
    """
    rng, texts = random.Random(0), {}
    for name, words in (("small", SMALL), ("large", LARGE)):
        texts[name] = [" ".join(rng.choices(words.split(), k=40)) for _ in range(60)]
    for number in range(0, 60, 10):
        texts["small"][number] += f" {' '.join(PLANTED)} shared" * (10 - number // 10)
        texts["large"][number] += " shared"
    for number in range(60):
        texts["large"][number] += " PersonXs"  # another word
    for number in (1, 2):
        texts["small"][number] += " twofold" * 5

    def read(source, stats):
        for i, text in enumerate(texts[source.name]):
            stats.documents += 1
            yield f"{source.name}:{i}", text

    settings = build.BuildSettings(vocab_size=320, chat_tokens=False, val_fraction=0.2, block_tokens=256)
    listed = [build.Source(name, f"test:{name}", weight) for name, weight in (("small", 3.0), ("large", 97.0))]
    return build.build_data(path, listed, settings, read=read, log=lambda line: None)
