"""A run that can't fit is refused with settings that fit; these work when they are given."""

import jax
import pytest
from tiny_keys import words

from jaxlm import config
from jaxlm.config import ConfigError, MeshConfig, RunError, config_files
from jaxlm.devices import sharding
from jaxlm.plan import lower
from jaxlm.plan.lower import Room
from jaxlm.plan.tune import tune
from jaxlm.step import parts

TINY = words("""
    data.path=x model.n_layers=1 model.d_model=32 model.n_heads=2 model.d_ff=64 model.vocab_size=512
    model.attention=xla model.dtype=float32 train.batch_size=2 train.seq_len=512
""")


def make(*keys: str) -> parts.Parts:
    c = config.resolve(config_files.load("base", [*TINY, *keys]))
    return lower.parts_of(c, sharding.make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1]))


def admit(*keys: str, room: float | None, begun: bool = False) -> tune.Program:
    return tune.admit(make(*keys), room and Room(room, "of a test"), begun)


@pytest.fixture(scope="module")
def whole() -> tune.Program:
    return admit(room=None)


def test_the_settings_that_are_told_work(whole):
    assert whole.room is None
    assert whole.need == pytest.approx(whole.state + whole.temporaries, rel=0.01)
    assert whole.step.memory_analysis().temp_size_in_bytes == whole.temporaries
    limit = 0.7 * whole.need
    with pytest.raises(ConfigError, match=r"a step needs 0.0\d GB of memory, and there are .* of a test: give") as told:
        admit(room=limit)
    said = str(told.value).partition(";")[0]  # behind it: how to say that there is more memory
    words = [word.rstrip(",") for word in said.split() if word.startswith("--")]
    assert words == ["--config.train.microbatch_size=1"]
    assert admit(*(word.removeprefix("--config.") for word in words), room=limit).need <= tune.HEADROOM * limit


@pytest.mark.parametrize("vocab_size", [512, 0])  # 0: its data is read later
def test_far_too_large_is_refused_by_arithmetic_alone(monkeypatch, vocab_size):
    monkeypatch.setattr(lower, "compile_parts", None)
    mesh = sharding.make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])

    def check(memory_gb: float) -> None:
        keys = [*TINY, f"model.vocab_size={vocab_size}", f"tune.memory_gb={memory_gb}", "train.microbatch_size=-1"]
        tune.check_room(config.resolve(config_files.load("base", keys)), mesh)

    check(1)
    with pytest.raises(
        ConfigError, match=r"a step needs 0.01 GB of memory or more, and .*tune.memory_gb: no setting makes"
    ):
        check(1e-5)


def test_only_what_needs_far_more_is_refused_and_the_mend_passes():
    mesh = sharding.make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])
    keys = ["data.path=x", "model.dtype=float32", "model.vocab_size=32000", "model.n_layers=2", "train.batch_size=8"]

    def check(gb: float, *more: str) -> None:
        tune.check_room(config.resolve(config_files.load("base", [*keys, f"tune.memory_gb={gb}", *more])), mesh)

    with pytest.raises(ConfigError, match="a step needs") as told:
        check(1e-3)
    need = float(str(told.value).partition("a step needs ")[2].split()[0])
    assert need > 0.2
    check(need / 1.1)  # the arithmetic may be off so far
    with pytest.raises(ConfigError, match="a step needs") as told:
        check(need / 2)
    said = str(told.value)
    assert "no setting makes it fit" not in said
    mend = [word.rstrip(",").removeprefix("--config.") for word in said.split() if word.startswith("--config.")]
    mend = [word for word in mend if "memory_gb" not in word]
    assert mend
    check(need / 2, *mend)


def test_quick_compilation_takes_the_same_memory(whole):
    """Only so it may stand for the real one in the search."""
    assert lower.compile_parts(make(), lower.QUICK)[1] == whole.need


def remedy(monkeypatch, cost, limit: float, *keys: str, begun: bool = False):
    """What is told where settings cost what `cost(config)` says, and how many of them were compiled."""
    tried = []

    def compiles(made, options):
        tried.append(made.config)
        return None, cost(made.config)

    monkeypatch.setattr(lower, "compile_parts", compiles)
    made = make(*keys)
    known = (cost(made.config), 10)
    return tune.remedy(made.config, made.mesh, limit, known, begun), len(tried)


def cost(c: config.Config) -> int:
    """10 for the state, 2 with 8-bit AdamW; 8 a row, less with remat; 100 for a loss without tiles."""
    state = 2 if c.optim.name == "adamw8bit" else 10
    rows = c.train.microbatch_size * {"none": 8, "names": 4, "dots": 2, "full": 1}[c.model.remat]
    return state + rows + (0 if c.loss.tile_tokens else 100)


@pytest.mark.parametrize(
    ("limit", "keys", "told", "need", "compiled"),
    [
        (26, ["train.batch_size=8"], ["train.microbatch_size=2"], 26, 2),
        (14, ["train.batch_size=8"], ["train.microbatch_size=1", "model.remat=names"], 14, 4),
        (11, ["train.batch_size=8", "model.remat=dots"], ["train.microbatch_size=1", "model.remat=full"], 11, 3),
        (20, ["loss.tile_tokens=0"], ["train.microbatch_size=1", "loss.tile_tokens=2048"], 18, 4),
        (10, [], ["train.microbatch_size=1", "optim.name=adamw8bit"], 10, 4),
    ],
)
def test_the_smallest_change_that_fits_is_told(monkeypatch, limit, keys, told, need, compiled):
    found, tries = remedy(monkeypatch, cost, limit, *keys)
    assert found == ([f"--config.{key}" for key in told], need)
    assert tries == compiled


def test_an_optimizer_stays_where_a_run_has_begun(monkeypatch):
    assert remedy(monkeypatch, cost, 10, begun=True)[0] is None
    assert remedy(monkeypatch, cost, 2)[0] is None


@pytest.mark.parametrize(
    ("begun", "memory_gb", "error"), [(False, 0, ConfigError), (True, 0, RunError), (True, 1, ConfigError)]
)
def test_a_run_that_has_begun_may_do_better_the_next_time(monkeypatch, begun, memory_gb, error):
    """If what limits it is the memory that is free now."""
    monkeypatch.setattr(tune, "remedy", lambda *args: None)
    monkeypatch.setattr(lower, "compile_parts", lambda made: (None, None))  # the compiler can't place it
    with pytest.raises(error, match="no setting makes it fit; take a smaller model") as told:
        admit("train.batch_size=1", f"tune.memory_gb={memory_gb}", room=1.0, begun=begun)
    assert ("say how much by --config.tune.memory_gb=GB" in str(told.value)) == (not memory_gb)


def test_it_is_compiled_once_and_only_for_steps_that_are_left(monkeypatch):
    calls = []
    monkeypatch.setattr(tune, "admit", lambda *args, **kept: calls.append(kept) or "program")
    once = tune.Once(make("train.steps=200"))
    assert once(200) is None
    assert (once(7), once(9)) == ("program", "program")
    assert calls == [{"begun": True}]
