"""run.json: every start is kept, and a damaged one is told in one line."""

import json

import pytest

from jaxlm import config, config_files
from jaxlm.config import ConfigError
from jaxlm.train import ledger


def test_starts_add_up_and_damage_is_refused(tmp_path):
    c = config.resolve(config_files.load("quickstart", [f"workdir={tmp_path}"]))

    def start(step):
        ledger.record_start(tmp_path, c, step=step, manifest_sha256="0", choices={"attention": "xla"})

    start(0)
    start(5)
    assert [s["step"] for s in json.loads((tmp_path / "run.json").read_text())["starts"]] == [0, 5]
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json is damaged: move it away"):
        start(6)
