"""Speed, seconds and dollars."""

import jax
import pytest

from jaxlm import config
from jaxlm.config import HardwareConfig, config_files
from jaxlm.plan import flops
from jaxlm.run import clock
from jaxlm.run.spent import Earlier
from jaxlm.train import recorder


class Time:
    """A clock that the test moves."""

    def __init__(self, **seconds):
        self.spent = dict.fromkeys(clock.ACTIVITIES, 0.0) | seconds

    def seconds(self):
        return dict(self.spent)


SIZES = {"tokens_per_step": 100, "flops_palm": 10.0, "flops_causal": 5.0, "peak_flops": 2000.0}


def test_a_record_has_the_seconds_of_all_starts_and_each_at_its_price(monkeypatch):
    monkeypatch.setattr(recorder.time, "time", lambda: 1.7e9)
    spent = Time(step=40.0, start=5.0, down=5.0)
    m = recorder.Meter(spent, Earlier(wall_s=50.0, cost_usd=7.0), **SIZES, usd_per_hour=3600.0)
    assert m.now(3)["cost_usd"] == 7.0
    spent.spent |= {"step": 46.0004, "save": 1.9999, "evaluate": 2.0}
    record = m.now(4)
    assert record == {"step": 4, "tokens": 400, "time": 1.7e9, "wall_s": 60.0, "cost_usd": 17.0, "goodput": 0.7667} | {
        f"time/{name}_s": pytest.approx(spent.spent[name], abs=1e-3) for name in clock.ACTIVITIES
    }
    assert record["wall_s"] == pytest.approx(sum(record[f"time/{name}_s"] for name in clock.ACTIVITIES), abs=1e-9)


def test_speed_counts_steps_and_waits_for_batches_alone():
    spent = Time(start=5.0, compile=5.0)
    m = recorder.Meter(spent, **SIZES, usd_per_hour=0.0)
    assert "tokens_per_second" not in m.measure(1, 11)
    spent.spent |= {"step": 4.0, "repeated": 3.0, "data": 3.0, "evaluate": 50.0, "save": 9.0, "compile": 100.0}
    record = m.measure(6, 11)
    assert {k: record[k] for k in ("tokens_per_second", "eta_s", "mfu_palm", "mfu_causal")} == {
        "tokens_per_second": 50.0,
        "eta_s": 10.0,
        "mfu_palm": 0.25,
        "mfu_causal": 0.125,
    }
    assert "tokens_per_second" not in m.measure(4, 11)  # after a rollback


def test_a_run_of_a_config_is_metered_on_all_devices():
    c = config.resolve(config_files.load("quickstart", ["workdir=w", "train.batch_size=16", "train.seq_len=128"]))
    spent = Time(step=50.0)
    m = recorder.Meter(spent, tokens_per_step=16 * 128, usd_per_hour=3600.0)
    m = m.of_flops(flops.of(c), HardwareConfig(3600.0, 2.0, "", ()))
    record = m.now(3)
    assert record["tokens"] == 3 * 16 * 128
    assert record["cost_usd"] == record["wall_s"] == 50.0
    m.measure(3, 10)
    spent.spent["step"] += 2.0
    record = m.measure(4, 10)
    peak = 2e12 * jax.device_count()
    per_token = flops.flops_per_token(c.model, 128)
    assert record["mfu_palm"] == pytest.approx(record["tokens_per_second"] * per_token.palm / peak)
    assert record["mfu_causal"] == pytest.approx(record["tokens_per_second"] * per_token.causal / peak)
