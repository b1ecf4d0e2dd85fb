"""`jaxlm plan` as a person sees it."""

import dataclasses
import json
import types

import jax
import pytest
import tiny_data

from jaxlm.cli import cli
from jaxlm.commands import plan as program
from jaxlm.config import config_files, resolve
from jaxlm.data.batches import document_rows
from jaxlm.data.shards import mixture
from jaxlm.devices import sharding
from jaxlm.host import console
from jaxlm.models import hardware
from jaxlm.plan import accelerators, lower
from jaxlm.plan.ladder import ladder
from jaxlm.plan.text import render
from jaxlm.step import parts
from jaxlm.step.objectives import lm


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(["plan", "--config.plan.measure=never", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_page_of_one_billion(capsys):
    code, out, err = run(capsys, "--config=gpuburnout_1b", "--config.plan.accelerator=a100-80gb")
    assert (code, err) == (0, "")
    for words in (
        "MODEL  1,038,692,352 parameters",
        "TOKENS  11.8B = 90,000 steps x 64 rows x 2,048",
        "11.4 a parameter: 0.57 x Chinchilla's optimum",
        "7.04 GFLOP a token",
        "microbatch 16 of 64 rows, bfloat16, attention cudnn",
        "A100 80GB     75    yes        1    16     28.4k",
        "64% [1]",
        "full 25.0 GB and 1.24 x the time",
        "28.3k tokens/s 24.0k",
        "PHASES  on 1 x A100 80GB at $1.60 an hour (hardware.usd_per_hour); start, evaluation and",
        "RECIPE  by published rules: rate 0.000547 (0.000394 to 0.000707), b2 0.99748 (0.99637 to 0.9987),",
        "  optim.lr 0.0003: 1.8 times too low for adamw by Step Law",
        "  optim.b2 0.95: a half-life of 1.77M tokens in place of 36M. Cost: 8% to 15% of the tokens",
        "DISK  212 GB for 17 checkpoints of 12.5 GB (keep_last 2, keep_best 1, keep_every 10000, phases 4,",
        "[1] gpuburnout's own stack",
    ):
        assert words in out


def test_the_page_of_fine_tuning_says_what_is_trained_and_compares_the_methods(capsys):
    keys = ("--config.program=dpo", "--config.adapter.kind=lora", "--config.adapter.quantize=nf4")
    code, out, err = run(capsys, "--config=gpuburnout_1b", "--config.plan.accelerator=RTX 4090", *keys)
    assert (code, err) == (0, "")
    for words in (
        "TRAINED (dpo)  LoRA of rank 16 for attn/q, attn/k, attn/v, attn/o, mlp/gate, mlp/up, mlp/down:",
        "  11.3M; 1.04B frozen, layers in nf4",
        "REFERENCE  the frozen model alone, a second forward pass in each step",
        "by 6N + 16LdT",
        "METHODS, GB with one row     remat none  remat full  smallest card",
        "  QLoRA (nf4)  ",
    ):
        assert words in out
    assert "Chinchilla" not in out
    assert max(map(len, out.splitlines())) <= 100


def test_json_has_what_the_page_has(capsys):
    code, out, _ = run(capsys, "--config=gpuburnout_1b", "--json")
    plan = json.loads(out)
    assert code == 0
    assert plan["model"]["parameters"] == 1_038_692_352
    assert sum(plan["memory"]["bytes"].values()) == plan["memory"]["total"]
    assert len(plan["accelerators"]) == 16
    rows = {row["name"]: row for row in plan["accelerators"]}
    assert rows["A100 80GB"]["fits"]
    assert not rows["RTX 4090"]["fits"]
    assert rows["H100"]["usd"] == pytest.approx(rows["H100"]["hours"] * 2.70)
    assert rows["TPU v5e"]["mfu_from"] == ""
    assert render(plan).splitlines()[0].startswith("MODEL  1,038,692,352")


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon"])
def test_a_checkpoint_on_the_disk_is_the_state_in_bytes(name, capsys):
    keys = [f"--config.optim.name={name}", "--config.optim.offload=True"]
    _, out, _ = run(capsys, "--config=quickstart", "--json", "--config.plan.accelerator=H100", *keys)
    config = resolve(config_files.load("quickstart", [f"optim.name={name}", "model.vocab_size=4096"]))
    config = dataclasses.replace(config, model=hardware.for_platform(config.model, "cpu"))
    state = parts.make(config, sharding.make_mesh(config.mesh, jax.devices()[:1]), lm.make).abstract
    planned, real = json.loads(out)["disk"], sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert planned["checkpoint"] == pytest.approx(real, rel=1e-3)
    assert planned["checkpoints"] == 4


def test_data_that_is_there_is_set_against_the_plan(capsys, monkeypatch):
    opened = types.SimpleNamespace(token_counts=lambda: {"web": 10**9, "code": 10**8, "unused": 5})
    final = mixture.Final({"code": 1.0}, 0.2, 20_000)

    def order(c, final=None) -> document_rows.Rows:
        return document_rows.Rows(
            opened, {"web": 3.0, "code": 1.0}, 0, c.train.seq_len, c.train.batch_size, final=final
        )

    monkeypatch.setattr(program, "open_order", order)
    keys = ["--config.train.steps=20000", "--config.plan.accelerator=H100"]  # 2.62B tokens
    _, out, _ = run(capsys, "--config=gpuburnout_1b", *keys)
    assert "DATA  1.1B tokens in data/1b; times through: web 2, code 6.6\n  Beyond about four times" in out
    assert "LOSS  17.8" not in out
    assert "far outside" not in out
    few = ["--config.train.steps=10", "--config.optim.warmup_steps=1"]
    _, out, _ = run(capsys, "--config=quickstart", *keys[1:], *few)
    assert "no forecast: this run is far outside of what the published laws were fitted on" in out
    assert "Beyond about four times" not in out
    monkeypatch.setattr(program, "open_order", lambda c: order(c, final))
    _, out, _ = run(capsys, "--config=gpuburnout_1b", *keys)  # 2.62B tokens: 2.10B, then 0.52B of code alone
    assert "times through: web 1.6, code 10\n  Mixture: web 0.75, code 0.25 to step 16,000, then code 1.\n" in out


def test_data_that_training_would_refuse_is_told(capsys, tmp_path):
    tiny_data.make(tmp_path, {"a": 1.0})
    keys = [f"--config.data.dir={tmp_path}", "--config.data.final.share=.2", "--config.plan.accelerator=H100"]
    _, out, err = run(capsys, "--config=base", *keys, "--config.data.final.weights.nosuch=1")
    assert "DATA" not in out
    assert "the data is left out of the plan: data.final.weights names nosuch, which is no source" in err
    _, out, err = run(capsys, "--config=base", *keys, "--config.data.final.weights.a=2")
    assert "DATA" in out
    assert "left out" not in err


def test_a_price_of_ones_own_counts(capsys, tmp_path):
    text = accelerators.SHIPPED.read_text()
    (tmp_path / "mine.toml").write_text(text.replace("usd = 2.70\nusd_spot = 1.70", "usd = 27.0\nusd_spot = 1.70"))
    prices = f"--config.plan.prices={tmp_path / 'mine.toml'}"
    _, out, _ = run(capsys, "--config=local_35m", "--json", "--config.plan.accelerator=H100", prices)
    (row,) = json.loads(out)["accelerators"]
    assert row["usd"] == pytest.approx(27.0 * row["hours"])


@pytest.fixture
def no_plugin(monkeypatch):
    """JAX without its CUDA plugin, also where it is installed."""

    def absent(**_):
        raise NotImplementedError

    monkeypatch.setattr(lower.topologies, "get_topology_desc", absent)


@pytest.mark.usefixtures("no_plugin")
def test_a_mesh_that_is_not_there_is_compiled(capsys, monkeypatch):
    monkeypatch.setattr(console, "WORKING_S", 0.0)  # it is said even where it takes no time
    small = ("train.batch_size=16", "train.microbatch_size=8", "train.seq_len=64", "plan.mesh=data:2,fsdp:4")
    small += ("model.n_layers=2", "model.scan_layers=True", "model.d_model=1024", "model.remat=full")
    code, out, err = run(capsys, "--config=quickstart", "--json", *(f"--config.{key}" for key in small))
    assert (code, "compiling the step for 8 fake CPU devices" in err) == (0, True)
    plan = json.loads(out)
    found = plan["compiled"]
    assert (found["replicated"], found["largest_replicated"]) == (0, None)
    assert found["memory"] > plan["memory"]["bytes"]["parameters"] + plan["memory"]["bytes"]["optimizer"]
    kinds = {row["kind"]: row for row in found["collectives"]}
    # q|k|v, o, gate|up and down of each of two layers, in each of two microbatches, for forward and for backward.
    assert kinds["all-gather"]["times"] >= 4 * 2 * 2 * 2
    text = render(plan)
    assert "COMPILED for 8 fake CPU devices" in text
    assert "left whole on all: none" in text


@pytest.mark.usefixtures("no_plugin")
def test_a_parameter_left_whole_is_told(capsys, monkeypatch):
    """The mutation: without its rule the model dimension stays whole on every device."""
    monkeypatch.setitem(sharding.RULES, "embed", ())
    small = ("--config.train.seq_len=64", "--config.model.n_layers=1", "--config.model.remat=full")
    _, out, _ = run(capsys, "--config=quickstart", "--config.plan.mesh=fsdp:4", *small)
    assert "left whole on all: 1 of them, the largest embed/embedding with 1.05M numbers" in out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.mesh=fdsp:64", "must be axes (data, fsdp, tensor, context), each with its number of devices, such as"),
        ("plan.mesh=fsdp:3", "train.batch_size=64 is not divisible by the mesh's data x fsdp = 3 devices"),
        ("plan.accelerator=H1000", "did you mean 'H100'?"),
        ("plan.prices=nowhere.toml", "No such file"),
        ("plan.hosts=-1", "must be at least 0"),
        ("plan.hosts=3", "does not divide the 1 devices"),
        ("train.seq_len=0", "must be at least 1"),
    ],
)
def test_bad_input_is_one_line(capsys, override, message):
    code, out, err = run(capsys, "--config=gpuburnout_1b", f"--config.{override}")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("no_plugin")
