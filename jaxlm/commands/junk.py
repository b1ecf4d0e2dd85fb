"""`jaxlm junk RUN`: strings that a run's model writes unasked, with the small source and the documents that taught it these."""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import shlex
import time
from collections.abc import Iterator

import jax

from jaxlm.config import Config, ConfigError, resolve
from jaxlm.data.batches.open import open_mixture, open_order
from jaxlm.data.shards.manifest import MANIFEST
from jaxlm.devices.processes import from_first, say, working
from jaxlm.eval import junk, model, samples
from jaxlm.host import files
from jaxlm.host.console import costs, print_table
from jaxlm.interop import peft
from jaxlm.run import lineage

_AT_ONCE, _NEW = 64, 64  # texts that are drawn at once, and the tokens of each, at most
_WAIT_S = 3600.0  # for another process that draws texts of this run


def run(config: Config, args: argparse.Namespace) -> int:
    """Prints the strings, the strongest first; keeps them in RUN/junk/STEP.json, and the texts in STEP.jsonl."""
    model.check_run(config, args.config)
    if args.tokens < 1:
        raise ConfigError(f"--tokens={args.tokens}: how many tokens of texts to look at, in all")
    taught = _taught(config)
    if not taught and any(override.startswith("data.dir=") for override in args.overrides):
        raise ConfigError(f"no shards in {config.data.dir}: --config.data.dir=DATA names the text that the model read")
    run = model.restore(config, args.checkpoint, peft.READERS)
    say(run.name)
    place = pathlib.Path(config.workdir, "junk", f"{run.step}.jsonl")
    with contextlib.ExitStack() as stack:
        from_first(lambda: _lock(stack, place.parent))
        texts = from_first(lambda: junk.kept(place.parents[1], place))
        left = max(0, -(-args.tokens // _NEW) - len(texts))
        for batch in _drawn(run, config, taught, config.seed + len(texts), left):
            texts.extend(batch)
            from_first(lambda: files.write_atomically(place, "".join(json.dumps(t) + "\n" for t in texts).encode()))
    if jax.process_index() == 0:
        rows = junk.ranked(junk.texts_with(texts), taught)
        print_table(rows, args.json)
        files.write_atomically(place.with_suffix(".json"), json.dumps({"step": run.step, "strings": rows}).encode())
        if not taught:
            say(f"no shards in {config.data.dir}: ranked by texts alone; --config.data.dir=DATA: what the model read")
        elif not rows:
            say("no string stands out in a source of under a tenth of the text")
        else:
            read = config.workdir if config.program == "pretrain" else str(taught[0].path)
            words = "jaxlm", "trace", read, f"--string={rows[0]['string']}", "--remove=list.jsonl"
            say(f"next: {shlex.join(words)}")
    return 0


def _lock(stack: contextlib.ExitStack, folder: pathlib.Path) -> None:
    folder.mkdir(exist_ok=True)
    stack.enter_context(files.lock(folder, "draws texts in", "run", wait_s=_WAIT_S))


def _taught(config: Config) -> junk.Taught | None:
    """Returns the shards in `data.dir`, and the weight of each source; without shards those of its origin, or None.

    The weights are the tokens that the run draws, by both of its mixtures; of shards that a post-trained run names, their own.
    """
    if (pathlib.Path(config.data.dir) / MANIFEST).is_file():
        return _weighed(config)
    for origin in reversed(lineage.origins(pathlib.Path(config.workdir))):
        base = lineage.config_of(origin.folder)
        if base and (pathlib.Path(base.data.dir) / MANIFEST).is_file():
            return _weighed(resolve(base))
    return None


def _weighed(config: Config) -> junk.Taught:
    if config.program != "pretrain":
        return open_mixture(dataclasses.replace(config.data, sources={}), config.prepare, 0)
    order = open_order(config)
    tokens = order.data.token_counts()
    return order.data, {name: tokens[name] * times for name, times in order.passes(config.train.steps).items()}


def _drawn(run: model.Restored, config: Config, taught: junk.Taught | None, seed: int, count: int) -> Iterator[list]:
    """Yields batches of new texts, each after the beginning of a held-out document; says first how long they take."""
    settings = dataclasses.replace(config.sample, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=_NEW)
    prompts = [*junk.prompts(taught, count, seed)] if taught else []
    prompts += ["" if run.tokenizer.opening else "\n"] * (count - len(prompts))
    with working("drawing texts", count, "texts") as tell, jax.set_mesh(run.mesh):
        for start in range(0, count, _AT_ONCE):
            began, part = time.monotonic(), prompts[start : start + _AT_ONCE]
            new = samples.continue_prompts(run.model, run.variables, run.tokenizer, part, settings, seed + start)
            if start == _AT_ONCE < count - _AT_ONCE:  # the first ones compiled
                left = (time.monotonic() - began) * (count / _AT_ONCE - 2)
                say(f"{count:,} texts to draw: about {costs(left, config.hardware.usd_per_hour)}")
            tell(start + len(part))
            yield [{"prompt": prompt, "text": text} for prompt, text in zip(part, new, strict=True)]
