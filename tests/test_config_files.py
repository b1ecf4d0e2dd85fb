"""From a run's config.json back to its config."""

import json

import pytest

from jaxlm import config, config_files
from jaxlm.config import ConfigError


def test_an_old_run_has_the_defaults_of_newer_keys(tmp_path):
    c = config.resolve(config_files.load("quickstart", [f"workdir={tmp_path}"]))
    saved = json.loads(config.to_json(c))
    del saved["log"]["wandb"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert config.resolve(config_files.from_run(tmp_path / "config.json")).log.wandb == ""
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ConfigError, match="is not the config of a run"):
        config_files.from_run(tmp_path / "config.json")
