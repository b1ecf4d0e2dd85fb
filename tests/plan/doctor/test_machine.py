"""What training would refuse at its start is refused by the doctor."""

import dataclasses

import jax
import pytest
import tiny_data

from jaxlm import config
from jaxlm.config import ConfigError, config_files
from jaxlm.devices import sharding
from jaxlm.models import hardware
from jaxlm.plan.doctor.machine import Machine


def machine(folder, *overrides: str) -> Machine:
    keys = ["train.batch_size=2", "train.seq_len=16", "model.vocab_size=300", f"data.dir={folder}", *overrides]
    asked = config.resolve(config_files.load("base", keys))
    settled = dataclasses.replace(asked, model=hardware.for_platform(asked.model, "cpu"))
    return Machine(asked, settled, sharding.make_mesh(asked.mesh, jax.devices()[:1]))


def test_data_of_another_vocabulary(tmp_path):
    tiny_data.make(tmp_path / "d", {"a": 1.0})
    with pytest.raises(ConfigError, match=r"--config\.model\.vocab_size=300"):
        machine(tmp_path / "d", "model.vocab_size=400").fits_the_run()
    assert machine(tmp_path / "d", "train.microbatch_size=2").fits_the_run().verdict == "ok"


def test_data_that_are_still_to_be_made_are_no_fault(tmp_path):
    assert machine(tmp_path / "none").fits_the_run().verdict == "ok"
