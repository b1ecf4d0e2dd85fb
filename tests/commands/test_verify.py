"""`jaxlm verify` names what was changed, and begins no replay that can not be true. Replays: tests/faults/test_receipt.py."""

import json
import shutil
import tempfile
import types

import jax.numpy as jnp
import optax
import pytest
import tiny_receipt

from jaxlm import config
from jaxlm.cli import cli
from jaxlm.commands import verify
from jaxlm.config import config_files
from jaxlm.run import ledger, receipt
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.step import state as states


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tiny_receipt.make(tmp_path_factory.mktemp("run"))


def said(capsys, *words) -> tuple[int, list[str], str]:
    code = cli.main(["verify", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def test_changed_data_is_named_and_not_trained_on(capsys, run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    before = (copy / "config.json").read_bytes()
    shard = next((copy / "data/train/a").glob("*.array_record"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    code, out, err = said(capsys, copy)
    assert (code, err) == (3, "")
    assert out[0] == receipt.PROVES
    assert out[1].startswith(f"{shard} is damaged")
    no_replay = "no replay: its data is gone or changed; if it was moved, --config.data.dir=DIR says where to"
    assert out[2:] == [no_replay]
    shutil.rmtree(copy / "data")
    (copy / "run.json").write_bytes((copy / "run.json").read_bytes().replace(b'"before": ""', b'"before": "x"'))
    code, out, err = said(capsys, copy)
    assert (code, out[1], out[3]) == (3, "link 1 of 3 in run.json was changed", no_replay)
    assert "no manifest.json" in out[2]
    assert (copy / "config.json").read_bytes() == before


def test_what_can_not_be_verified_is_one_line(capsys, run, tmp_path):
    for words, line in (
        ([run, "--steps=-3"], "jaxlm: give --steps=N with N above 0, or --until-digest"),
        ([run, "--steps=3", "--until-digest"], "jaxlm: give --steps=N with N above 0, or --until-digest"),
        ([run, "--step=3"], "jaxlm: unknown argument '--step=3'; did you mean --steps?"),
    ):
        assert said(capsys, *words) == (2, [], f"{line}\n")
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "run.json").write_text("{")
    code, _, err = said(capsys, copy)
    assert (code, err) == (2, f"jaxlm: {copy}/run.json is damaged: nothing that it holds can be checked\n")
    assert not list(copy.glob("run.json.*"))
    (copy / "metrics.jsonl").unlink()
    code, _, err = said(capsys, copy)
    assert (code, err) == (2, f"jaxlm: no run that was trained in {copy}: it has no metrics.jsonl\n")


def test_a_run_named_by_its_key_is_only_read(capsys, run, tmp_path, monkeypatch):
    copy = shutil.copytree(run, tmp_path / "run")
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    places = []

    def trained(folder, book, begin, until, config):
        places.append(config.workdir)
        return "not tried"

    monkeypatch.setattr(verify, "_trained", trained)
    assert said(capsys, f"--config.workdir={copy}", "--until-digest")[0] == 1
    assert said(capsys, copy)[0] == 1
    assert all(place.startswith(tempfile.gettempdir()) and str(copy) not in place for place in places)
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_a_replay_from_step_0_begins_with_the_weights_of_an_imported_or_grown_model(run, tmp_path, monkeypatch):
    copy, place = shutil.copytree(run, tmp_path / "run"), tmp_path / "place"
    place.mkdir()
    (copy / "checkpoints/0/params").mkdir(parents=True)  # beside those that were saved later
    (copy / "checkpoints/0/params/weights").write_text("its own")
    seen = []

    def supervised(config):
        seen.extend(path.read_text() for path in place.glob("checkpoints/0/params/*"))
        return types.SimpleNamespace(run=lambda: 0)

    monkeypatch.setattr(verify.train_in_child, "supervised", supervised)
    c = config.resolve(config_files.of_run(copy, [f"workdir={place}"]))
    verify._trained(copy, ledger.read(copy), 0, 2, c)
    assert seen == ["its own"]


def test_a_run_that_lost_the_weights_it_began_with_says_which_steps_can_be_replayed(capsys, run, tmp_path, monkeypatch):
    copy, begun = shutil.copytree(run, tmp_path / "run"), []
    book = ledger.read(copy)
    ledger.put(copy, "starts", [book["starts"][0] | {"manifest_sha256": ""}, *book["starts"]])  # as import and grow do
    monkeypatch.setattr(verify, "_trained", lambda folder, book, begin, *args: begun.append(begin) or "not tried")
    lost = "checkpoint 0, the weights that this run began with, is gone or damaged"
    code, out, _ = said(capsys, copy, "--steps=6")
    assert (code, begun) == (1, [4])  # 2 was rotated away, 6 is the last
    assert out[2] == f"{lost}: steps 1 to 4 can't be replayed, later ones can"
    assert out[3].startswith("replaying steps 5 to 6 from checkpoint 4")
    saver = Checkpointer(tmp_path / "first", tiny_receipt.config_of(copy).checkpoint)
    saver.save(tiny_receipt.state(0), {})
    saver.close()
    shutil.copytree(tmp_path / "first/0", copy / "checkpoints/0")  # sound, and without a link
    assert "can't be replayed" not in "".join(said(capsys, copy, "--steps=6")[1])
    assert begun == [4, 0]
    for step in (0, 4):
        shutil.rmtree(copy / f"checkpoints/{step}")
    line = f"jaxlm: {lost}, and no later one from which steps could be replayed is left\n"
    assert said(capsys, copy)[::2] == (2, line)


@pytest.mark.parametrize("repeats", [True, False])
def test_the_last_line_says_whether_something_was_changed(capsys, run, tmp_path, monkeypatch, repeats):
    copy = shutil.copytree(run, tmp_path / "run")
    monkeypatch.setattr(verify, "_trained", lambda *args: "")
    monkeypatch.setattr(verify, "_compared", lambda *args: iter([(repeats, "metrics: so")]))
    code, out, _ = said(capsys, copy, "--until-digest")
    verdict = "steps 5 to 6 repeat" if repeats else "steps 5 to 6 do not repeat"
    assert (code, out[-1]) == (0 if repeats else 3, verdict)
    (copy / "reference.npz").write_bytes(b"another")
    code, out, _ = said(capsys, copy, "--until-digest")
    assert (code, out[1], out[-1]) == (3, "reference.npz was changed", f"something was changed (above); {verdict}")


def test_a_last_line_that_a_kill_cut_short_is_no_change(capsys, run, tmp_path, monkeypatch):
    copy = shutil.copytree(run, tmp_path / "run")
    monkeypatch.setattr(verify, "_trained", lambda *args: "not tried")
    log = (copy / "metrics.jsonl").read_bytes()
    for line, words in (
        (b'{"step": 7, "train/lo', "unchanged: 3 links"),
        (b'{"step": 3}\n', "has lines on step 3 behind"),
    ):
        (copy / "metrics.jsonl").write_bytes(log + line)
        assert words in said(capsys, copy)[1][1]


@pytest.mark.parametrize(
    ("recorded", "every"),
    [((20, 40, 60), 20), ((20, 40, 47, 60), 20), ((50,), 50), ((30, 47), 47), ((), 0), ((7, 60), 60)],
)
def test_a_replay_saves_where_most_states_are_recorded(capsys, run, tmp_path, monkeypatch, recorded, every):
    copy, keys = shutil.copytree(run, tmp_path / "run"), []
    links = {step: {"step": step, "state": ""} for step in recorded}
    logged = "".join(json.dumps({"step": step, "train/loss": 1.0}) + "\n" for step in range(1, 61))
    (copy / "metrics.jsonl").write_text(logged)
    shutil.rmtree(copy / "checkpoints")
    monkeypatch.setattr(verify.receipt, "valid", lambda book: links)
    monkeypatch.setattr(verify.receipt, "changed", lambda *args: [])
    monkeypatch.setattr(verify.receipt, "of_data", lambda *args: "")
    monkeypatch.setattr(verify, "_trained", lambda *args: keys.append(args[-1].checkpoint.every_steps) or "not tried")
    assert said(capsys, copy, "--steps=60")[0] == 1
    assert keys == [every]


def test_without_logged_steps_the_states_alone_are_compared(run, tmp_path):
    copy, place = (shutil.copytree(run, tmp_path / name) for name in ("run", "place"))
    ledger.put(place, "starts", [start | {"hardware": {"platform": "tpu"}} for start in ledger.read(run)["starts"]])
    (copy / "metrics.jsonl").write_text("")
    results = [*verify._compared(copy, ledger.read(copy), place, 4, 6)]
    assert (None, "metrics: none of these steps was logged") in results
    assert (True, "step 6: all arrays are equal to the bit") in results
    (copy / "run.json").unlink()  # there is nothing to hold packages and hardware against
    assert [words for _, words in verify._compared(copy, ledger.read(copy), place, 4, 6) if "None then" in words] == []
    (copy / "metrics.jsonl").write_text(
        (run / "metrics.jsonl").read_text().replace('"train/loss": ', '"train/loss": 9')
    )
    results = [*verify._compared(copy, ledger.read(copy), place, 4, 6)]
    assert [proves for proves, words in results if words.startswith("metrics: ")] == [None], results


def test_a_last_state_that_could_not_be_saved_is_no_replay(run, tmp_path, monkeypatch):
    place = tmp_path / "place"
    place.mkdir()

    def supervised(config):
        shutil.copy(run / "metrics.jsonl", place)
        (place / "output.txt").write_text("jaxlm: step 6 is not saved: No space left on device\n")
        return types.SimpleNamespace(run=lambda: 1)

    monkeypatch.setattr(verify.train_in_child, "supervised", supervised)
    c = config.resolve(config_files.of_run(run, [f"workdir={place}"]))
    why = verify._trained(run, ledger.read(run), 4, 6, c)
    assert why == "step 6 is not saved: No space left on device"


def test_what_later_starts_changed_is_taken_back(run):
    starts = [
        {"step": 0, "changed": []},
        {"step": 10, "changed": [{"name": "train.steps", "was": 20, "is": 30}, {"name": "jax", "was": "1", "is": "2"}]},
        {"step": 12, "changed": [{"name": "code.commit", "was": "a", "is": "b"}]},
        {"step": 20, "changed": [{"name": "sample.prompts", "was": ["a"], "is": []}]},
    ]
    assert verify._as_it_was(run, starts, 0, 25) == (10, ["sample.prompts=('a',)", "train.steps=20"])
    assert verify._as_it_was(run, starts, 10, 15) == (15, ["sample.prompts=('a',)"])
    assert verify._as_it_was(run, starts, 20, 25) == (25, [])


def test_weights_are_measured_by_the_way_that_they_came(tmp_path):
    for name, value in (("begun", 1.0), ("old", 3.0), ("new", 3.01)):
        checkpointer = Checkpointer(tmp_path / name)
        checkpointer.save(states.init({"params": {"a": jnp.full((4,), value)}}, optax.sgd(1.0)), {})
        checkpointer.close()
    places = {name: tmp_path / name / "0" for name in ("new", "old", "begun")}
    assert verify._apart(*places.values()) == pytest.approx(0.005, rel=1e-4)
    assert verify._apart(places["old"], places["old"], places["begun"]) == 0
    assert verify._apart(places["new"], places["old"], places["old"]) == 1
