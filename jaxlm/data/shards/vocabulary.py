"""Chooses the size of a vocabulary where `model.vocab_size` is 0: the data's own, or one by the amount of text."""

import pathlib
from collections.abc import Callable, Iterable

from jaxlm.config import Config, with_keys
from jaxlm.corpus import recipes
from jaxlm.data.shards import shards
from jaxlm.data.tokenizer import coder
from jaxlm.data.tokenizer.ours import Tokenizer
from jaxlm.data.tokenizer.train import VocabularyTooLarge, train_tokenizer
from jaxlm.host import console

LEAST, MOST = 1024, 32_768
BYTES_PER_ID = 1000
RULE = f"a power of two from {LEAST:,} to {MOST:,}, at most one id per kB"


def choose(n_bytes: int) -> int:
    return min(MOST, max(LEAST, 1 << max(0, (n_bytes // BYTES_PER_ID).bit_length() - 1)))


def train(
    sample: Callable[[], Iterable[str]], n_bytes: int, say: console.Say, *, chat_tokens: bool, model_type: str
) -> Tokenizer:
    """Trains a tokenizer on a sample of `n_bytes` of text, of the size by `choose` or the largest that the sample supports."""
    size = choose(n_bytes)
    say(f"vocabulary: {size:,} ids for {console.size(n_bytes)} of text ({RULE}); --config.model.vocab_size sets it")
    kinds = {"chat_tokens": chat_tokens, "model_type": model_type}
    try:
        return train_tokenizer(sample(), vocab_size=size, **kinds)
    except VocabularyTooLarge as error:
        if not error.largest:
            raise
        size = error.largest
    say(f"vocabulary: {size:,} ids, the most that this text supports")
    return train_tokenizer(sample(), vocab_size=size, **kinds)


def with_size(config: Config, vocab_size: int) -> Config:
    """Returns the config with this `model.vocab_size`, if its own is 0."""
    return config if config.model.vocab_size else with_keys(config, model={"vocab_size": vocab_size})


def required(config: Config) -> int:
    """Returns the size that the data's vocabulary must have; 0 = any, as an imported model may have more rows."""
    return 0 if config.origin else config.model.vocab_size


def assumed(config: Config, say: console.Say) -> Config:
    """Returns the config with a size and says why: the data's, the tokenizer's, what would be chosen, or the largest."""
    if config.model.vocab_size:
        return config
    size, why = known(config)
    if not size:
        size, why = MOST, "tokens are assumed, since there is no data yet"
    say(f"model.vocab_size=0: {size:,} {why}")
    return with_size(config, size)


def known(config: Config) -> tuple[int, str]:
    """Returns (size, whose it is): the data's, the tokenizer's, or what prepared documents will get; (0, "") without any."""
    root = pathlib.Path(config.data.dir)
    if config.data.dir and (root / shards.MANIFEST).is_file():
        return shards.open_data(root).vocab_size, f"tokens, those of the data in {root}"
    if config.data.tokenizer:
        return coder.load(config.data.tokenizer).vocab_size, f"tokens, those of {config.data.tokenizer}"
    if config.data.dir and (root / recipes.MANIFEST).is_file():
        from jaxlm.corpus import prepare  # here, because its libraries take a second to import

        sources = prepare.open_prepared(root).manifest["sources"].values()
        size = choose(sum(source["kept"]["bytes"] for source in sources))
        return size, f"tokens, as will be chosen for the documents in {root}"
    return 0, ""
