"""The prompts of a run as its data: which ones a step asks is a pure function of the seed and the number of its batch."""

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Callable

from jaxlm.config import Config, ConfigError, RunError
from jaxlm.data.batches import loader
from jaxlm.data.batches.order import Order
from jaxlm.data.batches.packed import Texts
from jaxlm.data.chats.records import Notes
from jaxlm.data.shards.mixture import Windows
from jaxlm.data.shards.verify import Verifier
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.host.console import Say
from jaxlm.step.objectives import policy
from jaxlm.train.rl.process import Failed, Processes
from jaxlm.train.rl.sources import Item, Made, Reader, Source, Spec, parse_tasks

__all__ = ["Item", "Prompts", "make", "room"]

_KEPT = 4  # batches in memory: the same are asked for again, for the log


@dataclasses.dataclass(frozen=True)
class Prompts(Order):
    """What a run asks, and in which order. Several sources are drawn from in turn.

    Attributes:
      room: the most tokens that a prompt has.
    """

    data: Texts
    sources: tuple[Source, ...]
    seed: int
    count: int
    room: int
    passed_over: Windows = ()

    def parts(self) -> dict[str, str]:
        return {"data": self.data.sha256, "seed": str(self.seed), "prompts": str(self.count)}

    def made(self, number: int, rows: None) -> list[Item]:
        """See `Order`: all prompts of a batch. Raises RunError if a task can't make them."""
        del rows
        draws = range(number * self.count, (number + 1) * self.count)
        kinds, items = len(self.sources), {}
        for kind, source in enumerate(self.sources):
            own = [draw for draw in draws if draw % kinds == kind]
            if own:
                items |= dict(zip(own, source.draw([draw // kinds for draw in own]), strict=True))
        return [items[draw] for draw in draws]

    @functools.cached_property
    def _asked(self) -> Callable[[int], list[Item]]:
        """What draws an item; the newest are remembered. Nothing is read ahead: a judge answers one question at a time."""
        return functools.lru_cache(_KEPT)(loader.dataset(self).__getitem__)

    def step(self, step: int) -> list[Item]:
        return list(self._asked(step - 1))

    def held_out(self, count: int) -> list[Item]:
        """Returns `count` prompts that are never trained on, fewer if there are fewer: the same ones each time."""
        shares = [len(range(kind, count, len(self.sources))) for kind in range(len(self.sources))]
        return [item for source, share in zip(self.sources, shares, strict=True) for item in source.held_out(share)]

    def places(self, step: int) -> list[str]:
        return [item.place for item in self.step(step)]

    def passes(self, steps: int) -> dict[str, float]:
        """Returns source -> how many times a run of `steps` steps goes through it; without those that have no end."""
        draws = steps * self.count / len(self.sources)
        return {source.name: source.passes(draws) for source in self.sources if source.tokens}


def room(config: Config) -> int:
    """Returns the most tokens that a prompt may have: what is left of an answer's share of a row."""
    return config.train.seq_len // policy.in_row(config) - config.rollout.max_new_tokens


def make(config: Config, tokenizer: Coder, process: Processes, say: Say) -> Prompts:
    """Reads the prompts of `data.path`, or opens those of `reward.tasks`. Raises ConfigError; RunError: a task makes none."""
    d, r = config.data, config.reward
    held_out = (d.val_fraction, config.examples.val_path)
    notes = Notes(config.examples.ignore)
    reader = Reader(tokenizer, room(config), config.seed, *held_out, say, notes)
    specs = parse_tasks(r.tasks)
    if not specs and not d.path:
        raise ConfigError(
            f"{config.program} needs prompts: --config.data.path=FILE.jsonl of rows with a prompt or messages, or "
            "--config.reward.tasks=reasoning_gym:chain_sum"
        )
    sources = tuple(_source(spec, number, d.path, process, reader) for number, spec in enumerate(specs))
    sources = sources or (reader.rows(d.path, "data.path"),)
    if r.function:
        try:
            process.ask("takes", sorted({name for source in sources for name in source.columns}))
        except Failed as error:
            raise RunError(f"reward.function={r.function}: {error}") from None
    # The function gets all columns.
    for line in notes.lines({name for source in sources for name in source.columns} if r.function else ()):
        say(line)
    kept = {source.name: source.tokens for source in sources if source.tokens}
    sha256 = hashlib.sha256(" ".join([*(source.sha256 for source in sources), tokenizer.sha256]).encode()).hexdigest()
    texts = Texts(tokenizer, sha256, kept, Verifier(pathlib.Path()), notes.as_before())
    return Prompts(texts, sources, config.seed, config.rollout.prompts, reader.room)


def _source(spec: Spec, number: int, path: str, process: Processes, reader: Reader) -> Source:
    if spec.kind == "gsm8k":
        return reader.rows(spec.name or path, "reward.tasks" if spec.name else "data.path", number)
    return Made(spec, number, process, reader)
