"""Opens weights to start from: the checkpoint of a run, or a folder whose format a reader knows.

No weights are read before a function of the `Origin` is called. `params` and `state` read each leaf straight into its shards.

A run that trained an adapter holds no parameters of its own. So its base, perhaps such a run too, is opened as well.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
import typing
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxlm.config import AdapterConfig, Config, ConfigError, ModelConfig, RunError, config_files, resolve
from jaxlm.data.batches.order import Order, check_fingerprint
from jaxlm.data.chats import chat
from jaxlm.data.shards import shards
from jaxlm.data.shards.manifest import MANIFEST
from jaxlm.data.tokenizer import coder
from jaxlm.devices import tree
from jaxlm.host import files
from jaxlm.models import adapters, quantized
from jaxlm.run import workdir
from jaxlm.run.checkpoints import keep, meta, store
from jaxlm.run.checkpoints.damage import CorruptCheckpointError
from jaxlm.run.checkpoints.meta import MOMENTS
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.run.metrics import Scores
from jaxlm.step import optim
from jaxlm.step.objectives.base import Variables
from jaxlm.step.parts import Parts
from jaxlm.step.state import TrainState

Leaf = Callable[[str], np.ndarray]  # name -> one parameter, on the host

_VOCABULARY_AXIS = {"embed/embedding": 0, "head/kernel": 1}
_SPREAD = 0.1  # the size of the noise, as a share of each feature's standard deviation in the old rows
_COMMON = 5000  # the first pieces of a vocabulary are the commonest ones


@dataclasses.dataclass(frozen=True)
class Origin:
    """Weights to start from.

    Attributes:
      provenance: identifies the weights in the ledger: `path`, and `step` for a run's checkpoint.
      params: (shapes, shardings) -> the model's parameters. Raises RunError if they are damaged.
      leaf: name -> one parameter, on the host, in its stored type. Raises RunError if it is damaged.
      state: (shapes, shardings) -> the train state; None for bare weights, a run of an adapter, or a grown vocabulary.
      meta: () -> the metadata of a run's checkpoint; None for bare weights.
      digest: () -> a hash of the parameters' values, whatever folder they are in.
      trained: () -> the variables that the run trained besides the parameters, on the host: an adapter, scalar heads.
      adapter: the adapter whose variables are in `trained`; None if there is none.
    """

    config: Config
    tokenizer: Callable[[], coder.Coder]
    provenance: dict[str, str | int]
    params: Callable[[dict, dict], dict]
    leaf: Callable[[str], np.ndarray]
    state: Callable[[TrainState, TrainState], TrainState] | None = None
    meta: Callable[[], dict] | None = None
    digest: Callable[[], str] = str
    trained: Callable[[], Variables] = dict
    adapter: adapters.Adapter | None = None

    def identity(self) -> dict[str, str | int]:
        """Returns the fields by which an adapter's checkpoint identifies its base: `path`, `digest`, for a run also `step`."""
        return self.provenance | {"digest": self.digest()}

    def grown(self, model: ModelConfig) -> "Origin":
        """Returns the origin itself if it has `model`'s vocabulary size or more; else a copy with new rows (`grown_leaf`)."""
        old = self.config.model
        if old.vocab_size >= model.vocab_size:
            return self
        new = dataclasses.replace(old, vocab_size=model.vocab_size)
        return self.reading(
            grown_leaf(self.leaf, old, new),
            config=dataclasses.replace(self.config, model=new),
            digest=lambda: _hash([self.digest(), new.vocab_size]),
        )

    def with_prompt(self, settings: AdapterConfig, tokenizer: coder.Coder, seed: int) -> "Origin":
        """Returns the origin with initial vectors for prompt tuning; itself if it has an adapter, or if `kind` is another.

        The vectors are the embedding's rows of `settings.prompt_text`'s tokens, repeated or cut to `settings.prompt_tokens`;
        without a text, of random common tokens (arXiv:2104.08691, section 3.2).
        """
        if settings.kind != "prompt" or self.adapter:
            return self
        common = [i for i, piece in enumerate(tokenizer.piece_bytes()[:_COMMON]) if piece]
        named, count = tokenizer.encode(settings.prompt_text), settings.prompt_tokens
        chosen = np.resize(named, count) if named else np.random.default_rng(seed).choice(common, count)

        def trained() -> Variables:
            return {"prompt": {"embed": {"prompt": self.leaf("embed/embedding")[chosen]}}}

        return dataclasses.replace(self, trained=trained)

    def merged(self) -> "Origin":
        """Returns the origin with its adapter merged into the parameters; a prompt's vectors can't be: `trained` keeps them."""
        if self.adapter is None:
            return self
        added, settings = functools.cache(self.trained), self.adapter.settings

        def digest() -> str:
            named = tree.named_leaves({name: part for name, part in added().items() if name in adapters.MERGED})
            return _hash([self.digest(), {name: hashlib.sha256(x.tobytes()).hexdigest() for name, x in named}])

        return self.reading(
            merged_leaf(self.leaf, self.adapter, added),
            digest=digest,
            trained=lambda: {name: part for name, part in added().items() if name not in adapters.MERGED},
            adapter=adapters.of(settings, ()) if settings.kind == "prompt" else None,
        )

    def reading(self, leaf: Leaf, **changes: typing.Any) -> "Origin":
        """Returns the origin with other parameters, those of `leaf`, without a state and with further changes."""

        def params(abstract: dict, shardings: dict) -> dict:
            return tree.nested(quantized.placed(leaf, abstract, shardings))

        return dataclasses.replace(self, params=params, leaf=leaf, state=None, **changes)

    def branch(self, parts: Parts, order: Order) -> tuple[TrainState, Variables, dict]:
        """Returns (state, frozen variables, meta) for a run that continues this state; `meta` lists the skipped batches.

        Raises:
          ConfigError: the origin has no state; model, optimizer or order of batches differ, except for a final mixture that
            begins here or later; or the learning rate is 0 at all later steps.
          RunError: the checkpoint is damaged.
        """
        c = parts.config
        if self.state is None or self.meta is None:
            raise ConfigError(f"{c.origin} holds weights and no state to branch from: set origin_state=False")
        workdir.check_same_model(pathlib.Path(c.origin), c.model)
        workdir.check_same_optimizer(pathlib.Path(c.origin), c.optim)
        meta, done = self.meta(), self.provenance["step"]
        passed_over = meta.get("passed_over", [])
        now = order.passing_over(passed_over).fingerprint()
        check_fingerprint(meta["fingerprint"], now, done, passed_over, branch=True)
        if done < c.train.steps:
            optim.check_learns(c.optim, c.train.steps, done + 1)
        state = self.state(parts.abstract, parts.shardings)
        return state, parts.load_frozen(self), {"passed_over": passed_over}


