"""run.json gets a link at each save; later changes are named; a rollback, a branch and a kill keep the chain true."""

import hashlib
import json
import shutil

import numpy as np
import pytest
import tiny_receipt

from jaxlm.data.shards import shards
from jaxlm.run import ledger, receipt
from jaxlm.run.checkpoints import meta, verify
from jaxlm.run.checkpoints.verify import seal


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tiny_receipt.make(tmp_path_factory.mktemp("run"))


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def chain(folder) -> list[dict]:
    return ledger.read(folder)["receipt"]


def test_each_save_gets_a_link_and_kept_checkpoints_their_arrays(run):
    links = chain(run)
    assert [link["step"] for link in links] == [2, 4, 6]
    assert [link["before"] for link in links] == ["", *(link["sha256"] for link in links[:-1])]
    assert ["arrays" in link for link in links] == [False, True, True]  # 2 was rotated away
    a, b = (tiny_receipt.state(6).params["params"][name] for name in "ab")
    sums = {
        name: hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for name, x in {"params/a": a, "params/b": b}.items()
    }
    assert sums.items() <= links[-1]["arrays"].items()
    assert seal(links[-1]["arrays"]) == links[-1]["state"]
    size, sha256 = links[-1]["metrics"]
    log = (run / "metrics.jsonl").read_bytes()
    assert (size, sha256) == (len(log), hashlib.sha256(log).hexdigest())
    assert links[0]["metrics"][0] < size
    assert links[-1]["config"] == hashlib.sha256((run / "config.json").read_bytes()).hexdigest()
    assert ledger.read(run)["starts"][-1]["ended"]["link"] == links[-1]["sha256"]


def test_single_changes_are_named(run):
    lines, named = tiny_receipt.missed(run, 40, seed=1)
    assert lines == []
    assert named > 25


def test_a_change_is_named_by_its_place(run):
    def said(path: str, was: bytes, now: bytes) -> list[str]:
        before = (run / path).read_bytes()
        assert was in before
        (run / path).write_bytes(before.replace(was, now, 1))
        lines = tiny_receipt.named(run)
        (run / path).write_bytes(before)
        return lines

    first, second, third = chain(run)
    assert said("metrics.jsonl", b"4.6", b"4.5") == [
        f"metrics.jsonl was changed between bytes {first['metrics'][0]} and {second['metrics'][0]}, before step 4 was saved"
    ]
    assert said("config.json", b'"seed": 0', b'"seed": 1') == ["config.json was changed"]
    assert said("reference.npz", b"logp", b"logq") == ["reference.npz was changed"]
    assert said("without.jsonl", b"{}", b"[]") == ["without.jsonl was changed"]
    manifest = shards.open_data(run / "data").manifest
    of_a, of_b = (manifest["held_out"][name].encode() for name in "ab")
    changed = f"{run}/data/manifest.json was changed"
    assert said("data/manifest.json", of_a, of_b) == [f"{changed}: held_out of a"]
    index = manifest["sources"]["a"]["train"]["index"]["sha256"].encode()
    assert said("data/manifest.json", index, of_a) == [f"{changed}, or is not of the data that the run was trained on"]
    assert said("run.json", b'"held_out": {', b'"held_out": {"c": "",')[0] == "held_out in run.json was changed"
    assert said("run.json", second["state"].encode(), b"0" * 64) == ["link 2 of 3 in run.json was changed"]
    assert said("run.json", b'"receipt"', b'"receipx"') == ["run.json lacks a link that one of its starts names"]
    assert "is damaged" in said("run.json", b'"receipt"', b'"receipt')[0]
    book = ledger.read(run)
    text = (run / "run.json").read_bytes()
    for left, line in (([first, third], "link 2 of 2"), ([first, second], "run.json lacks a link")):
        (run / "run.json").write_text(json.dumps(book | {"receipt": left}))
        assert tiny_receipt.named(run)[0].startswith(line)
    (run / "run.json").write_bytes(text)
    place = run / "checkpoints/6"
    assert receipt.of_checkpoint(place, third | {"state": "", "arrays": third["arrays"] | {"params/b": ""}}) == (
        "checkpoint 6 was changed: params/b"
    )
    meta_file = place / meta.FILE
    content = json.loads(before := meta_file.read_bytes())
    sealed = meta.sealed({"of": "another run"}, 6, content["digests"])
    meta_file.write_text(json.dumps(sealed))
    assert tiny_receipt.named(run) == ["checkpoint 6 was changed: meta/metadata"]
    meta_file.write_bytes(before)
    assert tiny_receipt.named(run) == []


def test_an_older_link_covers_the_list_of_documents(copy):
    """It has the list's sha256 as `without`, in place of `files`."""
    *links, last = chain(copy)
    sha256 = last.pop("files")["without.jsonl"]
    last |= {"without": sha256}
    last["sha256"] = seal({name: x for name, x in last.items() if name not in ("sha256", "arrays")})
    ledger.put(copy, "receipt", [*links, last])
    before = tiny_receipt.named(copy)
    assert before == ["run.json lacks a link that one of its starts names"]
    (copy / "without.jsonl").write_text("[]")
    assert tiny_receipt.named(copy) == [*before, "without.jsonl was changed"]


def test_a_rollback_keeps_the_links_and_their_steps_do_not_count(copy):
    run = copy
    ledger.roll_back(run, {"steps": [5, 6], "to": 4, "batches": [5, 6]})
    assert sorted(receipt.valid(ledger.read(run))) == [2, 4]
    saver = tiny_receipt.checkpointer(run, chain(run)[0]["manifest"])
    saver.set_aside(6)
    tiny_receipt.save(run, saver, 6)
    saver.close()
    links = chain(run)
    assert [link["step"] for link in links] == [2, 4, 6, 6]
    assert receipt.valid(ledger.read(run))[6] == links[-1]
    assert tiny_receipt.named(run) == []


