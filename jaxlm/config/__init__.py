"""Configuration: an ml_collections ConfigDict at the edge, frozen dataclasses inside.

`schema.py` gives each key's type and limits, `configs/base.py` its default and comment (a test compares the two).
`build.py` and `checks.py` raise `ConfigError` for what can't work: one line that says what is wrong and how to mend it.
"""

from jaxlm.config.build import build, nearest, nearest_key
from jaxlm.config.checks import final_weights
from jaxlm.config.resolve import resolve, to_json
from jaxlm.config.schema import (
    BY_RULE,
    CHAT_TOKENS,
    AdapterConfig,
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    DistributedConfig,
    DpoConfig,
    EvalConfig,
    ExamplesConfig,
    HardwareConfig,
    LogConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    NotifyConfig,
    OptimConfig,
    PhaseConfig,
    PhasesConfig,
    PrepareConfig,
    PrepareSourceConfig,
    ProfileConfig,
    RewardConfig,
    RunError,
    RunsConfig,
    SampleConfig,
    SourceConfig,
    StabilityConfig,
    StopConfig,
    TrainConfig,
)
