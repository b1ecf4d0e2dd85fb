"""What a run and its origins were trained on, to be searched: shards, or examples as the run's chat template writes them."""

import itertools
import math
import pathlib
import typing
from collections.abc import Iterable, Iterator, Sequence

from jaxlm.config import Config, ConfigError, config_files, resolve
from jaxlm.data.batches import document_rows
from jaxlm.data.batches.open import open_order
from jaxlm.data.shards import search, shards, string_index
from jaxlm.data.shards.search import Group, Match
from jaxlm.data.shards.shards import DataDir, Document
from jaxlm.data.tokenizer import coder
from jaxlm.data.tokenizer.decoder import Decoder
from jaxlm.host.console import say
from jaxlm.run import ledger, lineage, metrics


class Trained(typing.NamedTuple):
    """Texts: shards or, if `data` is None, the examples of a run. `run` is its folder, "" for a data directory alone.

    `order` and `done` are of the run's batches; None and 0 if its steps are not known.
    """

    run: str
    data: DataDir | None
    decode: Decoder
    order: document_rows.Rows | None = None
    done: int = 0
    examples: Sequence[Group] = ()

    def steps(self, match: Match) -> list[int]:
        """Returns the steps at which the run saw a training document."""
        if not self.order or match.split != "train":
            return []
        return document_rows.steps_of(self.order, match.source, match.start, match.tokens, self.done)

    def texts(self, needle: bytes) -> Iterable[Group]:
        """Returns the documents that may hold the string; all documents without an index of it."""
        if self.data is None:
            return self.examples
        index = string_index.open_index(self.data) if len(needle) >= string_index.SHORTEST else None
        return search.texts(self.data, index and index.places(needle))


def of(config: Config) -> Iterator[Trained]:
    """Yields what the run of `config` was trained on, or its data directory; then, of a post-trained run, that of its origins.

    Says what is not here. Raises ConfigError if nothing is.
    """
    if config.program == "pretrain" and (config.origin_state or not config.origin):  # a branch read its origin's shards
        yield _shards(config, math.inf)
        return
    here = 0
    for folder, last in [lineage.Origin(None, math.inf), *reversed(lineage.origins(pathlib.Path(config.workdir)))]:
        try:
            own = resolve(config_files.from_run(folder / "config.json")) if folder else config
            yield _shards(own, last) if own.program == "pretrain" else _examples(own)
            here += 1
        except (ConfigError, OSError) as error:
            say(f"what {folder or config.workdir} was trained on is not here: {config_files.first_line(error)}")
    if not here:
        raise ConfigError(f"nothing that {config.workdir} was trained on is here to be searched")


def steps_done(folder: pathlib.Path) -> int:
    return max(metrics.read(folder / "metrics.jsonl", ledger.read(folder)["rollbacks"]), default=0)


def _shards(config: Config, last: float) -> Trained:
    """Returns the shards of a pretraining run, whose steps after `last` do not count."""
    data, order, folder = shards.open_data(config.data.dir), None, pathlib.Path(config.workdir)
    done = int(min(last, steps_done(folder))) if config.workdir else 0
    if done:
        book = ledger.read(folder)
        if (book["starts"] or [{}])[-1].get("manifest_sha256", data.sha256) == data.sha256:
            order = open_order(config, book["passed_over"])
        else:
            say(f"{data.path} is not the data that {folder} was trained on: no steps")
    return Trained(config.workdir, data, data.decoder(), order, done)


def _examples(config: Config) -> Trained:
    """Returns the chats of a run or, as two documents each, its pairs. Control tokens are spelt."""
    from jaxlm.data.batches import example_rows  # here, because these take a while to import
    from jaxlm.data.chats import chat

    if config.program in ("ppo", "grpo"):
        raise ConfigError("it learnt from its own answers")
    folder, pairs, adapter = pathlib.Path(config.workdir), config.program != "sft", config.adapter
    speaker = chat.dated(coder.load(folder / config_files.TOKENIZER), ledger.moment(folder))
    virtual = adapter.prompt_tokens * (1 + pairs) if adapter.kind == "prompt" else 0
    sizes = example_rows.Sizes(config.seed, config.train.seq_len - virtual, config.train.batch_size)
    options = {"pairs": pairs, "sizes": sizes, "closed": config.program == "reward"}
    packed, groups = example_rows.make(config.data, config.examples, speaker, **options), []
    for split, coded in (("train", packed.train), ("val", packed.val)):
        names = [f"{place}{side}" for place in coded.places for side in ((" chosen", " rejected") if pairs else ("",))]
        bounds = itertools.pairwise(coded.starts_S1.tolist())
        documents = [Document(name, start, stop - start, 0) for name, (start, stop) in zip(names, bounds, strict=True)]
        groups.append(("pairs" if pairs else "chats", split, documents, coded.ids_N))
    pieces = speaker.piece_bytes()
    for piece, number in speaker.controls.items():
        pieces[number] = piece.encode()
    return Trained(config.workdir, None, Decoder(pieces), examples=groups)
