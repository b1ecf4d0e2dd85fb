"""One place where a config is settled: what runs, and what config.json keeps."""

import subprocess
import sys

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.plan import settle

OPEN = ("model.attention=auto", "model.dtype=auto", "model.vocab_size=0", "optim.lr=0", "optim.b2=0")


def resolve(*overrides: str) -> config.Config:
    return config.resolve(config_files.load("quickstart", ["workdir=w", *OPEN, *overrides]))


def test_a_run_keeps_what_was_asked_and_runs_what_was_chosen(tmp_path, capsys):
    c = resolve()
    settled = settle.on_platform(c, "cpu").as_begun(tmp_path).with_vocabulary(300)
    assert (settled.runs.model.attention, settled.runs.model.dtype) == ("blocked", "float32")
    assert (settled.asked.model.attention, settled.asked.model.dtype) == ("auto", "auto")
    for one in (settled.asked, settled.runs):  # what came of the data and the rules goes on with the run
        assert one.model.vocab_size == 300
        assert one.optim.lr > 0 < one.optim.b2
    assert settled.asked.optim == settled.runs.optim == settle.ruled(c)
    assert "by rule: optim.lr" in "".join(capsys.readouterr())


def test_what_is_said_stays():
    c = resolve("model.vocab_size=400", "optim.lr=0.01", "optim.b2=0.9", "model.remat=dots", "train.microbatch_size=4")
    settled = settle.on_platform(c, "cpu").with_vocabulary(300)
    assert settled.asked == c
    assert settled.runs.model.vocab_size == 400
    assert settle.sized(c, print, 300) == c == settle.assuming(c, remat="full", rows=2)
    assert settle.ruled(c).lr == 0.01


def test_a_plan_assumes_what_devices_would_choose():
    c = settle.assuming(resolve("model.remat=auto", "train.microbatch_size=-1"), remat="full", rows=2)
    assert (c.model.remat, c.train.microbatch_size) == ("full", 2)
    read = settle.to_read(resolve("model.remat=names", "model.offload=True").model, "cpu")
    assert (read.remat, read.offload, read.attention) == ("none", False, "blocked")


CODE = """
import sys, jaxlm.eval.model, jaxlm.train.rl.rewards
print(*(module for module in sys.modules if "jaxlm.plan" in module))
from jax._src import xla_bridge
from jaxlm import config; from jaxlm.config import config_files
from jaxlm.host.console import say
from jaxlm.plan import rules, settle
c = settle.sized(config.resolve(config_files.load("quickstart", ["workdir=w", "optim.lr=0", "model.vocab_size=0"])), say)
rules.by_rule(c, say)
print(xla_bridge.backends_are_initialized())
"""


def test_who_reads_a_model_imports_no_search_and_a_plan_starts_no_device():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    modules, devices = done.stdout.splitlines()
    assert "jaxlm.plan.settle" in modules.split()
    assert not {"jaxlm.plan.tune.tune", "jaxlm.plan.lower"} & set(modules.split())
    assert devices == "False"  # those of plan.mesh can only be described before there are any
    assert "model.vocab_size=0: 32,768 tokens are assumed" in done.stderr
