"""The config with all defaults; an experiment imports this file, changes what it must, and nothing else.

The keys, with type, bounds, default and comment, stand in jaxlm/config/schema.py; `jaxlm train --help=SECTION` prints them.
0 or an empty string means "derive it" where the comment says so.
"""

import dataclasses

from ml_collections import ConfigDict

from jaxlm.config import Config, PhaseConfig, PrepareSourceConfig
from jaxlm.config.older import add_stages


def get_config() -> ConfigDict:
    """A new ConfigDict with all defaults."""
    c = ConfigDict(dataclasses.asdict(Config()))
    add_stages(c.prepare.stages)
    return c


def phase(steps: int = 0, tokens: int = 0, usd: float = 0.0, **gate) -> dict:
    """A phase of `phases.plan`: `phase(steps=200, usd=5.0, max_val_loss=7.0)`."""
    return _part("phase", PhaseConfig, gate | {"steps": steps, "tokens": tokens, "usd": usd})


def source(path: str = "", stages: tuple[str, ...] = (), **keys) -> dict:
    """A source of `prepare.sources`: `source("docs/*.html", stages=("html", "unicode"), priority=1)`."""
    return _part("source", PrepareSourceConfig, keys | {"path": path, "stages": stages})


def _part(name: str, kind: type, keys: dict) -> dict:
    known = [field.name for field in dataclasses.fields(kind)]
    if unknown := sorted({*keys} - {*known}):
        raise ValueError(f"{name} has no key {unknown}; there are {sorted(known)}")
    return dataclasses.asdict(kind(**keys))
