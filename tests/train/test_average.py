"""The moving average of the weights: what it averages, how often, where it lies, and that nothing of it is lost."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_data
from jax.sharding import PartitionSpec
from tiny_keys import keys

from jaxlm import config
from jaxlm.cli import cli
from jaxlm.config import MeshConfig, config_files
from jaxlm.devices import sharding
from jaxlm.plan import accelerators, cost, flops
from jaxlm.run import metrics
from jaxlm.run.checkpoints import store
from jaxlm.step.state import TrainState
from jaxlm.train import average

TINY = keys("""
    model.n_layers=1 model.d_model=16 model.n_heads=2 model.d_ff=32 train.batch_size=8 train.seq_len=16 train.steps=7
    train.eval_every_steps=3 eval.max_mb=0.001 checkpoint.every_steps=0 checkpoint.keep_last=9 runs.supervise=off
    optim.warmup_steps=0 optim.lr=0.05 optim.schedule=constant log.tensorboard=False sample.prompts=()
    log.every_steps=1
""")
STEP = 8 * 16  # tokens


def settings(share: float, offload: bool = False, **train) -> config.Config:
    given = [f"train.{name}={value}" for name, value in train.items()] + [f"optim.offload={offload}"]
    keys = ["data.path=x", "workdir=w", "optim.warmup_steps=0", f"checkpoint.average={share}", *given]
    return config.resolve(config_files.load("base", keys))


def averaged(
    share: float, steps: int, devices: int = 1, done: int = 0, state: TrainState | None = None, offload: bool = False
) -> TrainState:
    """The state of a run whose weights are each step's number, and in one column its half."""
    mesh = sharding.make_mesh(MeshConfig(1, devices, 1, 1), jax.devices()[:devices])
    placed = {"params": {"w": jax.NamedSharding(mesh, PartitionSpec("fsdp"))}}
    moments = jax.tree.map(lambda x: x.with_memory_kind("pinned_host" if offload else "device"), placed)
    where = TrainState(None, placed, moments, {}, None, None)

    def train_step(frozen, state, batch):
        assert state.average == {}  # the compiled step takes a state without one
        return TrainState(state.step + 1, weights(state.step + 1), {}, {}, 0, 0), {}

    weights = jax.jit(
        lambda step: {"params": {"w": step * jnp.tile(jnp.array([1, 0.5]), (8, 1))}}, out_shardings=placed
    )
    follow = average.following(train_step, settings(share, offload), mesh, where, done)
    state = state or TrainState(done, {}, {}, {}, 0, 0)
    with jax.set_mesh(mesh):
        for _ in range(done, steps):
            state, _ = follow({}, state, {})
    return state


def column(state: TrainState) -> float:
    w = np.asarray(state.average["params"]["w"])
    assert (w == w[:1]).all()
    assert (w[:, 1] == w[:, 0] / 2).all()
    return float(w[0, 0])


@pytest.fixture
def each(monkeypatch):
    """An update every N steps, whatever a step's size."""
    return lambda n: monkeypatch.setattr(average, "every", lambda config, platform, ways: n)


@pytest.mark.parametrize(("share", "n"), [(0.1, 1), (0.1, 10), (0.05, 10), (0.5, 5)])
def test_it_is_behind_by_its_share_of_the_run(each, share, n):
    each(n)
    assert column(averaged(share, 1000)) == pytest.approx(1000 * (1 - share), abs=n / 2 + 1)


def test_each_step_counts_by_a_power_of_its_number(each):
    each(1)
    power = 1 / 0.2 - 2
    steps = np.arange(1, 401)
    weights = (steps / 400) ** (power + 1) - ((steps - 1) / 400) ** (power + 1)
    assert column(averaged(0.2, 400)) == pytest.approx(float(weights @ steps), rel=1e-5)


def test_the_first_update_takes_the_weights_and_those_between_change_nothing(each):
    each(3)
    assert averaged(0.1, 2).average == {}
    assert column(averaged(0.1, 3)) == column(averaged(0.1, 5)) == 3.0
    assert 5.0 < column(averaged(0.1, 6)) < 6.0
    assert column(averaged(0.1, 8, done=4)) == 6.0  # a run that begins with the key at step 4: it has no average yet


def test_it_goes_on_where_it_stood_to_the_bit(each):
    each(3)
    whole = averaged(0.1, 20)
    for done in (6, 7):
        resumed = averaged(0.1, 20, done=done, state=averaged(0.1, done))
        assert column(resumed) == column(whole)


def test_beside_an_offloaded_optimizer_it_lies_in_the_hosts_memory(each):
    each(3)
    away = averaged(0.1, 20, devices=8, offload=True)
    assert away.average["params"]["w"].sharding.memory_kind == "pinned_host"
    assert column(away) == column(averaged(0.1, 20))


def test_on_eight_devices_it_is_sharded_as_the_weights_and_equal(each):
    each(3)
    one, eight = averaged(0.1, 20), averaged(0.1, 20, devices=8)
    assert column(eight) == column(one)
    assert eight.average["params"]["w"].sharding == eight.params["params"]["w"].sharding
    assert len({shard.device for shard in eight.average["params"]["w"].addressable_shards}) == 8


