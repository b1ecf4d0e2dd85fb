"""Small chats and pairs for tests: a tokenizer with ChatML's tokens, files of examples, and their packed data."""

import dataclasses
import json
import random

import tiny_data
import tiny_models

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.data.batches import example_rows
from jaxlm.data.tokenizer.ours import Tokenizer
from jaxlm.data.tokenizer.train import train_tokenizer
from jaxlm.run.checkpoints import saving

WORDS = tiny_data.WORDS.split()


def tokenizer(chat_tokens: bool = True) -> Tokenizer:
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=12)) for _ in range(200)]
    return train_tokenizer(texts, vocab_size=320, chat_tokens=chat_tokens)


def words(rng: random.Random, most: int = 12) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def chats(path, number: int = 40, turns: int = 1, seed: int = 0) -> str:
    """Writes chats of up to `turns` turns, no two with the same question; returns the path."""
    rng, lines = random.Random(seed), []
    for i in range(number):
        said = [[("user", f"{i} {words(rng)}"), ("assistant", words(rng))] for _ in range(rng.randint(1, turns))]
        lines.append({"messages": [{"role": role, "content": text} for turn in said for role, text in turn]})
    return _write(path, lines)


def pairs(path, number: int = 40, seed: int = 0) -> str:
    """Writes pairs, no two with the same prompt, each with a margin; returns the path."""
    rng, lines = random.Random(seed), []
    for i in range(number):
        pair = {"prompt": f"{i} {words(rng)}", "chosen": f"{words(rng)} sun", "rejected": f"{words(rng)} sea"}
        lines.append(pair | {"margin": i / 4})
    return _write(path, lines)


def base(folder, **model):
    """Writes a base of ours: random parameters, data, a tokenizer without ChatML's tokens; returns its folder."""
    data = tiny_data.make(folder / "data", {"a": 1.0, "b": 1.0})
    sizes = [f"model.{name}={value}" for name, value in (tiny_models.BASE | {"vocab_size": 300} | model).items()]
    c = config.resolve(config_files.load("base", [f"workdir={folder}", f"data.dir={data.path}", *sizes]))
    (folder / "config.json").write_text(config.to_json(c))
    params = tiny_models.random_params(models.build(c.model, "xla"))
    saving.save_weights(folder / "checkpoints", lambda: params, dataclasses.asdict(c))
    return folder


def _write(path, lines) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def make(path: str, coder, *, pairs: bool = False, sizes=(0, 192, 4), overrides=(), **options) -> example_rows.Packed:
    """The packed data of a file of examples, with keys of the config as `overrides`; `options` go to `packed.make`."""
    c = config.resolve(config_files.load("base", [f"data.path={path}", "data.val_fraction=0.2", *overrides]))
    return example_rows.make(c.data, c.examples, coder, pairs=pairs, sizes=example_rows.Sizes(*sizes), **options)
