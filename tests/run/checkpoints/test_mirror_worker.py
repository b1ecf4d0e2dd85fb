"""What the mirror's process does: copies in an order that makes no half a whole, reads back, gives back what was given."""

import errno
import json
import pathlib
import random
import shutil

import pytest
import tiny_mirror
from tiny_mirror import copy, job, make_run

from jaxlm.run.checkpoints import mirror_worker as worker
from jaxlm.run.checkpoints.remote import Remote, seal, unseal


class Watched(Remote):
    """Remembers in which order files are written, garbles or refuses some, and stops after some deletions."""

    def __init__(self, url: pathlib.Path, *, garble: tuple[str, int] = ("", 0), full: str = "", deletions: int = 10**6):
        super().__init__(str(url), pause_s=0)
        self.written, self.garble, self.full, self.deletions = [], dict([garble]), full, deletions

    def put(self, source, name):
        self._note(name)
        super().put(source, name)
        if self.garble.get(name, 0) > 0:
            self.garble[name] -= 1
            super().write(name, b"?" * source.stat().st_size)

    def write(self, name, content):
        self._note(name)
        if self.garble.get(name, 0) > 0:
            self.garble[name] -= 1
            content = content[:-9] + b"????????\n"
        super().write(name, content)

    def delete(self, names):
        for name in names:
            if not self.deletions:
                raise OSError(errno.EIO, "gone")
            self.deletions -= 1
            super().delete([name])

    def _note(self, name):
        if self.full and name.endswith(self.full):
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written.append(name)


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", 10, 20)


@pytest.fixture
def url(tmp_path):
    return tmp_path / "mirror"


def test_what_was_copied_comes_back_to_the_byte(run, url, tmp_path):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "half a li')
    remote = Remote(str(url))
    assert copy(remote, run, 10) == {"whole": [10], "partial": []}
    assert copy(remote, run, 20) == {"whole": [10, 20], "partial": []}
    assert tiny_mirror.restore(url, tmp_path / "back" / "run") == (20, [])
    back, was = (tiny_mirror.content(folder) for folder in (tmp_path / "back" / "run", run))
    assert back.pop("metrics.jsonl") == b'{"step": 1}\n{"step": 2}\n'  # cut at its last whole line
    expected = {name for name in was if "checkpoints/10" not in name} - {"metrics.jsonl"}
    assert back == {name: was[name] for name in expected}