def grown_leaf(leaf: Leaf, old: ModelConfig, new: ModelConfig) -> Leaf:
    """Returns `leaf` with rows added up to the vocabulary of `new`. The old rows keep every bit."""

    def grown(name: str) -> np.ndarray:
        table = leaf(name)
        if name not in _VOCABULARY_AXIS:
            return table
        axis = _VOCABULARY_AXIS[name]
        rows = np.moveaxis(table, axis, 0)[: old.vocab_size]
        padding = np.zeros((new.padded_vocab_size - new.vocab_size, rows.shape[1]), rows.dtype)
        added = _new_rows(rows, new.vocab_size - old.vocab_size).astype(rows.dtype)
        return np.ascontiguousarray(np.moveaxis(np.concatenate([rows, added, padding]), 0, axis))

    return grown


def _new_rows(rows_VxD: np.ndarray, count: int) -> np.ndarray:
    """Returns the rows of new ids, float64 [count, D], computed on the host so that they are the same on every mesh."""
    # The mean of all old rows, so that at first a new token is as likely as an average one (Hewitt 2021, "Initializing New Word
    # Embeddings for Pretrained Language Models"), plus a little noise by which the new tokens differ. They depend on the
    # parameters alone, not on the run's seed: whoever grows the same base gets the same model, and an adapter fits it.
    rows_VxD = rows_VxD.astype(np.float64)
    noise = np.random.default_rng(len(rows_VxD)).standard_normal((count, rows_VxD.shape[1]))
    return rows_VxD.mean(0) + _SPREAD * rows_VxD.std(0) * noise


def merged_leaf(leaf: Leaf, adapter: adapters.Adapter, trained: Callable[[], Variables]) -> Leaf:
    """Returns a reader of the base's parameters, which `leaf` reads, with the adapter merged into them.

    An adapter that was trained on quantised kernels is added to the dequantised kernels.
    """
    variables = functools.cache(trained)

    def merged(name: str) -> np.ndarray:
        base = quantized.rounded(name, leaf(name), adapter.settings.quantize)
        params = adapters.merge(tree.nested([(name, base)]), variables(), adapter)
        return np.asarray(dict(tree.named_leaves(params))[name])

    return merged


Reader = Callable[[pathlib.Path], Origin | None]  # None: the folder is of another format


