"""XLA's flags: what is set, whose word counts, and that a wrong one is a line and not a dead process."""

import os
import subprocess
import sys

import pytest

from jaxlm.config import ConfigError
from jaxlm.devices import xla_flags


@pytest.fixture(autouse=True)
def before_any_device(monkeypatch):
    monkeypatch.setattr(xla_flags.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})


def test_nothing_asked_sets_the_memory_alone():
    xla_flags.apply(())
    assert "XLA_FLAGS" not in os.environ
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.92"


@pytest.mark.parametrize("key", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_the_users_memory_fraction_stays(key):
    os.environ[key] = "0.5"
    xla_flags.apply(())
    assert {k: v for k, v in os.environ.items() if "MEM" in k} == {key: "0.5"}


def test_the_later_flag_counts_and_the_environment_is_last(monkeypatch):
    monkeypatch.setattr(xla_flags, "FLAGS", {"xla_ours": ("1", "measured")})
    monkeypatch.setattr(xla_flags, "_check", lambda flags: None)
    os.environ["XLA_FLAGS"] = "--xla_theirs=3"
    xla_flags.apply(("xla_asked=2", "--xla_more="))  # an empty value is one too
    assert os.environ["XLA_FLAGS"] == "--xla_ours=1 --xla_asked=2 --xla_more= --xla_theirs=3"
    xla_flags.apply(("xla_asked=2",))
    assert os.environ["XLA_FLAGS"].count("xla_asked") == 1


@pytest.mark.parametrize("text", ["xla_gpu_autotune_level", "gpu=1", "xla_a=1 --xla_b=2", ""])
def test_what_is_no_flag(text):
    with pytest.raises(ConfigError, match=r"is not xla_NAME=VALUE"):
        xla_flags.apply((text,))


def test_a_flag_that_xla_does_not_know_is_a_line():
    with pytest.raises(ConfigError, match=r"does not take .*: Unknown flag in XLA_FLAGS: --xla_gpu_nonsense=1$"):
        xla_flags.apply(("xla_gpu_nonsense=1",))
    assert "XLA_FLAGS" not in os.environ
    xla_flags.apply(("xla_gpu_autotune_level=2",))
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_autotune_level=2"


def test_too_late(monkeypatch):
    monkeypatch.setattr(xla_flags.xla_bridge, "backends_are_initialized", lambda: True)
    with pytest.raises(ConfigError, match="comes too late"):
        xla_flags.apply(("xla_gpu_autotune_level=2",))


def test_importing_jaxlm_starts_no_device():
    """What would make every flag come too late."""
    code = "from jaxlm.cli import cli; from jaxlm.commands.train import text; from jax._src import xla_bridge as x; "
    code += "assert not x.backends_are_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.getcwd()})


def test_every_flag_has_a_reason():
    assert not [name for name, (_, why) in xla_flags.FLAGS.items() if not (name.startswith("xla_") and why)]
