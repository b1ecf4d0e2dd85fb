"""The best model for so many dollars."""

import dataclasses
import subprocess

import numpy as np
import pytest

from jaxlm import config
from jaxlm.config import ConfigError, config_files
from jaxlm.models import hardware
from jaxlm.plan import accelerators, cost, fit, rules
from jaxlm.plan.flops import count_params
from jaxlm.plan.ladder import budget
from jaxlm.plan.ladder import text as ladder_text
from jaxlm.plan.ladder.law import Fit
from jaxlm.plan.rules import Law


def load(name: str, *overrides: str) -> config.Config:
    c = config.resolve(config_files.load(name, ["workdir=w", *overrides]))
    return dataclasses.replace(c, model=hardware.for_platform(c.model, "gpu"))


def on(card: str, usd: float, *overrides: str) -> dict:
    (row,) = budget.plan(load("speed_1b", f"plan.accelerator={card}", *overrides), usd)["accelerators"]
    return row


def test_a_family_has_the_proportions_of_its_model():
    model = load("speed_1b").model
    family = budget.family(model)
    assert model in family
    widths = [m.d_model for m in family]
    assert widths == sorted(widths)
    for m in family:
        assert m.n_heads * m.head_dim == m.d_model
        assert m.n_heads % m.n_kv_heads == 0
        assert (m.d_ff, m.head_dim) == (4 * m.d_model, 128)
    narrow = budget.family(load("quickstart", "model.vocab_size=4096").model)
    assert any((m.n_layers, m.d_model, m.n_heads, m.n_kv_heads) == (3, 256, 2, 1) for m in narrow)


def test_no_neighbour_does_better_by_the_law():
    row, h100 = on("H100", 200), accelerators.load().named("H100")
    c = load("speed_1b")
    family = budget.family(c.model)
    at = [count_params(m) for m in family].index(row["parameters"])
    for m in (family[at - 1], family[at + 1]):
        run = dataclasses.replace(c, model=m, train=dataclasses.replace(c.train, microbatch_size=16))
        tokens = 3600 * 200 / h100.usd * budget.cost.speed(run, h100, 1)
        assert budget.LAW.loss(count_params(m), tokens) > row["law_loss"]


def test_more_money_and_lower_prices_buy_a_better_model():
    rows = [on("H100", usd) for usd in (20, 200, 2000)]
    for key in ("parameters", "tokens", "hours", "batch_tokens"):
        assert [row[key] for row in rows] == sorted(row[key] for row in rows), key
    assert rows[0]["loss"] > rows[1]["loss"] > rows[2]["loss"]
    assert rows[1]["low"] < rows[1]["loss"] < rows[1]["high"]
    assert on("A100 80GB", 200)["loss"] > rows[1]["loss"]  # 57% of 989 TFLOP/s at $2.70 against 64% of 312 at $1.60


@pytest.mark.parametrize(("card", "usd"), [("H100", 50), ("RTX 4090", 50), ("RTX 4070", 200)])
def test_what_it_says_to_type_is_that_model_for_that_money(card, usd):
    row, device = on(card, usd, "eval.batch_size=16"), accelerators.load().named(card)
    c = load("speed_1b", "eval.batch_size=16", *(f"{key}={value}" for key, value in row["overrides"].items()))
    assert count_params(c.model) == row["parameters"]
    assert cost.tokens(c) == row["tokens"]
    assert c.train.batch_size * c.train.seq_len == row["batch_tokens"]
    phases = cost.by_phase(c, row["tokens_per_second"], row["devices"])
    assert sum(phase["hours"] for phase in phases) == pytest.approx(row["hours"], rel=1e-3)
    assert row["hours"] * row["devices"] * device.usd == pytest.approx(usd)
    assert cost.cost(c, device, row["devices"], 1)["usd"] < usd  # steps alone
    # It is billed at the price of these devices, so that its phases' limits are not met before their end.
    billed = row["hours"] * c.hardware.usd_per_hour
    assert billed == pytest.approx(usd, rel=0.02)
    last, begin = c.phases.plan["main"], c.phases.plan["smoke"].steps
    assert (last.steps, begin) == (row["steps"], round(row["steps"] * 100 / 24_800))
    assert (c.stop.usd, sum(phase.usd for phase in c.phases.plan.values())) == (usd, pytest.approx(usd, rel=1e-6))
    for phase in phases:
        assert phase["limit_usd"] == pytest.approx(phase["hours"] * c.hardware.usd_per_hour, rel=0.005), phase["name"]
    # It fits on them.
    assert (c.mesh.fsdp, row["devices"]) in ((row["devices"],) * 2, (1, 1))
    mesh = dataclasses.replace(c.mesh, data=1)
    assert fit.Planner(c).memory(mesh).total <= device.memory
    assert (card == "RTX 4070") == (row["devices"] > 1)


