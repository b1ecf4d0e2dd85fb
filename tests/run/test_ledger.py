"""run.json: every start and its end are kept; a damaged one costs one line; no secret is in it."""

import os
import stat
import sys

import pytest

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.host import files
from jaxlm.run import ledger

EMPTY = {"starts": [], "phases": [], "passed_over": [], "rollbacks": [], "receipt": []}


def record_start(folder, step=0, *keys):
    c = config.resolve(config_files.load("quickstart", [f"workdir={folder}", *keys]))
    hardware = {"device_kind": "cpu", "devices": 8}
    found = {"manifest_sha256": "0", "hardware": hardware, "choices": {"attention": "xla"}, "changed": []}
    ledger.record_start(folder, c, step=step, **found)


def test_starts_add_up_with_their_prices_machine_and_ends(tmp_path):
    assert ledger.read(tmp_path) == EMPTY
    record_start(tmp_path, 0, "hardware.usd_per_hour=2.5")
    ledger.end(tmp_path, step=4, code=4, why="interrupted")
    record_start(tmp_path, 5)
    starts = ledger.read(tmp_path)["starts"]
    assert [s["step"] for s in starts] == [0, 5]
    assert [s["usd_per_hour"] for s in starts] == [2.5, 0.0]
    assert starts[0]["hardware"] == ledger.machine() | {"device_kind": "cpu", "devices": 8}
    assert {"step": 4, "code": 4, "why": "interrupted"}.items() <= starts[0]["ended"].items()
    assert "ended" not in starts[1]


def test_an_end_is_that_of_its_own_process_and_told_once(tmp_path):
    ledger.end(tmp_path, step=4, code=0, why="done")  # before there is a start
    assert not (tmp_path / "run.json").exists()
    record_start(tmp_path)
    ledger.end(tmp_path, step=4, code=-9, why="killed", pid=os.getpid() + 1)  # that one had not begun to write
    assert "ended" not in ledger.read(tmp_path)["starts"][0]
    ledger.end(tmp_path, step=4, code=1, why="a stall")
    ledger.end(tmp_path, step=4, code=-9, why="killed", pid=os.getpid())
    assert ledger.read(tmp_path)["starts"][0]["ended"]["code"] == 1


def test_a_file_where_the_folder_should_be_is_left_alone_in_silence(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.touch()
    ledger.end(folder, step=0, code=2, why="config.workdir can't be made")
    assert capsys.readouterr() == ("", "")
    assert folder.read_bytes() == b""


def test_a_full_disk_at_the_end_is_one_line(tmp_path, monkeypatch, capsys):
    record_start(tmp_path)
    before = (tmp_path / "run.json").read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device", "run.json.tmp")

    monkeypatch.setattr(files, "write_atomically", full)
    ledger.end(tmp_path, step=4, code=0, why="done")
    assert capsys.readouterr().err.count("\n") == 1
    assert (tmp_path / "run.json").read_bytes() == before
    with pytest.raises(OSError, match="No space"):
        ledger.append(tmp_path, "phases", {"name": "one"})


DAMAGED = [
    b'{"starts": 5}',
    b'{"starts": [5]}',
    b'{"starts": null}',
    b'{"passed_over": [[3]]}',
    b'{"starts": [{"step": 0, "ti',
]
DAMAGED += [b"[]", b"5", b"\x00" * 200, b"", b"\xff\xfe\x80{}", b"[" * 100_000]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_one_is_moved_away_and_the_run_goes_on(tmp_path, capsys, content):
    path = tmp_path / "run.json"
    for number in (1, 2):
        path.write_bytes(content)
        assert ledger.read(tmp_path) == EMPTY
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert f"{path} is damaged: moved to run.json.damaged.{number}" in said
        assert (tmp_path / f"run.json.damaged.{number}").read_bytes() == content
    record_start(tmp_path)
    assert len(ledger.read(tmp_path)["starts"]) == 1
    assert capsys.readouterr().err == ""


def test_what_is_whole_in_a_damaged_one_is_kept(tmp_path, capsys):
    (tmp_path / "run.json").write_text('{"starts": 5, "passed_over": [[3, 9]], "phases": [{"name": "one"}]}')
    found = EMPTY | {"passed_over": [[3, 9]], "phases": [{"name": "one"}]}
    assert ledger.read(tmp_path) == found
    assert ledger.read(tmp_path) == found
    assert capsys.readouterr().err.count("\n") == 1


def test_an_older_one_and_keys_of_a_newer_one_are_read(tmp_path, capsys):
    (tmp_path / "run.json").write_text('{"starts": [{"step": 3}], "new": 1}')
    assert ledger.read(tmp_path) == EMPTY | {"starts": [{"step": 3}], "new": 1}
    ledger.append(tmp_path, "passed_over", [3, 9])
    assert ledger.read(tmp_path) == EMPTY | {"starts": [{"step": 3}], "new": 1, "passed_over": [[3, 9]]}
    assert capsys.readouterr().err == ""


def test_secrets_are_not_in_the_ledger_and_only_the_owner_reads_the_config(tmp_path, monkeypatch):
    url = "https://hooks.example.org/services/T0/s3cret"
    monkeypatch.setattr(sys, "argv", ["jaxlm", "train", f"--config.notify.urls=('{url}',)"])
    record_start(tmp_path)
    assert stat.S_IMODE((tmp_path / "config.json").stat().st_mode) & 0o044
    record_start(tmp_path, 0, f"notify.urls=('{url}',)")
    assert stat.S_IMODE((tmp_path / "config.json").stat().st_mode) == 0o600
    ledger.end(tmp_path, step=1, code=1, why="s3://me:s3cret@bucket did not answer")
    assert "s3cret" not in (tmp_path / "run.json").read_text()
    assert ledger.read(tmp_path)["starts"][0]["command"] == [
        "jaxlm",
        "train",
        "--config.notify.urls=('https://hooks.example.org/***',)",
    ]
    assert config_files.from_run(tmp_path / "config.json").notify.urls == (url,)  # it stays usable
