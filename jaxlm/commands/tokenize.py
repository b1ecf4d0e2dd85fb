"""`jaxlm tokenize`: makes tokenizer, shards and manifest, shows how well the tokenizer fits, sweeps vocabulary sizes."""

import argparse
import pathlib
import shlex

from jaxlm.commands import data_report
from jaxlm.config import Config, ConfigError
from jaxlm.corpus import documents, prepare
from jaxlm.corpus.sources.units import iterate_documents
from jaxlm.data.batches import which_data
from jaxlm.data.batches.open import make_data, open_mixture
from jaxlm.data.shards import removal, search, shards, tokenizer_fit, vocabulary
from jaxlm.data.shards.mixture import weights_of
from jaxlm.data.tokenizer import coder
from jaxlm.host import console, files
from jaxlm.host.console import print_table, say

EMBEDDED = "embedded:prose"
_SWEEP_BYTES = 32 << 20
_SHOWN = ("tokens_per_word", "byte_fallback", "unused_pieces", "tokens_saved")


def run(config: Config, args: argparse.Namespace) -> int:
    """Tokenizes the texts into `data.dir`, unless that is done. Prints each source's size and how the tokenizer fits."""
    if not config.data.dir:
        raise ConfigError("no folder for the data: give --config.data.dir=DIR")
    if args.without or args.out or args.held_out:
        return _without(config, args)
    if args.sweep:
        with console.working("training a tokenizer of each size"):
            rows = _sweep(config, args.sweep)
        print_table(rows, args.json)
        return 0
    which_data.check_held_out(config, args.overrides)
    make_data(config.data, config.prepare, config.engine, vocabulary.required(config), say)
    data, mixture = open_mixture(config.data, config.prepare, vocabulary.required(config))
    with console.working("measuring how well the tokenizer fits"):
        fit = _fit(config, data, args.reference)
    rows = []
    for source, fitted in zip(data.sources, fit["sources"], strict=True):
        train, val = data.entry(source, "train"), data.entry(source, "val")
        row = {
            "source": source,
            "weight": mixture.get(source, 0.0),
            "documents": train["documents"] + val["documents"],
            "train_tokens": train["tokens"],
            "val_tokens": val["tokens"],
            "bytes_per_token": (train["bytes"] + val["bytes"]) / (train["tokens"] + val["tokens"]),
        }
        rows.append(
            row | {key: value for key, value in fitted.items() if key not in row and (args.json or key in _SHOWN)}
        )
    print_table(rows, args.json)
    say(_summary(fit))
    if (data.path / prepare.MANIFEST).is_file():
        done = prepare.open_prepared(data.path)
        data_report.write(config, done, data_report.inspect(config, done))
    say(f"next: {which_data.training(args.config, args.overrides)}")
    return 0


def _without(config: Config, args: argparse.Namespace) -> int:
    if not (args.without and args.out):
        raise ConfigError("--without=FILE (made by jaxlm trace --remove=FILE) and --out=NEW need each other")
    data, out = shards.open_data(config.data.dir), files.expanded(args.out)
    with console.working(f"writing {out}", search.tokens_to_search(data), "tokens") as tell:
        removal.without(data, files.expanded(args.without), out, args.held_out, tell, say)
    made = shards.open_data(out)
    for source, split in search.streams(made):
        before, after = (each.entry(source, split)["documents"] for each in (data, made))
        if split == "train" or after < before:
            what = "documents to train on" if split == "train" else "held-out documents"
            say(f"{source}: {after:,} of {before:,} {what} stay")
    say(f"next: jaxlm train CONFIG {shlex.quote(f'--config.data.dir={out}')}")
    return 0


def _fit(config: Config, data: shards.DataDir, wanted: str) -> dict:
    """Returns the report of `tokenizer_fit`, cached in DATA/tokenizer_fit.json for the same data and reference."""
    paths = [source.path for source in (config.data.sources or config.prepare.sources).values()]
    embedded = any(path.startswith("embedded:") for path in paths)
    name = "" if wanted == "none" or (wanted == EMBEDDED and embedded) else wanted
    about = {"data": data.sha256, "reference": name}
    return data_report.remembered(
        data.path / data_report.FIT, about, lambda: tokenizer_fit.report(data, _reference(config, data, name))
    )


def _reference(config: Config, data: shards.DataDir, name: str) -> coder.Coder | None:
    if name != EMBEDDED:
        return coder.load(name) if name else None
    try:
        return tokenizer_fit.general_tokenizer(data, config.data.tokenizer_model)
    except ConfigError as error:
        say(f"no general tokenizer to compare with: {error}")
        return None


def _summary(fit: dict) -> str:
    t, lossy = fit["traits"], sum(row["lossy_documents"] for row in fit["sources"])
    back = (
        f"{lossy} documents of the sample do NOT come back as they went in" if lossy else "all text comes back exactly"
    )
    indents = f"an indent of 4 spaces adds {t['indent_4']}, of 8 {t['indent_8']}, a tab {t['tab']}"
    unused = f"{fit['unused_pieces']:,} of {fit['pieces']:,} pieces are unused"
    return f"tokenizer: 2024 is {t['tokens_of_2024']} tokens; {indents}; a blank line is {t['blank_line']}; {unused}; {back}"


def _sweep(config: Config, wanted: str) -> list[dict]:
    try:
        sizes = [int(size) for size in wanted.split(",")]
    except ValueError:
        raise ConfigError(f"--sweep={wanted}: give sizes of the vocabulary, as in --sweep=4096,8192,16384") from None
    root, model, d = pathlib.Path(config.data.dir), config.model, config.data
    data = shards.open_data(root) if (root / shards.MANIFEST).is_file() else None
    return tokenizer_fit.sweep(
        _texts(config, data),
        sizes,
        d_model=model.d_model,
        tied=model.tie_embeddings,
        model_type=d.tokenizer_model,
        chat_tokens=d.chat_tokens,
        corpus_bytes=data and sum(data.entry(source, "train")["bytes"] for source in data.sources),
    )


def _texts(config: Config, data: shards.DataDir | None) -> list[str]:
    """Returns up to 32 MB of text, shared among sources by weight: from shards, else the sources, else prepared documents."""
    d, root = config.data, pathlib.Path(config.data.dir)
    prepared = {name: files for name, files in documents.find(root).items() if files}
    paths = {name: source.path for name, source in d.sources.items() if source.path}
    names = data.sources if data else paths or prepared
    if not names:
        raise ConfigError(
            f"no text to train on: {root} holds neither data nor prepared documents, data.sources has no path"
        )
    weights = weights_of(d.sources or config.prepare.sources, list(names))
    texts = []
    for name, weight in weights.items():
        left = int(_SWEEP_BYTES * weight / (sum(weights.values()) or 1.0))
        if data:
            texts += tokenizer_fit.held_out(data, name, left, "train")[0]
        elif paths:
            read = iterate_documents(paths[name], text_key=d.text_key, tfds_dir=d.tfds_dir or None, max_bytes=left)
            texts += [text for _, text in read]
        else:
            texts += [text for _, text in documents.within(documents.read_texts(prepared[name]), max(1, left))]
    return texts
