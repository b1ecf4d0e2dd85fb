"""Turns a ConfigDict into the checked `Config` that programs read, and a `Config` into JSON."""

import dataclasses
import json
import os
from collections.abc import Mapping

from ml_collections import config_dict

from jaxlm.config import older
from jaxlm.config.build import build
from jaxlm.config.checks import validate
from jaxlm.config.corpora import SourceConfig
from jaxlm.config.schema import Config
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


def with_keys(config: Config, **sections: Mapping) -> Config:
    """Returns the config with some values changed: `with_keys(config, train={"steps": 5}, model={"remat": "none"})`."""
    changed = {name: dataclasses.replace(getattr(config, name), **keys) for name, keys in sections.items()}
    return dataclasses.replace(config, **changed)


def to_json(config: Config) -> str:
    """Returns the resolved config as JSON, the content of WORKDIR/config.json."""
    return json.dumps(dataclasses.asdict(config), indent=1) + "\n"


def _derive(c: Config) -> Config:
    """Returns the config with values derived from other keys in place of 0 or "" where these mean "derived"."""
    m, t = c.model, c.train
    heads = m.n_heads
    model = dataclasses.replace(
        m,
        n_kv_heads=m.n_kv_heads or heads,
        head_dim=m.head_dim or (m.d_model // heads if m.d_model % heads == 0 else 0),
        max_seq_len=m.max_seq_len or t.seq_len,
    )
    train = dataclasses.replace(t, microbatch_size=t.microbatch_size or t.batch_size)
    sources = {"text": SourceConfig(path=c.data.path, weight=1.0)} if c.data.path else c.data.sources
    evaluation = dataclasses.replace(c.eval, batch_size=c.eval.batch_size or max(train.microbatch_size, 0))
    data_dir = c.data.dir or (os.path.join(c.workdir, "data") if c.workdir else "")
    data = dataclasses.replace(c.data, dir=data_dir, sources=sources)
    return dataclasses.replace(c, model=model, train=train, data=data, eval=evaluation)
