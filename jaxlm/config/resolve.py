"""Turns a ConfigDict into the checked `Config` that programs read, and a `Config` into JSON."""

import dataclasses
import json
import os

from ml_collections import config_dict

from jaxlm.config import older
from jaxlm.config.build import build
from jaxlm.config.checks import validate
from jaxlm.config.corpora import SourceConfig
from jaxlm.config.schema import Config, with_keys
from jaxlm.config.shrink import shrunk


def resolve(config: config_dict.ConfigDict | dict) -> Config:
    """Returns the typed config. Checks every key, and derives the values that 0 or "" leave open.

    With `phases.shrink` the config is made small; see `shrink`.

    Raises ConfigError if a key is unknown, missing or wrong, or if keys contradict each other.
    """
    if isinstance(config, config_dict.ConfigDict):
        config = config.to_dict()
    built = build(Config, older.read(config), "")
    resolved = _derive(shrunk(built) if built.phases.shrink else built)
    validate(resolved)
    return resolved


def to_json(config: Config) -> str:
    """Returns the resolved config as JSON, the content of WORKDIR/config.json."""
    return json.dumps(dataclasses.asdict(config), indent=1) + "\n"


def _derive(c: Config) -> Config:
    """Returns the config with values derived from other keys in place of 0 or "" where these mean "derived"."""
    m, t = c.model, c.train
    microbatch = t.microbatch_size or t.batch_size
    model = {"n_kv_heads": m.n_kv_heads or m.n_heads, "max_seq_len": m.max_seq_len or t.seq_len}
    model["head_dim"] = m.head_dim or (0 if m.d_model % m.n_heads else m.d_model // m.n_heads)
    data = {"dir": c.data.dir or (os.path.join(c.workdir, "data") if c.workdir else "")}
    if c.data.path:
        data["sources"] = {"text": SourceConfig(path=c.data.path, weight=1.0)}
    evaluation = {"batch_size": c.eval.batch_size or max(microbatch, 0)}
    return with_keys(c, model=model, train={"microbatch_size": microbatch}, data=data, eval=evaluation)
