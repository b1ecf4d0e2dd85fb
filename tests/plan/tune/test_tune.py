"""The search over settings, and what auto chooses, against the compiler's own account of memory."""

import dataclasses

import pytest
from tiny_keys import words

from jaxlm import config
from jaxlm.config import ConfigError, MeshConfig, RunError, config_files
from jaxlm.devices import sharding
from jaxlm.plan import lower
from jaxlm.plan.tune import tune

START = tune.Candidate(8, "none", "xla", False, 0)
VALUES = {
    "attention": ("xla", "blocked"),
    "microbatch_size": (8, 4, 2),
    "remat": ("none", "full"),
    "scan_layers": (False, True),
    "tile_tokens": (0, 16),
}


def trial_of(speed, fits=lambda c: True):
    tried = []

    def trial(candidate):
        tried.append(candidate)
        return tune.Trial(candidate, tokens_per_second=speed(candidate) if fits(candidate) else None)

    return trial, tried


def speed(c: tune.Candidate) -> float:
    """Each setting counts for itself: the best is blocked, 4, none, scanned, 16."""
    parts = [c.attention == "blocked", c.microbatch_size == 4, c.remat == "none", c.scan_layers, c.tile_tokens == 16]
    return 100.0 + sum(parts)


BEST = tune.Candidate(4, "none", "blocked", True, 16)


def test_one_setting_after_the_other_finds_what_all_combinations_find():
    for exhaustive, tries in ((False, 6), (True, 48)):
        trial, tried = trial_of(speed)
        trials = tune.search(VALUES, START, trial, exhaustive=exhaustive, max_seconds=1e9)
        assert min(trials, key=tune.slowness).candidate == BEST
        assert len(tried) == len(set(tried)) == tries


def test_more_remat_is_for_microbatches_that_do_not_fit_with_less():
    """Without remat 2 rows fit, with it 4; twice the speed for each row more. 8 rows fit nowhere, and are tried once each."""

    def fits(c):
        return c.microbatch_size <= (2 if c.remat == "none" else 4)

    trial, tried = trial_of(lambda c: 100.0 * c.microbatch_size, fits)
    trials = tune.search(
        VALUES, dataclasses.replace(START, microbatch_size=2), trial, exhaustive=False, max_seconds=1e9
    )
    best = min(trials, key=tune.slowness).candidate
    assert (best.microbatch_size, best.remat) == (4, "full")
    pairs = {(c.remat, c.microbatch_size) for c in tried}
    assert pairs == {("none", 2), ("none", 4), ("full", 4), ("full", 8)}  # not ("none", 8), not ("full", 2)


@pytest.mark.parametrize(
    ("batch", "ways", "sizes"), [(16, 1, [16, 8, 4, 2, 1]), (24, 2, [24, 12, 6, 2]), (7, 1, [7, 1])]
)
def test_microbatch_sizes(batch, ways, sizes):
    c = config.resolve(config_files.load("base", ["data.path=x", f"train.batch_size={batch}"]))
    assert tune.microbatch_sizes(c, ways) == sizes


TINY = words("""
    data.path=x model.n_layers=2 model.d_model=32 model.n_heads=2 model.d_ff=64 model.vocab_size=128
    model.attention=xla model.dtype=float32 train.batch_size=8 train.seq_len=128
""")


def auto(**overrides):
    keys = {"model.remat": "auto", "train.microbatch_size": -1} | overrides
    c = config.resolve(config_files.load("base", [*TINY, *(f"{k}={v}" for k, v in keys.items())]))
    return c, sharding.make_mesh(MeshConfig(1, 1, 1, 1), sharding.jax.devices()[:1])


def test_auto_takes_the_least_remat_and_the_largest_microbatch_that_fit(monkeypatch):
    c, mesh = auto(**{"train.batch_size": 2, "model.n_layers": 1})
    said = []
    monkeypatch.setattr(tune, "memory_limit", lambda memory_gb: 1e12)
    chosen = tune.fit(c, mesh, said.append)
    assert (chosen.model.remat, chosen.train.microbatch_size, chosen.eval.batch_size) == ("none", 2, 2)
    assert "microbatch_size=2, model.remat=none" in said[0]
    c, mesh = auto(**{"train.batch_size": 2, "model.n_layers": 1, "model.remat": "full"})
    monkeypatch.setattr(lower, "compile_parts", lambda made, options: (None, 5e7))
    monkeypatch.setattr(tune, "memory_limit", lambda memory_gb: 1.0)
    with pytest.raises(
        ConfigError, match=r"nothing fits into 0.00 GB a device.*needs 0.05 GB; take optim.name=adamw8bit"
    ):
        tune.fit(c, mesh, said.append)


@pytest.mark.parametrize(
    ("begun", "memory_gb", "error"), [(False, 0, ConfigError), (True, 0, RunError), (True, 1e-9, ConfigError)]
)
def test_nothing_fits_is_bad_input_unless_more_memory_may_be_free_later(monkeypatch, begun, memory_gb, error):
    monkeypatch.setattr(lower, "compile_parts", lambda made, options: (None, 2))
    monkeypatch.setattr(tune, "memory_limit", lambda memory_gb: 1.0)
    keys = {"train.batch_size": 1, "model.n_layers": 1, "model.remat": "full", "tune.memory_gb": memory_gb}
    c, mesh = auto(**keys)
    with pytest.raises(error, match="nothing fits into") as told:
        tune.fit(c, mesh, print, begun=lambda: begun)
    assert ("say how much by --config.tune.memory_gb=GB" in str(told.value)) == (not memory_gb)


def test_what_is_set_stays_and_no_memory_is_asked_for(monkeypatch):
    monkeypatch.setattr(tune, "memory_limit", None)  # off Linux it is unknown
    monkeypatch.setattr(tune, "Compiler", None)
    c, mesh = auto(**{"train.microbatch_size": 4, "model.remat": "dots"})
    assert tune.fit(c, mesh, print) is c


def test_small_microbatches_come_last(monkeypatch):
    """With room for one row without remat, or for more with it, an accelerator wants more."""
    monkeypatch.setattr(tune, "full_speed_rows", lambda config, mesh: 512 / config.train.seq_len)
    monkeypatch.setattr(lower, "compile_parts", lambda made, options: (None, cost(made.config)))

    def cost(c):
        return c.train.microbatch_size * {"none": 8, "names": 4, "dots": 2, "full": 1}[c.model.remat]

    c, mesh = auto()
    for limit, expected in (
        (64, ("none", 8)),
        (32, ("none", 4)),
        (16, ("names", 4)),
        (8, ("dots", 4)),
        (3, ("dots", 1)),
    ):
        monkeypatch.setattr(tune, "memory_limit", lambda memory_gb, limit=limit: limit)
        chosen = tune.fit(c, mesh, print)
        assert (chosen.model.remat, chosen.train.microbatch_size) == expected


def test_a_machine_is_asked_for_its_memory_only_where_something_is_left_open(monkeypatch):
    """Off Linux it may not know."""

    def unknown(*_):
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(tune, "memory_limit", unknown)
    c, mesh = auto(**{"train.microbatch_size": 4, "model.remat": "dots"})
    assert tune.fit(c, mesh, print) is c
    for key, value in (("model.remat", "auto"), ("train.microbatch_size", -1)):
        c, mesh = auto(**{"train.microbatch_size": 4, "model.remat": "dots", key: value})
        with pytest.raises(FileNotFoundError):
            tune.fit(c, mesh, print)