def test_how_often_follows_from_the_tokens_of_a_step():
    def every(platform="cpu", ways=1, offload=False, **train):
        c = settings(0.1, offload, **{"batch_size": 8, "seq_len": 128} | train)
        return average.every(c, platform, ways)

    assert every() == 8
    assert every(batch_size=64) == 1
    assert every(seq_len=120) == 9
    assert every(ways=8) == 64  # each device has an eighth of the tokens, and all of the average
    assert every("gpu") == 32
    assert every("gpu", offload=True) == 1024


@pytest.mark.parametrize("name", ["quickstart", "local_35m", "gpuburnout_1b", "domain_7b"])
def test_on_every_known_accelerator_it_takes_under_a_hundredth_of_a_step(name):
    """By data sheets and the MFU that plan expects: it reads a weight and its average, and writes that, 12 bytes."""
    c = config.resolve(config_files.load(name, ["data.path=x", "model.vocab_size=32768"]))
    tokens, n = c.train.batch_size * c.train.seq_len, flops.count_params(c.model)
    for card in accelerators.load().accelerators:
        step_s = tokens * flops.of(c).palm / (card.tflops * 1e12 * cost.mfu(c.model, card))
        share = 12 * n / (card.bandwidth_gb * 1e9) / average.every(c, "gpu") / step_s
        assert share < 0.01, (card.name, share)


def train(folder, *overrides: str, steps: int = 7) -> None:
    given = [f"--config.{name}={value}" for name, value in (TINY | {"data.dir": folder.parent / "data"}).items()]
    words = [f"--config.{word}" for word in (f"workdir={folder}", f"train.steps={steps}", *overrides)]
    assert cli.main(["train", "base", *given, *words]) == 0


def arrays(folder, step: int) -> dict[str, int]:
    return store.read_meta(folder / f"checkpoints/{step}")["digests"]


def losses(folder) -> dict[int, dict]:
    """Step -> the losses of the weights and of their average."""
    names = (metrics.HELD_OUT, metrics.AVERAGE, "train/loss")
    records = metrics.read(folder / "metrics.jsonl").items()
    return {step: {name: r[name] for name in names if name in r} for step, r in records}


ON = "checkpoint.average=0.3"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of seven steps: with an average; stopped after five; and with the key set, or given up, after five."""
    root = tmp_path_factory.mktemp("runs")
    tiny_data.make(root / "data", {"a": 1.0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(average.TOKENS, "cpu", 2 * STEP // 8)  # of a device, of eight: every second step
        train(root / "on", ON)
        train(root / "stopped", ON, steps=5)
        shutil.copytree(root / "stopped", root / "given up")
        train(root / "late", steps=5)
        for name, key in (("stopped", ON), ("given up", "checkpoint.average=0"), ("late", ON)):
            train(root / name, key)
        yield root


def test_a_resumed_run_has_every_bit_of_its_average_and_its_losses(runs):
    assert arrays(runs / "stopped", 7) == arrays(runs / "on", 7)
    whole, resumed = losses(runs / "on"), losses(runs / "stopped")
    assert {step: {name: resumed[step][name] for name in loss} for step, loss in whole.items()} == whole
    assert {step for step, loss in whole.items() if metrics.AVERAGE in loss} == {3, 6, 7}
    assert whole[6][metrics.AVERAGE] != whole[6][metrics.HELD_OUT]


def of_average(folder) -> dict[str, int]:
    """The digests of the average's arrays in the last checkpoint, by the names of the weights."""
    begin = "train/average/"
    return {name.removeprefix(begin): x for name, x in arrays(folder, 7).items() if name.startswith(begin)}


def test_a_checkpoint_has_an_average_of_each_weight(runs):
    weights = {name: x for name, x in arrays(runs / "on", 7).items() if name.startswith("params/")}
    assert of_average(runs / "on").keys() == weights.keys()
    assert all(x != weights[name] for name, x in of_average(runs / "on").items())


def test_it_changes_no_bit_of_the_training_and_may_be_given_up_or_begun_late(runs):
    """A checkpoint from before the key was set has none, and one with an average resumes without the key."""
    given_up, on, late = (arrays(runs / name, 7) for name in ("given up", "on", "late"))
    assert {*given_up} == {name for name in on if not name.startswith("train/average/")}
    assert {name: on[name] for name in given_up} == given_up == {name: late[name] for name in given_up}
    assert of_average(runs / "late").keys() == of_average(runs / "on").keys()
    assert of_average(runs / "late") != of_average(runs / "on")
    assert metrics.AVERAGE not in losses(runs / "given up")[6]
    assert metrics.AVERAGE in losses(runs / "late")[6]


def test_one_checkpoint_with_it_makes_an_average(capsys, runs):
    assert cli.main(["average", str(runs / "on"), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["checkpoint"] for row in rows] == ["step 7", "in training"]
    name = "layers_0/mlp/down/kernel"
    kept = store.reader(runs / "on/checkpoints/7", "train/average/params")(name)
    np.testing.assert_array_equal(store.reader(runs / "on/average/checkpoints/0")(name), kept)
    assert cli.main(["eval", f"{runs / 'on'}@average", "--json"]) == 0
    measured = {row["metric"]: row["value"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert measured["val/loss"] == pytest.approx(losses(runs / "on")[7][metrics.AVERAGE], abs=1e-6)
