"""Sets the keys of a config that must be as in its origin: shapes, meaning of the weights, token ids. Needs no JAX."""

import pathlib
from collections.abc import Callable, Sequence

from ml_collections import config_dict

from jaxlm.config import CHAT_TOKENS, GROWS, ConfigError, config_files
from jaxlm.data.chats import chat
from jaxlm.data.shards.manifest import MANIFEST
from jaxlm.data.tokenizer import coder
from jaxlm.host import console, files
from jaxlm.interop import hf_config, peft_config

_SIZES = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size")
_FIXED = ("family", *_SIZES, "tie_embeddings", "bias", "qkv_bias", "qk_norm", "norm_eps")
# Taken over too, unless the command line sets them to extend the context.
_ROPE = ("theta", "scaling", "factor", "low_freq_factor", "high_freq_factor", "original_max_len")
_FREE_ADAPTER_KEYS = ("dropout", "without_rows", "prompt_text")  # the arrays do not depend on these keys
_DERIVED = ("n_kv_heads", "head_dim", "vocab_size")  # 0 means: derived from other keys


def take(config: config_dict.ConfigDict, overrides: Sequence[str], say: Callable[[str], None]) -> None:
    """Takes the model and the tokenizer over from `config.origin`, if it is set; says so in a line.

    `config` is changed in place, and has the `overrides` (KEY=VALUE of the command line) already.

    Raises ConfigError if the origin can't be used, or an override or the data does not fit the origin.
    """
    if not config.origin or config.origin_state:
        return
    typed = _typed(overrides)
    if config.phases.shrink:
        raise ConfigError(f"phases.shrink creates a model, config.origin={config.origin} has one: set only one")
    folder = _folder(config)
    home = peft_config.model_folder(folder)
    keys, lines, remarks = _keys(home)
    tokenizer = home if hf_config.is_model(home) else _tokenizer_of_run(home)
    if remarks and _begun(config):  # perhaps by a version that ignored a tied model's own head
        saved = config_files.from_run(pathlib.Path(config.workdir) / "config.json")
        keys["tie_embeddings"], remarks = saved.model.tie_embeddings, []
    for line in (*lines, *remarks):
        say(line)
    _set_model(config, keys, typed, ends=bool(lines) or keys["family"] == "gpt2")
    _set_tokenizer(config, tokenizer, typed)
    _set_adapter(config, folder, typed)
    if config.program != "pretrain" and (more := _chat_tokens(config)):
        config.model.vocab_size, config.data.chat_tokens = config.model.vocab_size + more, True
        say(f"{config.origin} has no chat tokens: its tokenizer, embedding and head get the {more} of ChatML")
    longest = keys["max_seq_len"]
    if config.program != "pretrain" and config.train.seq_len > longest and "train.seq_len" not in typed:
        config.train.seq_len = longest
        if "model.max_seq_len" not in typed:
            config.model.max_seq_len = longest
        say(f"train.seq_len={longest:,}, the longest that {config.origin} was trained on")
    warmup, steps = config.optim.warmup_steps, config.train.steps
    if warmup >= steps and "optim.warmup_steps" not in typed:
        config.optim.warmup_steps = steps // 10
        say(f"optim.warmup_steps={steps // 10}, a tenth of train.steps={steps}: the config's {warmup} are too many")
    m = config.model
    say(
        f"model and tokenizer of {config.origin}: {m.family}, {m.n_layers} layers of d {m.d_model}, {m.vocab_size:,} ids; the "
        "config's own are ignored"
    )


