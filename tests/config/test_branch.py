"""The config of a branch: what it takes over from its trunk, and what it must not."""

import argparse
import dataclasses

import pytest

from jaxlm import config
from jaxlm.config import ConfigError, branch, config_files
from jaxlm.data.shards import mixture
from jaxlm.step import optim


@pytest.fixture
def trunk(tmp_path):
    """A run's folder with checkpoints of the steps 2, 20 and 120."""
    folder = tmp_path / "run"
    overrides = ["phases.shrink=cpu", f"workdir={folder}", "checkpoint.mirror=s3://mine/run", "phases.accept=pilot"]
    c = config.resolve(config_files.load("gpuburnout_1b", overrides))
    for step in (2, 20, 120):
        (folder / "checkpoints" / str(step)).mkdir(parents=True)
    (folder / "checkpoints/120.deleting").mkdir()
    (folder / "config.json").write_text(config.to_json(c))
    return folder


def decay(trunk, steps=10, checkpoint="latest", *overrides):
    return config.resolve(branch.decay(trunk, steps, checkpoint, overrides))


def test_a_branch_begins_at_the_checkpoint_and_ends_after_its_steps(trunk):
    c, whole = decay(trunk), config.resolve(config_files.from_run(trunk / "config.json"))
    assert (c.origin, c.origin_checkpoint, c.origin_state) == (str(trunk.resolve()), "120", True)
    assert c.workdir == f"{trunk}-decay-120"
    assert (c.train.steps, c.optim.schedule_steps, c.optim.decay_at_step) == (130, 180, 120)
    assert decay(trunk, 5, "20").train.steps == 25
    assert c.data.dir == str(trunk / "data")
    assert (c.model, c.data.sources, c.seed) == (whole.model, whole.data.sources, whole.seed)
    assert c.phases.plan == {}
    assert c.checkpoint.mirror == "s3://mine/run-decay-120"
    before, after = (optim.rates(x.optim, x.train.steps) for x in (whole, c))
    assert [float(after(step)) for step in range(1, 121)] == [float(before(step)) for step in range(1, 121)]
    assert float(after(130)) == pytest.approx(float(before(120)) / 11, rel=1e-5)


def test_a_branch_may_have_other_weights_from_its_first_step_on(trunk):
    c = decay(trunk, 10, "20", "data.final.weights.math=40")
    final = mixture.final_of(c, c.data.final.weights)
    assert (final.mixture, final.begins()) == ({"math": 40.0}, 20)
    assert mixture.final_of(decay(trunk), {}) is None
    whole = config.resolve(config_files.from_run(trunk / "config.json"))
    given = dataclasses.replace(whole.data.final, share=0.5, weights={"math": 1.0})
    whole = dataclasses.replace(whole, data=dataclasses.replace(whole.data, final=given))
    (trunk / "config.json").write_text(config.to_json(whole))
    begins = {step: decay(trunk, 10, str(step)) for step in (20, 120)}
    assert mixture.final_of(begins[20], {}).begins() == 20  # what the trunk would have begun after step 90
    assert mixture.final_of(begins[120], {}).begins() == mixture.final_of(whole, {}).begins() == 90


def test_overrides_of_the_command_win(trunk, tmp_path):
    c = decay(trunk, 10, "latest", f"workdir={tmp_path / 'other'}", "checkpoint.every_steps=5", "seed=0")
    assert (c.workdir, c.checkpoint.every_steps) == (str(tmp_path / "other"), 5)


def test_the_same_command_and_the_folder_of_the_branch_give_the_same_config(trunk):
    c = decay(trunk)
    folder = trunk.with_name("run-decay-120")
    folder.mkdir()
    (folder / "config.json").write_text(config.to_json(c))
    assert decay(trunk) == c
    assert config.resolve(config_files.from_run(folder / "config.json")) == c


@pytest.mark.parametrize(
    ("steps", "checkpoint", "workdir", "message"),
    [
        (0, "latest", "", "needs --steps=N"),
        (-3, "latest", "", "needs --steps=N"),
        (5, "21", "", "no checkpoint '21' in .*; there are 2, 20, 120 and latest"),
        (5, "best", "", "no checkpoint 'best'"),
        (5, "latest", "run", "is the run that is branched from"),
        (5, "20", "run-decay-120", "holds another run"),
    ],
)
def test_what_can_not_be_branched_is_one_line(trunk, steps, checkpoint, workdir, message):
    other = trunk.with_name("run-decay-120")
    other.mkdir()
    (other / "config.json").write_text(config.to_json(decay(trunk)))
    with pytest.raises(ConfigError, match=message) as error:
        decay(trunk, steps, checkpoint, *[f"workdir={trunk.parent / workdir}"] * bool(workdir))
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="decays already, from step 120"):
        decay(other)


def asked(kind, word, steps, checkpoint="latest"):
    return branch.config(argparse.Namespace(branch=kind, config=word, steps=steps, checkpoint=checkpoint), ())


def test_the_command_line(trunk):
    assert asked(None, "quickstart", 0) is None
    assert asked("decay", str(trunk), 10, "20").train.steps == 30
    with pytest.raises(ConfigError, match=r"did you mean --config\.train\.steps\?"):
        asked(None, str(trunk), 10)
    for word in (None, "quickstart"):
        with pytest.raises(ConfigError, match="needs the folder of a run"):
            asked("decay", word, 10)
