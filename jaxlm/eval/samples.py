"""Samples from fixed prompts: the quickest way to see what a model has learned, and what it has caught."""

import json
import pathlib
import typing

import jax

from jaxlm.config import Config
from jaxlm.data.shards import DataDir
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.models import generate


def continue_prompts(
    config: Config, model: typing.Any, params: typing.Any, tokenizer: Tokenizer, prompts: typing.Sequence[str]
) -> list[str]:
    """The text that follows each prompt, up to the end of the document or `sample.max_new_tokens`."""
    s = config.sample
    new = generate.generate(
        model,
        params,
        _encode(tokenizer, prompts),
        max_new_tokens=s.max_new_tokens,
        temperature=s.temperature,
        top_k=s.top_k,
        top_p=s.top_p,
        stop_ids=(tokenizer.eos_id,),
        seed=config.seed,
    )
    return [tokenizer.decode([i for i in ids if i != tokenizer.eos_id]) for ids in new]


def _encode(tokenizer: Tokenizer, prompts: typing.Sequence[str]) -> list[list[int]]:
    """Each prompt begins a document, as in training: the end-of-document token goes before it."""
    return [[tokenizer.eos_id, *tokenizer.encode(prompt)] for prompt in prompts]


def make(
    config: Config, model: typing.Any, data: DataDir, workdir: pathlib.Path
) -> typing.Callable[[typing.Any, int], list[str]]:
    """Returns `(variables, step) -> lines to show`, which also writes WORKDIR/samples/<step>.jsonl.

    Raises:
      ConfigError: a prompt of the config that can't be continued, before anything is trained.
    """
    tokenizer = data.tokenizer()
    generate.check_prompts(config.model, _encode(tokenizer, config.sample.prompts))

    def sample(variables: typing.Any, step: int) -> list[str]:
        if not config.sample.prompts:
            return []
        texts = continue_prompts(config, model, variables["params"], tokenizer, config.sample.prompts)
        if jax.process_index():
            return []
        folder = workdir / "samples"
        folder.mkdir(exist_ok=True)
        with open(folder / f"{step}.jsonl", "w", encoding="utf-8") as file:
            for prompt, text in zip(config.sample.prompts, texts, strict=True):
                file.write(json.dumps({"step": step, "prompt": prompt, "text": text}, ensure_ascii=False) + "\n")
        return [f"step {step}  [{p}]{t}" for p, t in zip(config.sample.prompts, texts, strict=True)]

    return sample