def test_more_devices_than_jax_began_with_is_one_line(capsys):
    assert len(jax.devices()) == 8
    code, _, err = run(capsys, "--config=gpuburnout_1b", "--config.plan.mesh=fsdp:16")
    assert (code, "the mesh needs 16: use a new process" in err) == (2, True)


def test_spot_that_never_ends_is_valid_json(capsys):
    _, out, _ = run(capsys, "--config=local_35m", "--json", "--config.plan.preemptions_per_day=100000")
    assert "Infinity" not in out
    assert {row["usd_spot"] for row in json.loads(out)["accelerators"]} == {None}


def test_a_budget_needs_no_config(capsys, monkeypatch):
    opened = types.SimpleNamespace(token_counts=lambda: {"web": 10**9, "code": 10**8})
    mixture = {"web": 3.0, "code": 1.0}
    order = lambda c: document_rows.Rows(opened, mixture, 0, c.train.seq_len, c.train.batch_size, (), None)  # noqa: E731
    monkeypatch.setattr(program, "open_order", order)
    monkeypatch.setattr(program.console, "WORKING_S", 600)  # what a slow machine says of its work is not asked here
    keys = ["--budget=20", "--config.plan.accelerator=H100"]
    code, out, err = run(capsys, *keys, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    (row,) = found["accelerators"]
    assert (found["ladder"], found["budget_usd"]) == (None, 20)
    assert row["epochs"]["web"] == pytest.approx(0.75 * row["tokens"] / 1e9)
    code, out, _ = run(capsys, "local_35m", *keys)
    assert code == 0
    assert "BUDGET  $20.00" in out
    assert "jaxlm train local_35m --config.model.n_layers=" in out


def test_a_ladder_foretells_the_loss_of_a_plan_and_of_a_budget(capsys, tmp_path):
    draws = [[1.0, share * 60.0, share * 400.0, 0.3, 0.35, 0.01] for share in (0.98, 1.02) * 20]
    fitted = {"law": {"e": 1.0, "a": 60.0, "b": 400.0, "alpha": 0.3, "beta": 0.35}, "noise": 0.01, "draws": draws}
    fitted["from"] = {"parameters": 5e6, "tokens": 1e8}
    target = {"config": "local_35m", "parameters": 34_087_424, "tokens": 655_360_000}
    target |= {"vocab_size": 20480, "shape": {"family": "llama"}}
    empty = {"same": {}, "runs": [], "sizes": [], "budgets": [], "hours": {"limit": None, "planned": None, "spent": 0}}
    ladder.write(tmp_path / "ladder", {"version": 1, "target": target, "fit": fitted} | empty)
    keys = ["local_35m", f"--config.workdir={tmp_path}", "--config.plan.accelerator=H100"]
    _, out, _ = run(capsys, *keys, "--json")
    found = json.loads(out)["ladder"]
    loss = 1 + 60 / 34_087_424**0.3 + 400 / 655_360_000**0.35
    assert found["loss"] == pytest.approx(loss)
    assert found["low"] < loss < found["high"]
    _, out, _ = run(capsys, *keys)
    words = " ".join(out.split())
    assert f"LADDER {loss:.3f} held-out nats a token at the end, 80% in" in words
    _, out, _ = run(capsys, *keys, "--json", "--budget=20")
    found = json.loads(out)
    assert (found["ladder"], found["law"]) == (str(tmp_path / "ladder"), "ladder")
    assert found["accelerators"][0]["low"] < found["accelerators"][0]["loss"] < found["accelerators"][0]["high"]


@pytest.mark.parametrize("value", ["abc", "0", "-1", "nan", "inf"])
def test_a_budget_that_is_none_is_one_line(capsys, value):
    code, out, err = run(capsys, f"--budget={value}")
    assert (code, out) == (2, "")
    assert err == f"jaxlm: --budget={value}: give dollars above 0, such as --budget=200\n"


def test_a_budget_and_a_size_are_refused(capsys):
    code, _, err = run(capsys, "quickstart", "--budget=20", "--params=5M")
    assert (code, err) == (2, "jaxlm: --budget chooses the size that --params sets: leave one of the two out\n")


def test_a_budget_with_a_folder_that_holds_no_run_needs_no_config_either(capsys, tmp_path):
    keys = ["--budget=20", "--config.plan.accelerator=H100", f"--config.workdir={tmp_path / 'new'}"]
    code, out, _ = run(capsys, *keys)
    assert (code, "jaxlm train speed_1b" in out, f"--config.workdir={tmp_path / 'new'}" in out) == (0, True, True)
    code, _, err = run(capsys, *keys, f"--config.data.dir={tmp_path / 'none'}")
    assert f"there is no finished data in {tmp_path / 'none'}" in err
    (tmp_path / "new/checkpoints/5").mkdir(parents=True)
    code, out, _ = run(capsys, "speed_1b", *keys)  # a run keeps its model
    assert f"--config.workdir={tmp_path / 'new'}-20usd" in out


def test_a_budget_is_of_the_whole_run(capsys):
    code, _, err = run(capsys, "speed_1b", "--budget=20", "--config.phases.shrink=cpu")
    assert (code, "--budget is for the whole run: leave config.phases.shrink out" in err) == (2, True)