def grow(config: config_dict.ConfigDict, overrides: Sequence[str], say: Callable[[str], None]) -> None:
    """Gives `config` all that a larger model of `config.origin`'s function must have of it: for `jaxlm grow`.

    Raises ConfigError if the config's model is smaller somewhere, or can't have the same function.
    """
    folder, typed = _folder(config), _typed(overrides)
    keys, _, _ = _keys(folder)
    model, old = config.model, {key: keys[key] for key in GROWS}
    new = {key: model[key] or old[key] for key in GROWS} | {"n_kv_heads": model.n_kv_heads or model.n_heads}
    for key in GROWS:
        if new[key] < old[key]:
            raise ConfigError(
                f"model.{key}={new[key]} is smaller than the {old[key]} of {config.origin}: nothing shrinks"
            )
    if config.origin_state and config.optim.name == "adafactor":
        raise ConfigError("adafactor sums over rows that are old and new in one: leave config.origin_state out")
    if config.phases.shrink or new == old:
        raise ConfigError(
            f"the config's model is as large as that of {config.origin}: raise one of model.{', '.join(GROWS)}"
        )
    if new["n_heads"] * old["n_kv_heads"] != old["n_heads"] * new["n_kv_heads"]:
        raise ConfigError(
            f"model.n_heads={new['n_heads']} for n_kv_heads={new['n_kv_heads']}: a key-value head must serve as many query "
            f"heads as in {config.origin}, {old['n_heads'] // old['n_kv_heads']}"
        )
    if keys["family"] == "gpt2" and new["d_model"] > old["d_model"]:
        raise ConfigError(
            f"model.d_model={new['d_model']}: gpt2's norm subtracts a mean, so its width stays {old['d_model']}"
        )
    keys["norm_eps"] *= old["d_model"] / new["d_model"]
    _set_model(config, keys | new, typed - {*(f"model.{key}" for key in GROWS)}, ends=keys["family"] == "gpt2")
    config.optim.grown_from = tuple(old.values())
    saved = config_files.from_run(folder / "config.json") if not hf_config.is_model(folder) else None
    if saved and saved.program == "pretrain" and not (config.data.dir or any(key.startswith("data.") for key in typed)):
        config.data, config.prepare = saved.data, saved.prepare
        config.data.dir = saved.data.dir or str(folder / "data")
        say(f"data: that of {config.origin}, in {config.data.dir}")
    own = config.data.tokenizer
    _set_tokenizer(config, folder if saved is None else _tokenizer_of_run(folder), typed)
    if _sha256_of(pathlib.Path(config.data.dir or pathlib.Path(config.workdir) / "data")):
        config.data.tokenizer = own  # the data has been made with that of the origin


def of_model(word: str, overrides: Sequence[str]) -> config_dict.ConfigDict:
    """Returns the config for a verb that takes a Hugging Face folder like a run's folder; prints the folder's remarks.

    Raises ConfigError if `word` is not such a folder, or its model is not supported.
    """
    folder = files.expanded(word)
    home = peft_config.model_folder(folder)
    if not word or not folder.is_dir() or not (hf_config.is_model(home) or home != folder):
        named = f"{word} is not one" if word else "none is named"
        raise ConfigError(
            f"this takes the folder of a Hugging Face model (config.json, model.safetensors, tokenizer.json); {named}"
        )
    config = config_files.load("base", overrides)
    config.workdir = str(folder)
    keys, _, remarks = _keys(home)
    _set_model(config, keys, _typed(overrides), ends=True)
    for line in remarks:
        console.say(line)
    return config


def of_folder(word: str, overrides: Sequence[str]) -> config_dict.ConfigDict:
    """Returns the config of the run or Hugging Face model in a folder. Raises ConfigError if the folder holds neither."""
    place = config_files.find(word)
    if place.kind == "model":
        return of_model(word, overrides)
    if place.kind != "run":
        raise ConfigError(f"{word} is no run (it has no config.json) and no Hugging Face model")
    return config_files.of_run(place.path, overrides)


def ids_of(folder: pathlib.Path) -> int:
    return _keys(folder)[0]["vocab_size"]


def _typed(overrides: Sequence[str]) -> set[str]:
    return {override.partition("=")[0] for override in overrides}


def _folder(config: config_dict.ConfigDict) -> pathlib.Path:
    """Returns the origin's folder; if that is gone, the folder of this run, which began with the origin."""
    named, step = config_files.at_step(config.origin)  # RUN@average; a step is config.origin_checkpoint's
    folder = files.expanded(config.origin if step else named)
    if folder.is_dir():
        config.origin = str(folder.resolve())  # absolute, so that the run resumes from any folder
        return folder
    begun = pathlib.Path(config.workdir) / "config.json"
    if config.workdir and begun.is_file():
        saved = config_files.from_run(begun)
        if pathlib.Path(saved.origin).name == folder.name:
            if saved.adapter.kind != "none":
                raise ConfigError(
                    f"no folder {config.origin}: {config.workdir} holds an adapter alone, which needs its base; say where the "
                    "base is now: --config.origin=FOLDER"
                )
            return begun.parent
    raise ConfigError(f"no folder {config.origin}: config.origin is a run, or the folder of a Hugging Face model")


def _keys(folder: pathlib.Path) -> tuple[dict[str, object], list[str], list[str]]:
    """Returns (the model's keys, messages, remarks) of a run or a Hugging Face model, as `hf_config.read`."""
    if hf_config.is_model(folder):
        return hf_config.read(folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"no run or model to begin from in {folder}: it has no config.json")
    model = config_files.from_run(folder / "config.json").model
    keys = {key: model[key] for key in (*_FIXED, "max_seq_len")} | {f"rope.{key}": model.rope[key] for key in _ROPE}
    return keys, [], []


def _tokenizer_of_run(folder: pathlib.Path) -> pathlib.Path:
    saved = config_files.from_run(folder / "config.json")
    places = [folder / config_files.TOKENIZER, pathlib.Path(saved.data.dir or folder / "data")]
    for place in places:
        if place.is_dir() and any(place.glob("tokenizer.*")):
            return place
    raise ConfigError(f"the run {folder} has no tokenizer: its data in {places[1]} is gone")