def open(
    path: str | pathlib.Path, checkpoint: str | int = "latest", readers: Sequence[Reader] = (), *, merge: bool = True
) -> Origin:
    """Opens the weights in a folder: a jaxlm run, or a format that one of the readers knows. Raises ConfigError.

    Args:
      merge: True to merge a run's adapter into the parameters (the vectors of prompt tuning can't be); False for the base's
        parameters, and the adapter as `trained`.
    """
    folder = files.expanded(path)
    if (folder / "checkpoints").is_dir() and (folder / "config.json").is_file():
        return _run(folder, checkpoint, readers, merge)
    for read in readers:
        if origin := read(folder):
            if checkpoint != "latest":
                raise ConfigError(f"{path} is a model, not a run: it has no checkpoint {checkpoint}; give latest")
            return origin.merged() if merge else origin
    if not folder.is_dir():
        raise ConfigError(f"no folder {path}")
    absent = "config.json" if not (folder / "config.json").is_file() else "checkpoints: train first"
    raise ConfigError(f"no run to begin from in {path}: it has no {absent}")


def begin(config: Config, readers: Sequence[Reader] = ()) -> Origin | None:
    """Opens the origin of a config, grown to the vocabulary of the config's model; None if it has no origin."""
    if not config.origin:
        return None
    return open(config.origin, config.origin_checkpoint, readers, merge=config.origin_merge).grown(config.model)


def averaged(parts: Sequence[Origin], shares: Sequence[float]) -> Origin:
    """Returns the origin whose parameters are the parts' weighted sum: added in float64, stored in their own type."""

    def leaf(name: str) -> np.ndarray:
        first = parts[0].leaf(name)
        total = shares[0] * first.astype(np.float64)
        for part, share in zip(parts[1:], shares[1:], strict=True):
            total += share * part.leaf(name)
        return total.astype(first.dtype)

    return parts[-1].reading(leaf, digest=str, meta=None)


def averaged_in_training(run: Origin) -> Origin | None:
    """Returns the origin whose parameters are the moving average that a run's checkpoint holds; None if it holds none."""
    if not any(name.startswith(f"{meta.AVERAGE}params/") for name in run.meta()["digests"]):
        return None
    place = pathlib.Path(run.provenance["path"], "checkpoints", str(run.provenance["step"]))
    return run.reading(store.reader(place, f"{meta.AVERAGE}params"), digest=str, meta=None)


def pretrained_on(folder: str) -> str:
    """Returns the data directory on which the model in `folder`, or the first of its origins, was pretrained; "" if unknown."""
    while (file := pathlib.Path(folder) / "config.json").is_file() and config_files.find(f"{folder}/").kind == "run":
        saved = config_files.from_run(file)
        if saved.program == "pretrain":
            data = pathlib.Path(saved.data.dir or file.parent / "data")
            return str(data) if (data / MANIFEST).is_file() else ""
        if saved.replay.path:
            return saved.replay.path
        folder = saved.origin
    return ""


def better(config: Config, checkpoint: str | int) -> str:
    """Returns a line for the user if `checkpoint` is "latest" and a post-training run has a better checkpoint; else ""."""
    if checkpoint != "latest" or config.program == "pretrain":
        return ""
    folder, name = pathlib.Path(config.workdir), config.checkpoint.best_metric
    steps = keep.steps(folder / "checkpoints")
    best = keep.best(steps, Scores(config.checkpoint).read(folder))
    if best in (None, steps[-1]):
        return ""
    return f"step {best:,} is the best by {name}, and this is the latest, {steps[-1]:,}: --checkpoint=best takes it"


def check_base(begun_with: Mapping[str, str | int], base: Mapping[str, str | int], run: str | pathlib.Path) -> None:
    """Raises ConfigError if an adapter's `base` has another digest than `begun_with`, the base with which its run began."""
    if base and begun_with.get("digest") != base["digest"]:
        raise ConfigError(
            f"{_named(base)} is not the model that {run} began with, {_named(begun_with)}: its parameters differ; "
            "give that one, or a copy of it, by --config.origin=FOLDER"
        )


def speaker(config: Config) -> coder.Coder:
    """Returns a begun post-training run's own tokenizer, else a new one. Raises ConfigError if that has no chat template."""
    folder, template = pathlib.Path(config.workdir), config.examples.template
    if config.workdir and keep.begun(folder / "checkpoints") and (folder / workdir.TOKENIZER).is_dir():
        return coder.load(folder / workdir.TOKENIZER)
    new = chat.settled(chat.grown(coder.load(config.data.tokenizer), template))
    try:
        chat.template(new)
    except ConfigError:
        raise ConfigError(
            f"{config.origin} has no chat template: give it one by --config.examples.template=chatml (with tokens of its own), "
            "plain (without) or FILE (Jinja), or begin with a chat model"
        ) from None
    return new