def test_all_phases_keep_their_shares():
    c = load("gpuburnout_1b", "plan.accelerator=H100")
    (row,) = budget.plan(c, 200)["accelerators"]
    typed = load("gpuburnout_1b", *(f"{key}={value}" for key, value in row["overrides"].items()))
    ends = {name: phase.steps for name, phase in typed.phases.plan.items()}
    assert ends == {name: round(row["steps"] * old.steps / 90_000) for name, old in c.phases.plan.items()}
    assert ends["finish"] == row["steps"]
    assert sum(phase.usd for phase in typed.phases.plan.values()) == pytest.approx(200, rel=1e-6)


def test_phases_by_tokens_keep_their_shares_of_the_steps_at_which_they_end():
    a_step = 131_072 * 2
    ends = {"smoke": a_step * 3 // 2, "main": a_step * 5 // 2}  # in the middle of steps 2 and 3
    keys = [f"phases.plan.{name}.{key}" for name, tokens in ends.items() for key in ("steps=0", f"tokens={tokens}")]
    c = load("speed_1b", "plan.accelerator=H100", *keys)
    assert c.train.batch_size * c.train.seq_len == a_step
    (row,) = budget.plan(c, 50)["accelerators"]
    told = row["overrides"]
    found = [told[f"phases.plan.{name}.{key}"] for key in ("steps", "tokens") for name in ("smoke", "main")]
    assert found == [round(row["steps"] * 2 / 3), row["steps"], 0, 0]


def test_the_command_keeps_what_was_typed_and_a_shell_takes_it():
    typed = ["train.seq_len=1024", "optim.schedule_steps=9000", "data.dir=my data", "optim.lr=1"]
    typed.append("plan.accelerator=H100")
    found = budget.plan(load("speed_1b", *typed), 50)
    page = ladder_text.budget(found, "speed_1b", typed)
    said = page[page.index("  jaxlm train") : page.index("NOTES")]
    assert max(map(len, said.splitlines())) <= 100
    script = f"jaxlm() {{ printf '%s\\n' \"$@\"; }}\n{said}"
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    command = ran.stdout.splitlines()
    assert (command[:2], ran.stderr) == (["train", "speed_1b"], "")
    c = load("speed_1b", *(word.removeprefix("--config.") for word in command[2:]))
    assert cost.tokens(c) == found["accelerators"][0]["tokens"]
    assert (c.train.seq_len, c.optim.schedule_steps, c.data.dir, c.optim.lr) == (1024, 0, "my data", 0)
    flat = " ".join(page.split())
    assert "the limits add up to the budget" in flat
    assert "The budget chooses what you gave too: optim.schedule_steps, optim.lr." in flat


def test_key_value_heads_keep_about_their_share():
    model = load("speed_1b").model  # 16 and 4
    heads = {m.n_heads: m.n_kv_heads for m in budget.family(model)}
    assert heads[16] == 4
    assert heads[9] == 3
    assert not {7, 11, 13} & set(heads)  # whose one divisor is 1
    assert all(kv <= 1.5 * max(n / 4, 1) and n / 4 <= 1.5 * kv for n, kv in heads.items())


def known(alpha: float) -> Fit:
    """The fit of a ladder whose losses fall with N^-alpha, known to a hundredth."""
    law = Law("ladder", 1.0, 2.5 * 3e7**alpha, 400.0, alpha, 0.3)
    draws = np.array([[law.e, share * law.a, share * law.b, alpha, 0.3, 0.0] for share in (0.99, 1.01) * 20])
    return Fit(law, 0.0, draws, 3e7, 1e9)


def test_a_ladder_takes_the_place_of_the_published_law():
    c = load("speed_1b", "plan.accelerator=H100")
    slow, steep = (budget.plan(c, 50, known(alpha)) for alpha in (0.3, 0.7))
    assert slow["law"] == "ladder"
    (row,), (other,) = slow["accelerators"], steep["accelerators"]
    assert row["parameters"] > 2 * other["parameters"]  # where size goes on paying, the best model is larger
    assert row["loss"] == known(0.3).law.loss(row["parameters"], row["tokens"])
    assert (row["loss"], row["low"], row["high"]) == known(0.3).loss(row["parameters"], row["tokens"])
    assert row["low"] < row["loss"] < row["high"]
    text = " ".join(ladder_text.budget(slow | {"ladder": "runs/x/ladder"}, "speed_1b").split())
    assert "By the law of the runs in runs/x/ladder" in text
    assert "No ladder" not in text


def test_the_page_says_that_there_is_no_ladder():
    found = budget.plan(load("speed_1b", "plan.accelerator=H100"), 50)
    found["accelerators"][0]["epochs"] = {"web": 5.0}
    page = ladder_text.budget(found, "speed_1b")
    assert max(map(len, page.splitlines())) <= 100
    said = " ".join(page.split())
    assert "BUDGET $50.00" in said
    assert "No ladder (jaxlm ladder): sizes are chosen by" in said
    assert "times through the data: web 5 (beyond" in said
    assert "jaxlm train speed_1b --config." in said
    assert "No data at hand" not in page


def test_both_rates_are_those_that_the_command_trains_with():
    row = on("H100", 50)
    c = load("speed_1b", *(f"{key}={value}" for key, value in row["overrides"].items()))
    trained = rules.by_rule(c, lambda line: None).optim
    assert (row["lr"], row["b2"]) == (trained.lr, trained.b2)
    assert row["matrix_lr"] == pytest.approx(trained.lr * trained.matrix_lr_ratio, rel=0.01)
    assert row["matrix_lr"] != row["lr"]
    one = on("H100", 50, "optim.rates=('layers_.*/kernel 1',)")
    assert one["matrix_lr"] == one["lr"] == pytest.approx(row["matrix_lr"], rel=0.01)


def test_a_command_has_whole_numbers_however_large():
    found = budget.plan(load("speed_1b", "plan.accelerator=H100"), 50)
    found["accelerators"][0]["overrides"]["train.steps"] = 1_234_567
    assert "--config.train.steps=1234567" in ladder_text.budget(found, "speed_1b")


def test_little_money_still_names_a_model_and_pays_for_the_start_first():
    found = budget.plan(load("speed_1b", "plan.accelerator=H100"), 0.25)
    (row,) = found["accelerators"]
    assert row["parameters"] > 0
    assert row["steps"] >= budget.LEAST_STEPS
    assert row["tokens"] / row["tokens_per_second"] < 3600 * (row["hours"] - cost.START_HOURS)
    row |= {"loss": None, "low": None, "high": None}  # too little for a forecast
    assert "H100" in ladder_text.budget(found, "speed_1b")
    with pytest.raises(ConfigError, match="buys no 20 steps of any model on H100: give more"):
        on("H100", 2.70 * cost.START_HOURS)


def test_dollars():
    assert budget.dollars_of("200") == budget.dollars_of("$200") == 200
    with pytest.raises(ConfigError, match="give dollars above 0, such as --budget=200"):
        budget.dollars_of("")


def test_what_cannot_be_is_one_line():
    with pytest.raises(ConfigError, match="not in the prices file; did you mean 'H100'"):
        budget.plan(load("speed_1b", "plan.accelerator=H1000"), 50)
    with pytest.raises(ConfigError, match=r"leave config\.plan\.mesh out"):
        budget.check(load("speed_1b", "plan.mesh=fsdp:8"))


def test_what_fits_nowhere_is_not_blamed_on_the_money(monkeypatch):
    monkeypatch.setattr(fit.Planner, "fewest", lambda self, limit: None)
    line = r"no model .* fits into H100, .*: shorten the rows \(config.train.seq_len=2048\)"
    with pytest.raises(ConfigError, match=line):
        budget.plan(load("speed_1b", "plan.accelerator=H100"), 50)


def test_a_budget_is_for_pretraining():
    with pytest.raises(ConfigError, match="this is a config of sft"):
        budget.check(load("sft"))