def _set_model(config: config_dict.ConfigDict, keys: dict[str, object], typed: set[str], *, ends: bool) -> None:
    """Sets the keys of the model. `ends` forbids a context longer than the model's."""
    for key in _FIXED:
        own, theirs = config.model[key], keys[key]
        if f"model.{key}" in typed and own != theirs and not (key in _DERIVED and not own):
            raise ConfigError(f"config.model.{key}={own}, but the origin's model has {theirs}: leave it out")
        config.model[key] = theirs
    for key in _ROPE:
        if f"rope.{key}" in keys and f"model.rope.{key}" not in typed:
            config.model.rope[key] = keys[f"rope.{key}"]
    longest = keys["max_seq_len"]
    if ends and config.train.seq_len > longest and "train.seq_len" in typed:
        raise ConfigError(f"train.seq_len={config.train.seq_len}: the model's context ends at {longest:,} tokens")
    if ends:
        config.train.seq_len = min(config.train.seq_len, longest)
        config.model.max_seq_len = longest
    elif "model.max_seq_len" not in typed:
        config.model.max_seq_len = max(longest, config.train.seq_len)


def _set_tokenizer(config: config_dict.ConfigDict, place: pathlib.Path, typed: set[str]) -> None:
    tokenizer = coder.load(place)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"{place}: the tokenizer has {tokenizer.vocab_size:,} ids, the model's embedding only "
            f"{config.model.vocab_size:,} rows: resize it (resize_token_embeddings of transformers)"
        )
    if "data.tokenizer" in typed and coder.load(config.data.tokenizer).sha256 != tokenizer.sha256:
        raise ConfigError(
            f"config.data.tokenizer={config.data.tokenizer} is not the model's own ({place}): leave it out"
        )
    config.data.tokenizer = str(place.resolve())
    if "data.chat_tokens" not in typed:
        config.data.chat_tokens = tokenizer.find(CHAT_TOKENS[0]) is not None
    data = pathlib.Path(config.data.dir or pathlib.Path(config.workdir) / "data")
    made_with = _sha256_of(data)
    if made_with not in ("", tokenizer.sha256):
        raise ConfigError(
            f"the data in {data} was made with another tokenizer than that of {config.origin}, so its ids mean other tokens: "
            "give another --config.data.dir and --config.data.path=TEXTS"
        )


def _set_adapter(config: config_dict.ConfigDict, folder: pathlib.Path, typed: set[str]) -> None:
    """Takes over the origin's adapter, to continue its training, if `origin_merge` is off. Raises ConfigError if impossible."""
    if peft_config.is_adapter(folder):
        if config.origin_merge and peft_config.read(folder)["peft_type"] == "LORA":
            return
        controls = coder.load(config.data.tokenizer).controls
        theirs, base = peft_config.settings(folder, controls), peft_config.base_of(folder)
    elif hf_config.is_model(folder):
        return
    else:
        saved = config_files.from_run(folder / "config.json")
        theirs, base = saved.adapter.to_dict(), saved.origin
    if theirs["kind"] == "none":
        return
    if config.origin_merge:
        if theirs["kind"] == "prompt":
            raise ConfigError(
                f"{config.origin} trained the vectors of a prompt, which can't be merged into its model: begin with its own "
                f"origin, {base}, or train the same vectors on with --config.origin_merge=False"
            )
        return
    for key, value in theirs.items():
        if f"adapter.{key}" in typed and config.adapter[key] != value and key not in _FREE_ADAPTER_KEYS:
            raise ConfigError(f"config.adapter.{key}={config.adapter[key]}, but the origin's has {value}: leave it out")
        if f"adapter.{key}" not in typed:
            config.adapter[key] = value


def _begun(config: config_dict.ConfigDict) -> bool:
    return bool(config.workdir) and files.has_steps(pathlib.Path(config.workdir) / "checkpoints")


def _chat_tokens(config: config_dict.ConfigDict) -> int:
    """Returns how many tokens of the chat template the model lacks."""
    tokenizer = coder.load(config.data.tokenizer)
    if coder.ours(tokenizer):
        return len(CHAT_TOKENS) if tokenizer.find(CHAT_TOKENS[0]) is None else 0
    own = pathlib.Path(config.workdir) / config_files.TOKENIZER
    begun = _begun(config) and own.is_dir()  # a resumed run keeps its template, whatever is asked for
    grown = coder.load(own) if begun else chat.grown(tokenizer, config.examples.template)
    return max(0, grown.vocab_size - config.model.vocab_size)


def _sha256_of(data: pathlib.Path) -> str:
    try:
        return files.json_of(files.read_soon(data / MANIFEST))["tokenizer"]["sha256"]
    except (OSError, files.NoAnswer, *files.MANGLED):
        return ""  # opening the data raises