def test_a_kill_between_the_save_and_its_link_is_said_and_the_next_link_goes_on(copy, monkeypatch):
    run, linked = copy, receipt.Chain.link
    manifest = chain(run)[0]["manifest"]
    monkeypatch.setattr(receipt.Chain, "link", lambda *args: None)
    saver = tiny_receipt.checkpointer(run, manifest)
    tiny_receipt.save(run, saver, 8)
    saver.close()
    assert "checkpoint 8 has no link" in receipt.gap(run, 8)
    assert "follows that of step 6" in receipt.gap(run, 8)
    assert receipt.gap(run, 6) == ""
    monkeypatch.setattr(receipt.Chain, "link", linked)
    ledger.record_start(run, tiny_receipt.config_of(run), step=8, manifest_sha256=manifest, **tiny_receipt.FACTS)
    assert tiny_receipt.named(run) == []
    saver = tiny_receipt.checkpointer(run, manifest)
    tiny_receipt.save(run, saver, 10)
    saver.close()
    assert [link["step"] for link in chain(run)] == [2, 4, 6, 10]
    assert tiny_receipt.named(run) == []


def test_a_branch_goes_on_from_the_link_that_it_began_with(run, tmp_path):
    keys = [f"origin={run}", "origin_checkpoint=4", "origin_state=True"]
    manifest, config = chain(run)[0]["manifest"], tiny_receipt.config_of(tmp_path, *keys)
    ledger.record_start(tmp_path, config, step=4, manifest_sha256=manifest, **tiny_receipt.FACTS)
    saver = tiny_receipt.checkpointer(tmp_path, manifest)
    tiny_receipt.save(tmp_path, saver, 5)
    saver.close()
    assert chain(tmp_path)[0]["before"] == chain(run)[1]["sha256"]
    assert tiny_receipt.named(tmp_path, run / "data") == []


def test_a_save_that_fails_and_arrays_that_can_not_be_hashed_leave_no_link(copy, monkeypatch, capsys):
    run = copy
    saver = tiny_receipt.checkpointer(run, "m")
    monkeypatch.setattr(verify, "read_back", lambda *args: "params/a is not what was saved")
    tiny_receipt.save(run, saver, 8)
    monkeypatch.undo()

    def unreadable(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(verify, "sha256s", unreadable)
    tiny_receipt.save(run, saver, 9)
    monkeypatch.undo()
    assert saver.steps() == [6, 9]
    assert [link["step"] for link in chain(run)] == [2, 4, 6]
    (run / "config.json").unlink()
    capsys.readouterr()
    tiny_receipt.save(run, saver, 10)
    saver.close()
    assert capsys.readouterr().err.startswith("step 10 gets no link in the receipt: ")
    assert [link["step"] for link in chain(run)] == [2, 4, 6]


def test_what_is_added_behind_the_last_link_is_named(tmp_path):
    folder = tiny_receipt.make(tmp_path)
    log, book = (folder / "metrics.jsonl").read_bytes(), (folder / "run.json").read_bytes()
    (folder / "metrics.jsonl").write_bytes(log + b'{"step": 2, "train/loss": 0.1}\n')
    assert tiny_receipt.named(folder) == ["metrics.jsonl has lines on step 2 behind those on step 6"]
    (folder / "metrics.jsonl").write_bytes(log + b'{"step": 6, "val/loss": 0.1}\n{"step": 7, "train/loss": 0.1}\n')
    assert tiny_receipt.named(folder) == []
    ledger.append(folder, "rollbacks", {"steps": [1, 9], "batches": [1, 9], "time": 1e12})
    assert "a rollback in run.json undoes all links" in tiny_receipt.named(folder)
    (folder / "run.json").write_bytes(book)
    ledger.put(folder, "passed_over", [[3, 4]])
    assert tiny_receipt.named(folder) == ["passed_over in run.json was changed"]
    (folder / "run.json").write_bytes(b"{")
    ledger.read(folder)  # any other command mends it, and drops the chain
    assert any(
        "run.json was damaged, and begun anew: run.json.damaged.1" in line for line in tiny_receipt.named(folder)
    )


def test_a_branch_whose_origin_is_gone_is_sound_and_a_later_link_of_its_step_is_taken(tmp_path):
    trunk = tiny_receipt.make(tmp_path / "trunk")
    place = tmp_path / "branch"
    place.mkdir()
    (place / "config.json").write_text(
        json.dumps({"origin": str(trunk), "origin_checkpoint": "6", "origin_state": True})
    )
    (place / "metrics.jsonl").write_text('{"step": 7}\n')
    ledger.append(place, "starts", {"step": 6, "time": "2026-11-29T00:00:00+00:00"})
    saved = place / "checkpoints/7" / meta.FILE
    saved.parent.mkdir(parents=True)
    saved.write_text("{}")
    receipt.Chain(place, "").link(7, {"a": "b"}, [7])
    book = ledger.read(place)
    assert book["receipt"][0]["before"] == ledger.last_link(trunk)
    links = ledger.read(trunk)["receipt"]
    for there in ([*links, links[-1] | {"sha256": "another"}], [links[0]]):
        ledger.put(trunk, "receipt", there)
        assert not list(receipt.changed(place, book))
    ledger.put(trunk, "receipt", [links[-1] | {"sha256": "another"}])
    assert "does not follow the link before it" in next(receipt.changed(place, book))
    shutil.rmtree(trunk)
    assert not list(receipt.changed(place, book))