def test_a_copy_counts_only_once_the_logs_have_its_steps(run, url, tmp_path):
    """A machine that is lost just then comes back with all lines up to the checkpoint's step."""
    copy(Remote(str(url)), run, 10)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 20}\n')
    watched = Watched(url)
    copy(watched, run, 20)
    assert watched.written[-1] == "checkpoints/20/verified.json"
    tiny_mirror.restore(url, tmp_path / "back" / "run")
    assert '{"step": 20}' in (tmp_path / "back" / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("last", ["manifest.json", "verified.json", "params/d/a1", "workdir/run.json"])
def test_what_ends_half_way_is_not_whole(run, url, tmp_path, last):
    copy(Watched(url), run, 10)
    with pytest.raises(OSError, match="No space left"):
        copy(Watched(url, full=f"20/{last}"), run, 20)
    assert worker.held(Remote(str(url))) == {"whole": [10], "partial": [20]}
    step, lines = tiny_mirror.restore(url, tmp_path / "back" / "run")
    assert (step, lines) == (10, ["the mirror's copy of checkpoint 20 is not whole; going back to the copy before it"])
    assert copy(Watched(url), run, 20)["whole"] == [10, 20]  # and the next try mends it


@pytest.mark.parametrize("name", ["params/d/a1", "manifest.json", "verified.json", "workdir/metrics.jsonl"])
def test_a_disk_that_garbles_what_is_written_never_makes_a_whole_copy(run, url, name):
    garbled = f"checkpoints/10/{name}"
    with pytest.raises(worker.Damaged):
        copy(Watched(url, garble=(garbled, 9)), run, 10)
    assert worker.held(Remote(str(url)))["whole"] == []


def test_one_garbled_write_is_written_again(run, url, tmp_path):
    assert copy(Watched(url, garble=("checkpoints/10/params/d/a1", 2)), run, 10)["whole"] == [10]
    tiny_mirror.restore(url, tmp_path / "back" / "run")
    assert tiny_mirror.content(tmp_path / "back" / "run") == {
        name: content for name, content in tiny_mirror.content(run).items() if "checkpoints/20" not in name
    }


def flipped(url, run, target, count):
    """Flips single bits of files of the mirror, drawn evenly. Returns what each restore gave."""
    was, rng, found = tiny_mirror.content(run), random.Random(0), []
    paths = [path for path in sorted(url.rglob("*")) if path.is_file()]
    for _ in range(count):
        path = rng.choice(paths)
        run_id = (url / "run_id.json").read_bytes()
        bit = tiny_mirror.flip(path, rng)
        step, lines = tiny_mirror.restore(url, target)
        back = tiny_mirror.content(target)
        given = {name for name in back if name.startswith("checkpoints/")}
        silent = [name for name in back if back[name] != was[name]] or given != {
            name for name in was if name.startswith(f"checkpoints/{step}/")
        }
        found.append((path.relative_to(url).as_posix(), bit, step, lines, silent, set(was) - set(back)))
        if path.name == "run_id.json":
            path.write_bytes(run_id)
        else:
            tiny_mirror.flip_back(path, bit)
        shutil.rmtree(target)
    return found


@pytest.mark.parametrize("count", [12, pytest.param(500, marks=pytest.mark.faults)])
def test_no_flipped_bit_is_given_back(run, url, tmp_path, count):
    remote = Remote(str(url))
    copy(remote, run, 10)
    copy(remote, run, 20)
    steps = []
    for name, bit, step, lines, silent, missing in flipped(url, run, tmp_path / "back" / "run", count):
        assert not silent, (name, bit)
        assert step == 20 or (step == 10 and name.startswith("checkpoints/20/") and len(lines) == 1), (name, bit, lines)
        assert not [other for other in missing if not other.startswith("checkpoints/")], (name, bit)
        steps.append(step)
    assert {10, 20} == set(steps)


def test_a_manifest_that_is_not_the_one_read_back_counts_for_nothing(run, url):
    copy(Remote(str(url)), run, 10)
    path = url / "checkpoints" / "10" / "manifest.json"
    path.write_bytes(seal({**unseal(path.read_bytes()), "files": {}}))
    assert worker.held(Remote(str(url))) == {"whole": [], "partial": [10]}


def test_a_file_that_is_gone_costs_one_checkpoint_and_all_gone_is_refused(run, url, tmp_path):
    remote = Remote(str(url))
    copy(remote, run, 10)
    copy(remote, run, 20)
    (url / "checkpoints" / "20" / "train" / "d" / "b2").unlink()
    step, lines = tiny_mirror.restore(url, tmp_path / "back" / "run")
    assert step == 10
    assert lines == [
        "the mirror's copy of checkpoint 20 is damaged: train/d/b2 is missing; going back to the copy before it"
    ]
    (url / "checkpoints" / "10" / "manifest.json").write_text("{}")
    with pytest.raises(worker.Refused, match=r"none of the mirror's checkpoints \[10, 20\] is what was copied there"):
        tiny_mirror.restore(url, tmp_path / "other" / "run")
    assert not list((tmp_path / "other").rglob("*.restoring"))


def test_logs_that_are_damaged_twice_are_said_to_be_missing(run, url, tmp_path):
    copy(Remote(str(url)), run, 20)
    for folder in (url, url / "checkpoints" / "20" / "workdir"):
        (folder / "run.json").write_text('{"starts": 5}')
    step, lines = tiny_mirror.restore(url, tmp_path / "back" / "run")
    assert (step, lines) == (20, ["the mirror's run.json is damaged: the run goes on without it"])
    assert not (tmp_path / "back" / "run" / "run.json").exists()


def test_the_newest_logs_come_back_and_never_over_those_that_are_there(run, url):
    remote = Remote(str(url))
    copy(remote, run, 20)
    (run / "run.json").write_text('{"starts": [], "ended": 1}')
    worker.write_logs(remote, job(run), lambda event: None)
    (run / "config.json").write_text("{}")
    (run / "run.json").unlink()
    shutil.rmtree(run / "checkpoints")
    assert tiny_mirror.restore(url, run) == (20, [])
    assert (run / "run.json").read_text() == '{"starts": [], "ended": 1}'
    assert (run / "config.json").read_text() == "{}"


def test_all_that_was_said_comes_back_before_what_this_start_says(run, url, tmp_path):
    (run / "log.txt").write_text("one\ntwo\nhalf a li")
    remote = Remote(str(url))
    copy(remote, run, 20)
    back = tmp_path / "back" / "run"
    tiny_mirror.restore(url, back)
    assert (back / "log.txt").read_text() == "one\ntwo\n"
    with open(run / "log.txt", "a") as file:
        file.write("ne\ndone\n")
    worker.write_logs(remote, job(run), lambda event: None)  # as the mirror does in the end
    shutil.rmtree(back)
    back.mkdir()
    (back / "log.txt").write_text("anew\n")
    tiny_mirror.restore(url, back)
    assert (back / "log.txt").read_text() == "one\ntwo\nhalf a line\ndone\nanew\n"


def test_what_an_abandoned_attempt_did_is_not_done_again(run, url):
    events = []
    worker.copy(Remote(str(url)), job(run, 10), events.append)
    shutil.rmtree(run / "checkpoints" / "20" / "train")
    copied = {event["copied"]: event["sum"] for event in events if "copied" in event}
    for mark in ("manifest.json", "verified.json"):
        (url / "checkpoints" / "10" / mark).unlink()
    copied.pop("_METADATA")
    watched = Watched(url)
    copy(watched, run, 10, copied=copied)
    assert watched.written[0] == "checkpoints/10/_METADATA"
    assert watched.written[1].startswith("checkpoints/10/workdir/")


def test_the_last_whole_copy_is_never_deleted_and_half_a_deletion_leaves_nothing_whole(run, url):
    remote = Remote(str(url))
    copy(remote, run, 10)
    assert worker.delete(remote, job(run, steps=[10]), print)["whole"] == [10]
    copy(remote, run, 20)
    with pytest.raises(OSError, match="gone"):
        worker.delete(Watched(url, deletions=1), job(run, steps=[10]), print)
    assert worker.held(remote) == {"whole": [20], "partial": [10]}
    assert worker.delete(remote, job(run, steps=[10]), print) == {"whole": [20], "partial": []}
    assert not (url / "checkpoints" / "10").exists()


def test_another_checkpoint_of_the_same_step_replaces_a_copy_but_not_the_last_whole_one(run, url):
    remote = Remote(str(url))
    copy(remote, run, 10)
    (run / "checkpoints" / "10" / "params" / "d" / "a1").rename(run / "checkpoints" / "10" / "params" / "d" / "new")
    with pytest.raises(worker.Trouble, match="only whole one in the mirror"):
        copy(remote, run, 10)
    copy(remote, run, 20)
    assert copy(remote, run, 10)["whole"] == [10, 20]
    assert not (url / "checkpoints" / "10" / "params" / "d" / "a1").exists()


def test_no_run_goes_on_from_weights_alone_which_older_runs_could_mirror(run, url, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            worker, "seal", lambda record: seal(record | {"weights_only": True} if "step" in record else record)
        )
        copy(Remote(str(url)), run, 10)
    with pytest.raises(worker.Refused, match="holds weights only"):
        tiny_mirror.restore(url, tmp_path / "back" / "run")
    assert worker.held(Remote(str(url))) == {"whole": [], "partial": []}  # so that its step is copied anew
    assert copy(Remote(str(url)), run, 10)["whole"] == [10]


def test_a_mirror_has_one_run_and_one_start_of_it(run, url, tmp_path):
    remote = Remote(str(url))
    assert worker.claim(remote, job(run, id="", new_id="r"), print)["id"] == "r"
    copy(remote, run, 10)
    other = make_run(tmp_path / "other", 10)
    for who in (job(other, id="x"), job(other, id="")):
        with pytest.raises(worker.Refused, match="belongs to another run, in a folder called run"):
            worker.claim(remote, who, print)
    new = tmp_path / "empty" / "other"
    with pytest.raises(worker.Refused, match=r"or the config\.workdir of that run"):  # its own first start
        worker.claim(remote, job(new, id=""), print)
    assert worker.claim(remote, job(tmp_path / "elsewhere" / "run", id="", start="later"), print)["id"] == "r"
    with pytest.raises(worker.Trouble, match="a later start of this run"):
        copy(remote, run, 20)
    assert copy(remote, run, 20, start="later")["whole"] == [10, 20]


def test_a_checkpoint_that_changed_since_it_was_verified_is_not_copied(run, url):
    folder = run / "checkpoints" / "10"
    sums = {name: worker.measure(folder / name) for name in tiny_mirror.content(folder)}
    (folder / "checksums.json").write_text(json.dumps({"files": sums}))
    tiny_mirror.flip(folder / "params" / "d" / "a1", random.Random(1))
    with pytest.raises(worker.Trouble, match="params/d/a1 is not what was saved and verified"):
        copy(Remote(str(url)), run, 10)


def test_a_checkpoint_that_was_deleted_meanwhile_is_said_to_be_gone(run, url):
    with pytest.raises(worker.Gone):
        copy(Remote(str(url)), run, 30)


def test_names_of_a_manifest_stay_below_the_folder():
    assert worker.below("params/d/a1")
    assert not any(worker.below(name) for name in ("../x", "/etc/x", "a/../../x", ""))


def test_no_secret_of_the_config_is_copied_and_only_the_owner_reads_what_comes_back(run, url):
    config = {"seed": 1, "notify": {"urls": ["https://hooks.example.com/services/HIDE"]}}
    (run / "config.json").write_text(json.dumps(config))
    copy(Remote(str(url)), run, 20)
    worker.write_logs(Remote(str(url)), job(run), lambda event: None)
    copies = [path.read_text() for path in url.rglob("config.json")]
    assert len(copies) == 2
    assert not any("HIDE" in text for text in copies)
    (run / "config.json").unlink()
    shutil.rmtree(run / "checkpoints")
    assert tiny_mirror.restore(url, run) == (20, [])
    assert json.loads((run / "config.json").read_text())["seed"] == 1
    assert (run / "config.json").stat().st_mode & 0o777 == 0o600


def test_a_damaged_config_is_not_copied(run, url):
    (run / "config.json").write_text('{"notify": "https://user:HIDE@host')
    copy(Remote(str(url)), run, 20)
    assert not list(url.rglob("config.json"))