def other_template(config: Config, own: coder.Coder) -> str:
    """Returns a line if the origin or `examples.template` now gives another template than the run's own; else ""."""
    with contextlib.suppress(ConfigError):  # the origin's template is no longer needed
        now = chat.grown(coder.load(config.data.tokenizer), config.examples.template)
        if chat.template(now) != chat.template(own):
            place = f"{config.workdir}/{workdir.TOKENIZER}"
            return f"the run keeps the chat template that it began with, in {place}; origin or examples.template has another"
    return ""


def prompted(tokenizer: coder.Coder, config: Config) -> coder.Coder:
    """Returns the tokenizer for the config's model; with prompt tuning it starts each text with the virtual tokens."""
    if config.adapter.kind != "prompt":
        return tokenizer
    return coder.Prompted(tokenizer, config.adapter.prompt_tokens, config.model.vocab_size)


def trained_rows(settings: AdapterConfig, tokenizer: coder.Coder) -> tuple[int, ...]:
    """Returns the ascending ids of `settings.rows`, the tokens whose rows are trained; "auto": the template's new tokens."""
    named = [p for piece in settings.rows for p in (chat.own_rows(tokenizer) if piece == "auto" else (piece,))]
    return tuple(sorted({tokenizer.id_of(piece) for piece in named}))


def _run(folder: pathlib.Path, checkpoint: str | int, readers: Sequence[Reader], merge: bool) -> Origin:
    config = resolve(config_files.from_run(folder / "config.json"))
    saved = Checkpointer(folder / "checkpoints", scores=Scores(config.checkpoint).read(folder), read_only=True)
    step = saved.find(checkpoint)
    place = saved.directory / str(step)

    def params(abstract: dict, shardings: dict) -> dict:
        try:
            return saved.restore_params(step, abstract, shardings)
        except CorruptCheckpointError as error:
            others = [str(other) for other in saved.steps() if other != step]
            hint = f"; try --checkpoint={others[-1]}" if others else ""
            raise RunError(f"{error}{hint}") from error

    own = Origin(
        config=config,
        tokenizer=lambda: prompted(_tokenizer(folder, config.data.dir), config),
        provenance={"path": str(folder.resolve()), "step": step},
        params=params,
        state=lambda abstract, shardings: saved.restore(step, abstract, shardings),
        meta=lambda: store.read_meta(place),
        leaf=store.reader(place),
        digest=lambda: _hash({n: d for n, d in store.read_meta(place)["digests"].items() if n.startswith("params/")}),
        trained=lambda: _trained(place, store.read_meta(place)),
    )
    return own if config.adapter.kind == "none" else _with_base(own, folder, readers, merge)


def _with_base(run: Origin, folder: pathlib.Path, readers: Sequence[Reader], merge: bool) -> Origin:
    """Returns the run of an adapter with its base's parameters; if `merge`, the adapter is merged into them."""
    begun_with = run.meta().get("base", {})
    config = dataclasses.replace(run.config, origin=_found(run.config.origin, folder))
    if "step" in begun_with:
        config = dataclasses.replace(config, origin_checkpoint=str(begun_with["step"]))
    base = begin(config, readers)
    if base is None:
        raise ConfigError(f"{folder} trained an adapter, and its config names no base: give --config.origin=FOLDER")
    check = functools.cache(lambda: check_base(begun_with, base.identity(), folder))

    def leaf(name: str) -> np.ndarray:
        check()
        return base.leaf(name)

    adapter = adapters.of(config.adapter, trained_rows(config.adapter, run.tokenizer()))
    apart = run.reading(leaf, digest=base.digest, adapter=adapter)
    return apart.merged() if merge else apart


def _trained(checkpoint: pathlib.Path, meta: dict) -> Variables:
    """Returns a checkpoint's collections other than the parameters and the train state, on the host."""
    items = sorted({name.partition("/")[0] for name in meta["digests"]} - {"params", "train", MOMENTS})
    read = {item: store.reader(checkpoint, item) for item in items}
    named = [name.partition("/")[::2] for name in meta["digests"]]
    return {item: tree.nested((name, read[item](name)) for of, name in named if of == item) for item in items}


def _found(origin: str, run: pathlib.Path) -> str:
    """Returns `origin`, a base's folder; if it is gone, the folder of the same name next to the run, if there is one."""
    beside = run.resolve().parent / pathlib.Path(origin).name
    return str(beside) if not pathlib.Path(origin).is_dir() and beside.is_dir() else origin


def _named(identity: Mapping[str, str | int]) -> str:
    step = f", step {identity['step']}" if "step" in identity else ""
    return f"{identity.get('path', 'an unknown model')}{step}"


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _tokenizer(folder: pathlib.Path, data_dir: str) -> coder.Coder:
    own = folder / workdir.TOKENIZER
    return coder.load(own) if own.is_dir() else shards.open_data(data_dir).tokenizer()
