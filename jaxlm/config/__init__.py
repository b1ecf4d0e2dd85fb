"""Configuration: an ml_collections ConfigDict at the edge, frozen dataclasses inside.

`schema.py` gives each key its type, limits, default and comment; `configs/base.py` makes a ConfigDict of them.
`build.py` and `checks.py` raise `ConfigError` for what can't work: one line that says what is wrong and how to fix it.
"""

from jaxlm.config.build import build, nearest, nearest_key
from jaxlm.config.checks import final_weights
from jaxlm.config.corpora import DataConfig, PrepareConfig, PrepareSourceConfig, SourceConfig
from jaxlm.config.posttraining import AdapterConfig, DpoConfig, ExamplesConfig, RewardConfig
from jaxlm.config.resolve import resolve, to_json
from jaxlm.config.schema import (
    BY_RULE,
    CHAT_TOKENS,
    GROWS,
    ROWS,
    CheckpointConfig,
    Config,
    DistributedConfig,
    EvalConfig,
    HardwareConfig,
    LogConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    NotifyConfig,
    OptimConfig,
    PhaseConfig,
    PhasesConfig,
    ProfileConfig,
    RunsConfig,
    SampleConfig,
    StabilityConfig,
    StopConfig,
    TrainConfig,
    with_keys,
)
from jaxlm.host.errors import ConfigError, RunError, optional, pip_install
