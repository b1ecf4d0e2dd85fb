"""The runs that a config's ladder has: their shapes, batches, rates, and what fits into the hours."""

import dataclasses
import pathlib
import types

import pytest

from jaxlm import config
from jaxlm.config import ConfigError, checks, config_files
from jaxlm.data.batches.document_rows import Rows
from jaxlm.plan import rules
from jaxlm.plan.ladder import rungs

LADDER = pathlib.Path("ladder")


def resolve(name: str, *overrides: str) -> config.Config:
    return config.resolve(config_files.load(name, ["workdir=w", *overrides]))


def order(c: config.Config, **tokens: int) -> Rows:
    """Data of which only the counts are there; a tenth of them is held out."""
    data = types.SimpleNamespace(
        path="DATA",
        sha256="abc",
        token_counts=lambda split="train": tokens,
        entry=lambda source, split: {"tokens": tokens[source] // 10, "bytes": 4 * (tokens[source] // 10)},
    )
    return Rows(data, {source: 1.0 for source in tokens}, c.seed, c.train.seq_len, c.train.batch_size)


def test_the_models_of_one_billion_keep_its_shape():
    model = resolve("gpuburnout_1b").model
    found = [rungs.smaller(model, width) for width in rungs.sizes(model)]
    shapes = [(m.d_model, m.n_layers, m.n_heads, m.n_kv_heads, m.head_dim, m.d_ff) for m in found]
    assert shapes == [(512, 4, 8, 2, 64, 2048), (768, 6, 12, 3, 64, 3072), (1024, 8, 16, 4, 64, 4096)]
    assert {(m.vocab_size, m.rope.theta, m.tie_embeddings, m.family) for m in found} == {(32005, 5e5, True, "llama")}


def test_a_small_model_has_whole_heads_of_another_size():
    model = resolve("quickstart").model
    found = [rungs.smaller(model, width) for width in rungs.sizes(model)]
    assert [(m.d_model, m.n_heads, m.n_kv_heads, m.head_dim) for m in found] == [(d, 1, 1, d) for d in (64, 96, 128)]


def test_a_model_without_room_for_three_is_refused():
    model = resolve("quickstart", "model.d_model=16", "model.n_heads=2").model
    with pytest.raises(ConfigError, match=r"model.d_model=16 is too narrow for a ladder: name three by --sizes=D,D,D"):
        rungs.sizes(model)


@pytest.mark.parametrize("name", [n for n in config_files.shipped_configs() if resolve(n).program == "pretrain"])
def test_every_shipped_config_has_a_ladder_that_can_train(name):
    c = resolve(name, "model.vocab_size=4096")
    total = c.train.steps * c.train.batch_size * c.train.seq_len
    found = rungs.rungs(c, rungs.sizes(c.model), [total / 8, total / 4, total / 2], LADDER)
    assert len({run.entry["name"] for run in found}) == len(found) == 11
    for run in found:
        checks.validate(run.config)
        o, whole = run.config.optim, c.optim
        assert o.warmup_steps / run.config.train.steps == pytest.approx(whole.warmup_steps / c.train.steps, abs=0.01)
        assert (o.schedule, o.schedule_steps, run.config.eval.max_mb) == (whole.schedule, 0, c.eval.max_mb)
        assert not run.config.phases.plan
        assert run.config.workdir == str(LADDER / "runs" / run.entry["name"])


def test_the_order_is_the_rates_then_from_cheap_to_dear():
    c = resolve("quickstart")
    found = rungs.rungs(c, rungs.sizes(c.model), [133_120, 266_240, 532_480], LADDER)
    assert [run.entry["times"] for run in found] == [0.5, 1, 2] + 8 * [1]
    assert [run.entry["kind"] for run in found].count("grid") == 9
    assert {run.entry["tokens"] for run in found[:3]} == {133_120}
    work = [run.entry["parameters"] * run.entry["tokens"] for run in found if run.entry["kind"] == "grid"]
    assert work[0] == min(work)
    assert work[-1] == max(work)


def test_budgets_whose_runs_would_share_a_folder_are_refused():
    c = resolve("quickstart")
    with pytest.raises(ConfigError, match=r"1,000,000, 1,001,500, 2,000,000 tokens are too close"):
        rungs.rungs(c, rungs.sizes(c.model), [1e6, 1_001_500, 2e6], LADDER)


def test_batches_shrink_with_the_budget():
    c = resolve("gpuburnout_1b")
    total = c.train.steps * c.train.batch_size * c.train.seq_len
    assert [rungs.batch_size(c, total / k) for k in (0.5, 1, 4, 16, 64)] == [64, 64, 32, 16, 8]
    split = dataclasses.replace(c, mesh=dataclasses.replace(c.mesh, fsdp=32))
    assert rungs.batch_size(split, total / 64) == 32
    run = rungs.rung(c, 512, total / 64, LADDER)
    assert (run.config.train.batch_size, run.config.train.microbatch_size) == (8, 8)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_rate_is_the_configs_own_times_the_rules_ratio(optimizer):
    c = resolve("gpuburnout_1b", f"optim.name={optimizer}", "optim.lr=1e-4")
    run = rungs.rung(c, 512, 4e8, LADDER)
    ratio = rules.rate(optimizer, rules.of(run.config)).value / rules.rate(optimizer, rules.of(c)).value
    assert run.config.optim.lr == pytest.approx(1e-4 * ratio, rel=0.01)
    assert rungs.rung(c, 512, 4e8, LADDER, times=2).config.optim.lr == pytest.approx(2 * run.config.optim.lr, rel=0.01)
    by_rule = resolve("gpuburnout_1b", f"optim.name={optimizer}", "optim.lr=0")
    run = rungs.rung(by_rule, 512, 4e8, LADDER)
    assert run.config.optim.lr == pytest.approx(rules.rate(optimizer, rules.of(run.config)).value, rel=0.01)


@pytest.mark.parametrize("own", ["optim.lr=0", "optim.lr=1e-3"])
def test_two_rates_by_rule_scale_each_by_its_own_and_vary_together(own):
    c = resolve("speed_1b", own)
    run, doubled = (rungs.rung(c, 512, 4e8, LADDER, times=times).config for times in (1, 2))
    small, whole = rules.of(run), rules.of(c)
    lr = rules.adamw_rate(small).value
    lr *= c.optim.lr / rules.adamw_rate(whole).value if c.optim.lr else 1
    assert run.optim.lr == pytest.approx(lr, rel=0.01)
    assert run.optim.lr * run.optim.matrix_lr_ratio == pytest.approx(rules.muon_rate(small).value, rel=0.02)
    assert doubled.optim.lr == pytest.approx(2 * run.optim.lr, rel=0.01)
    assert doubled.optim.matrix_lr_ratio == run.optim.matrix_lr_ratio


def test_a_ratio_that_is_given_holds_the_matrices_to_the_rule_for_muon():
    run = rungs.rung(resolve("speed_1b", "optim.rates=('layers_.*/kernel 4',)"), 512, 4e8, LADDER).config
    assert 4 * run.optim.lr == pytest.approx(rules.muon_rate(rules.of(run)).value, rel=0.01)


def test_what_is_planned_fits_into_the_hours():
    c = resolve("local_35m")
    speeds, held_out = {128: 3e6, 192: 2e6, 256: 1e6}, 100_000
    budgets = rungs.budgets(c, speeds, 0.5, held_out)
    runs = rungs.rungs(c, list(speeds), budgets, LADDER)
    took = sum(rungs.seconds(run.entry["tokens"], speeds[run.config.model.d_model], held_out) for run in runs)
    assert took == pytest.approx(1800, rel=0.02)
    assert budgets == [budgets[-1] / 4, budgets[-1] / 2, budgets[-1]]
    assert rungs.budgets(c, speeds, 1000.0, held_out)[-1] == 80_000 * 16 * 512  # the config's own tokens are the most


def test_the_default_hours_grow_with_the_config():
    c = resolve("gpuburnout_1b")
    slow, fast = ({512: 3 * s, 768: 2 * s, 1024: s} for s in (3e4, 3e8))
    assert rungs.limit(c, fast) == rungs.HOURS
    assert rungs.limit(c, slow) > 10 * rungs.HOURS


def test_hours_that_are_too_short_name_those_that_are_not():
    c = resolve("local_35m")
    speeds = {128: 2e4, 192: 1e4, 256: 5e3}
    with pytest.raises(ConfigError, match=r"0.05 hours are too short for a ladder here: .* give --hours=") as refused:
        rungs.budgets(c, speeds, 0.05, 0)
    enough = float(str(refused.value).split("--hours=")[1])
    assert rungs.budgets(c, speeds, enough, 0)
    with pytest.raises(ConfigError, match="are too short for a ladder here"):
        rungs.budgets(c, speeds, 0.9 * enough, 0)
    with pytest.raises(ConfigError, match=r"train.steps=30 is too short for a ladder"):
        rungs.budgets(resolve("local_35m", "train.steps=30", "optim.warmup_steps=1"), speeds, 5, 0)


def test_data_that_is_read_again_is_told_and_too_little_is_refused():
    c = resolve("quickstart")
    runs = rungs.rungs(c, rungs.sizes(c.model), [133_120, 266_240, 532_480], LADDER)
    assert rungs.check_data(order(c, web=10**9), runs) == ""
    said = rungs.check_data(order(c, web=10**9, few=10**5), runs)
    assert said == "the largest budget reads few 2.7 times: the law counts repeated tokens as new ones"
    with pytest.raises(ConfigError, match=r"532k tokens, goes 5.32 times through the data in DATA, and beyond 4 times"):
        rungs.check_data(order(c, web=10**5), runs)


def test_the_held_out_tokens_are_those_that_a_run_measures():
    older = resolve("quickstart", "eval.max_batches=2")  # of 8 rows of 256
    assert rungs.held_out_tokens(older, order(older, web=10**9, few=1000)) == 2 * 8 * 256 + 100
    c = resolve("quickstart", "eval.max_mb=0.02")  # of 4 bytes a token
    assert rungs.held_out_tokens(c, order(c, web=10**9, few=1000)) == 5000 + 100
    whole = resolve("quickstart", "eval.max_mb=0")
    assert rungs.held_out_tokens(whole, order(whole, web=10**9, few=1000)) == 10**8 + 100
    with pytest.raises(ConfigError, match="the data in DATA holds out no text"):
        rungs.held_out_tokens(c, order(c, web=5))


@pytest.mark.parametrize(
    ("key", "why"), [("program=sft", "this config is of sft"), ("origin=x", "leave config.origin=x out")]
)
def test_only_new_weights_are_pretrained(key, why):
    with pytest.raises(ConfigError, match=why):
        rungs.check(resolve("quickstart", key))


def test_what_decides_the_losses_is_what_must_stay():
    c = resolve("quickstart")
    data = order(c, web=10)
    same = rungs.same(c, data)
    assert (same["data"], same["model.d_model"], same["optim.lr"], same["train.steps"]) == ("abc", 256, 1e-2, 460)
    for key in ("optim.b2=.99", "model.qk_norm=False", "model.dtype=bfloat16"):
        assert rungs.same(resolve("quickstart", key), data) != same, key
    assert rungs.same(resolve("quickstart", "model.attention=xla"), data) == same
    assert rungs.same(c, dataclasses.replace(data, mixture={"web": 2.0})) != same
    final = dataclasses.replace(data, final=types.SimpleNamespace(mixture={"web": 1.0}))
    assert rungs.same(c, final) != same
    moved = resolve("quickstart", "data.final.weights.code=1", "data.final.share=.2")
    assert rungs.same(moved, final) != rungs.same(c, final)


@pytest.mark.parametrize(
    ("speed", "hours"), [(speed, hours) for speed in (2e3, 7e3, 3e4) for hours in (0.01, 0.05, 0.09)]
)
@pytest.mark.parametrize("name", ["local_35m", "speed_1b", "gpuburnout_1b"])
def test_the_hours_that_are_named_are_enough(name, speed, hours):
    c = resolve(name)
    speeds = {128: speed, 192: speed / 2, 256: speed / 4}
    with pytest.raises(ConfigError, match="give --hours=") as refused:
        rungs.budgets(c, speeds, hours, 20_000)
    assert len(rungs.budgets(c, speeds, float(str(refused.value).split("--hours=")[1]), 20_000)) == 3


@pytest.mark.parametrize("ratio", ["0", "1", "4"])
def test_the_rule_that_a_run_is_compared_with_is_not_its_own_rate(ratio):
    c = resolve("speed_1b", "optim.lr=3e-3", f"optim.rates=('layers_.*/kernel {ratio}',)")
    run = rungs.rung(c, 512, 4e8, LADDER)
    small = rules.of(run.config)
    rule = rules.adamw_rate(small).value if ratio == "0" else rules.muon_rate(small).value / float(ratio)
    assert run.entry["rule"] == pytest.approx(rule, rel=0.01)
    assert run.config.optim.lr / rule == pytest.approx(3e-3 / rungs.by_rule(c).lr, rel=0.01)
