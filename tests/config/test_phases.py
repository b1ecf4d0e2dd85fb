"""Where the phases of a run end; and a config shrunk to a CPU: the plan stays, the sizes do not."""

import json

import pytest
import tiny_data

from jaxlm import config
from jaxlm.cli import cli
from jaxlm.config import ConfigError, config_files, milestones, shrink
from jaxlm.plan import flops


def load(*overrides: str, name: str = "gpuburnout_1b") -> config.Config:
    return config.resolve(config_files.load(name, ["workdir=w", *overrides]))


def test_the_storys_plan_over_500():
    c = load("phases.shrink=cpu")
    assert (c.model.n_layers, c.model.d_model, c.model.vocab_size) == (2, 128, 4096)
    assert (c.model.n_heads * c.model.head_dim, c.model.n_kv_heads) == (128, 2)
    assert (c.train.batch_size, c.train.microbatch_size, c.train.seq_len, c.train.steps) == (8, 8, 128, 180)
    ends = {"smoke": (2, 0.01), "pilot": (20, 0.05), "main": (120, 0.22), "finish": (180, 0.13)}
    assert {name: (p.steps, p.usd) for name, p in c.phases.plan.items()} == ends
    assert (c.train.eval_every_steps, c.checkpoint.every_steps, c.checkpoint.keep_every) == (10, 10, 20)
    assert (c.optim.warmup_steps, c.log.every_steps) == (2, 1)
    assert {s.path for s in c.data.sources.values()} == {"embedded:prose", "embedded:math", "embedded:code"}
    assert c.data.dir == "w/data"
    assert len(c.sample.prompts) == 8
    assert flops.count_params(c.model) < 2e6


def test_a_run_that_was_shrunk_is_not_shrunk_again(tmp_path):
    c = load("phases.shrink=cpu", f"workdir={tmp_path}")
    (tmp_path / "config.json").write_text(config.to_json(c))
    assert json.loads((tmp_path / "config.json").read_text())["phases"]["shrink"] == ""
    assert config.resolve(config_files.from_run(tmp_path / "config.json")) == c
    assert load("phases.shrink=cpu", f"workdir={tmp_path}") == c  # the same command


@pytest.mark.parametrize("name", config_files.shipped_configs())
def test_every_shipped_config_shrinks(name):
    c = load("phases.shrink=cpu", name=name)
    assert c.optim.warmup_steps < c.train.steps
    assert flops.count_params(c.model) < 2e6


def test_a_final_mixture_is_rehearsed_with_the_embedded_corpus():
    c = load("phases.shrink=cpu", "data.final.share=0.2", "data.final.weights.finemath=40")
    assert (c.data.final.share, c.data.final.weights) == (0.2, shrink.FINAL)
    assert set(shrink.FINAL) < set(c.data.sources)
    assert load("phases.shrink=cpu").data.final.weights == {}


def test_one_line_says_all_of_it():
    line = shrink.summary(load("phases.shrink=cpu"))
    assert "\n" not in line
    words = ("2 layers of d 128", "8 rows of 128", "over 500 (180 steps", "smoke 2, pilot 20, main 120, finish 180")
    words += ("evaluated every 10 and saved every 10", "the embedded corpus in w/data, $0.10 an hour")
    assert not [one for one in words if one not in line]


def test_data_that_the_command_names_is_not_said_to_be_read(tmp_path, capsys):
    """The rehearsal reads the embedded corpus: its line names the directory that it leaves, and no other line does."""
    tiny_data.make(tmp_path, {"a": 1.0})
    flags = [f"--config.data.dir={tmp_path}", "--config.phases.shrink=cpu", "--config.plan.measure=never", "--json"]
    assert cli.main(["plan", "gpuburnout_1b", *flags]) == 0
    (line,) = (line for line in capsys.readouterr().err.splitlines() if str(tmp_path) in line)
    assert line.startswith("shrunk: ")
    assert f"the embedded corpus in runs/gpuburnout_1b-shrunk/data in place of {tmp_path}, $0.10 an hour" in line


def planned(*overrides: str) -> tuple[milestones.Phase, ...]:
    c = load(*overrides)
    return milestones.planned(c.phases, c.train)


def test_phases_by_tokens_end_at_the_step_that_reaches_them():
    found = planned("phases.plan.pilot.steps=0", "phases.plan.pilot.tokens=1_000_000_000")
    assert [(p.first, p.last) for p in found] == [(1, 200), (201, 7_630), (7_631, 60_000), (60_001, 90_000)]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("phases.plan.pilot.steps=0", "phases.plan.pilot ends after steps=0 or tokens=0: give one of them"),
        ("phases.plan.pilot.tokens=5", "steps=10000 or tokens=5"),
        ("phases.accept=plot", "there are finish, main, pilot, smoke"),
        ("phases.plan.pilot.steps=200", "pilot and smoke both end at step 200"),
    ],
)
def test_a_plan_that_can_not_be_is_one_line(override, message):
    with pytest.raises(ConfigError) as error:
        planned(override)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
