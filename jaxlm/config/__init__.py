"""Configuration: an ml_collections ConfigDict at the edge, frozen dataclasses inside.

`configs/base.py` is the only home of defaults; the dataclasses here have the same keys (a test compares them) and no
defaults, so a key that is read somewhere exists, is typed and is documented. Everything a user can get wrong raises
`ConfigError` with one line that says what is wrong and how to mend it.
"""

import dataclasses
import json
import os

from ml_collections import config_dict

from jaxlm.config.build import build, nearest, nearest_key
from jaxlm.config.checks import validate
from jaxlm.config.schema import (
    CHAT_TOKENS,
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    DistributedConfig,
    EvalConfig,
    HardwareConfig,
    LogConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PlanConfig,
    PrepareConfig,
    PrepareSourceConfig,
    ProfileConfig,
    RopeConfig,
    RunError,
    SampleConfig,
    SourceConfig,
    TrainConfig,
    TuneConfig,
)

__all__ = [
    "CHAT_TOKENS",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DistributedConfig",
    "EvalConfig",
    "HardwareConfig",
    "LogConfig",
    "LossConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimConfig",
    "PlanConfig",
    "PrepareConfig",
    "PrepareSourceConfig",
    "ProfileConfig",
    "RopeConfig",
    "RunError",
    "SampleConfig",
    "SourceConfig",
    "TrainConfig",
    "TuneConfig",
    "build",
    "nearest",
    "nearest_key",
    "resolve",
    "to_json",
]


def resolve(config: config_dict.ConfigDict | dict) -> Config:
    """Checks types, fills derived values (0 = derive) and refuses impossible combinations. Raises ConfigError."""
    if isinstance(config, config_dict.ConfigDict):
        config = config.to_dict()
    resolved = _derive(build(Config, config, ""))
    validate(resolved)
    return resolved


def to_json(config: Config) -> str:
    """The resolved config as JSON, the content of WORKDIR/config.json."""
    return json.dumps(dataclasses.asdict(config), indent=1) + "\n"


def _derive(c: Config) -> Config:
    """Fills values that 0, -1 or an empty string leave to be derived from others."""
    m, t = c.model, c.train
    heads = m.n_heads
    model = dataclasses.replace(
        m,
        n_kv_heads=m.n_kv_heads or heads,
        head_dim=m.head_dim or (m.d_model // heads if heads > 0 and m.d_model % heads == 0 else 0),
        max_seq_len=m.max_seq_len or t.seq_len,
    )
    train = dataclasses.replace(t, microbatch_size=t.microbatch_size or t.batch_size)
    sources = {"text": SourceConfig(path=c.data.path, weight=1.0)} if c.data.path else c.data.sources
    evaluation = dataclasses.replace(c.eval, batch_size=c.eval.batch_size or max(train.microbatch_size, 0))
    data_dir = c.data.dir or (os.path.join(c.workdir, "data") if c.workdir else "")
    data = dataclasses.replace(c.data, dir=data_dir, sources=sources)
    return dataclasses.replace(c, model=model, train=train, data=data, eval=evaluation)
