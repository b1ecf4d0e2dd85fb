"""A mirror never stops a run, never waits for storage that hangs, and brings back a run whose folder is gone."""

import contextlib
import dataclasses
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import psutil
import pytest
import tiny_mirror
from tiny_mirror import CONFIG, content, make_run

from jaxlm.config import ConfigError, RunError
from jaxlm.run.checkpoints.mirror import Mirror, check


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", 10, 20)


@pytest.fixture
def url(tmp_path):
    return str(tmp_path / "mirror")


def wait_for(what, seconds=60):
    """Waits until what() is true, and returns it."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def workers(parent=None):
    """The processes that copy for this process, or for another one."""
    found = []
    for child in psutil.Process(parent).children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            found += [child] if any("mirror_worker" in part for part in child.cmdline()) else []
    return found


@pytest.fixture(autouse=True)
def no_worker_left():
    """Ends what a test that failed leaves running, which would fail the tests after it."""
    yield
    for worker in workers():
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
            worker.wait(5)  # a zombie has no command line, which others ask for


def mirrored(run, url, *steps):
    """A mirror after copies of these steps, one after the other, and its end."""
    mirror = Mirror(url, CONFIG, run)
    mirror.restore()
    for step in steps:
        mirror.begin(step)
        assert mirror.wait(60)
    assert mirror.close(60)
    return mirror


def held(url):
    return sorted(int(name) for name in os.listdir(f"{url}/checkpoints"))


def test_a_run_whose_folder_is_gone_comes_back(run, url, capfd):
    tiny_mirror.save(run, 30)
    mirror = mirrored(run, url, 10, 20, 30)
    assert (mirror.latest(), mirror.failing) == (30, "")
    assert held(url) == [20, 30]  # mirror_keep_last=2
    assert not workers()
    was = {name: data for name, data in content(run).items() if "checkpoints/10" not in name and "/20/" not in name}
    shutil.rmtree(run)
    again = Mirror(url, CONFIG, run)
    assert again.restore() == again.latest() == 30
    assert content(run) == was  # .run_id too
    assert again.close(60)
    error = capfd.readouterr().err
    assert f"no checkpoints in {run}: looking into the mirror {url}\n" in error
    assert "checkpoint 30 and the logs came back from the mirror in 0m0" in error


def test_logs_go_along_once_more_at_the_end(run, url):
    mirror = Mirror(url, CONFIG, run)
    mirror.restore()
    mirror.begin(20)
    assert mirror.wait(60)
    (run / "report.html").write_text("done")
    assert mirror.close(60)
    assert (run / "report.html").read_bytes() == open(f"{url}/report.html", "rb").read()


def test_a_page_is_copied_between_two_checkpoints_and_one_that_fails_costs_no_copy(run, url):
    mirror = Mirror(url, CONFIG, run)
    mirror.restore()
    mirror.show(lambda: (run / "report.html").write_text("so far"))
    assert mirror.wait(60)
    assert open(f"{url}/report.html").read() == "so far"
    assert not os.path.exists(f"{url}/checkpoints")
    mirror.show(lambda: 1 / 0)
    mirror.begin(20)
    assert mirror.wait(60)
    assert held(url) == [20]
    assert mirror.close(60)


def hang(run):
    """Makes the copy hang between the files and the manifest: a log that is a pipe, which nobody writes to."""
    os.mkfifo(run / "report.html")


def hangs(url, step=20, name="workdir/metrics.jsonl"):
    """True once the copy has come to the pipe: the log before it is there, and its file too."""
    return os.path.exists(f"{url}/checkpoints/{step}/{name}")


def test_the_end_of_a_run_waits_no_longer_than_it_is_told(run, url):
    mirror = Mirror(url, CONFIG, run)
    hang(run)
    mirror.begin(20)
    wait_for(lambda: hangs(url))
    began = time.monotonic()
    assert not mirror.close(0.2)
    assert time.monotonic() - began < 5
    assert mirror.latest() is None
    wait_for(lambda: not workers())
    assert not mirror.close(0.2)


def test_a_mirror_that_can_not_be_written_is_told_once_and_tried_again(run, url, tmp_path, capfd):
    (tmp_path / "mirror").write_text("a file where a folder should be")
    mirror = Mirror(url, CONFIG, run)
    assert mirror.restore() is None
    for step in (10, 20):
        mirror.begin(step)
        assert mirror.wait(60)
    assert "Not a directory" in mirror.failing
    (tmp_path / "mirror").unlink()
    assert not any(mirror.wanted() - {20})
    assert mirror.close(60)  # tries once more
    assert (mirror.latest(), mirror.failing) == (20, "")
    lines = capfd.readouterr().err.splitlines()
    assert len([line for line in lines if "Not a directory" in line]) == 1
    assert lines[-1] == f"mirror {url}: it takes copies again"


def test_a_run_without_checkpoints_does_not_start_anew_while_its_mirror_is_out_of_reach(tmp_path, url):
    (tmp_path / "mirror").mkdir()
    os.mkfifo(tmp_path / "mirror" / "run_id.json")  # a read that hangs
    mirror = Mirror(url, dataclasses.replace(CONFIG, mirror_timeout_s=0.5), tmp_path / "run")
    with pytest.raises(RunError, match=f"the mirror {url} can't be read: no end after 0.5 s"):
        mirror.restore()
    assert not workers()


def test_a_mirror_of_another_run_is_refused(run, url, tmp_path):
    mirrored(run, url, 20)
    other = make_run(tmp_path / "other", 10)
    with pytest.raises(ConfigError, match="belongs to another run, in a folder called run: give another"):
        Mirror(url, CONFIG, other).restore()
    assert not workers()
    again = Mirror(url, CONFIG, run)
    assert again.restore() is None
    assert again.close(60)


def test_a_rollback_takes_the_newer_copies_back(run, url):
    mirror = Mirror(url, CONFIG, run)
    mirror.restore()
    mirror.begin(20)
    assert mirror.wait(60)
    mirror.roll_back(10)
    assert mirror.latest() is None
    assert mirror.wait(60)
    assert (mirror.latest(), held(url)) == (10, [10])
    assert not mirror.close(60)  # the mirror lacks the folder's newest checkpoint


def test_a_run_that_went_back_while_nobody_looked_has_no_newer_copies(run, url):
    mirrored(run, url, 10, 20)
    shutil.rmtree(run / "checkpoints" / "20")
    mirror = Mirror(url, CONFIG, run)
    assert mirror.restore() is None
    assert mirror.latest() == 10
    assert mirror.close(60)
    assert held(url) == [10]


def test_the_worker_dies_with_the_run(run, url):
    code = """if True:
        import sys, time
        import tiny_mirror
        from jaxlm.run.checkpoints.mirror import Mirror
        mirror = Mirror(sys.argv[1], tiny_mirror.CONFIG, sys.argv[2])
        mirror.begin(20)
        time.sleep(600)
    """
    hang(run)
    path = os.pathsep.join(sys.path)
    parent = subprocess.Popen([sys.executable, "-c", code, url, str(run)], env={**os.environ, "PYTHONPATH": path})
    wait_for(lambda: hangs(url))
    worker = workers(parent.pid)[0]
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        worker.send_signal(ignored)
    time.sleep(0.1)
    assert worker.is_running()
    parent.kill()
    parent.wait()
    wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memory://x", r"memory:// can't hold a mirror: give a folder, s3://, gs:// or hf://"),
        ("s4://key:secret@bucket/x", r"s4://\*\*\*@bucket/x: s4:// can't hold a mirror"),
        ("https://host/x?token=secret", r"x\?token=\*\*\*: https:// can't hold a mirror"),
        ("RUN/mirror", "lies in the run's own folder"),
        ("RUN", "lies in the run's own folder"),
    ],
)
def test_urls_that_hold_no_mirror(run, url, words):
    with pytest.raises(ConfigError, match=words):
        check(url.replace("RUN", str(run)), run)


def test_a_package_that_is_missing_is_named(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'needs a package: pip install -e ".*/.*\[mirror-gs\]"'):
        check("gs://bucket/x", run)


class Failing:
    """An S3 of which three of ten PUTs fail: an error 500, or a connection that breaks."""

    def __init__(self, app, share):
        self.app, self.share, self.rng, self.failed, self.puts = app, share, random.Random(0), 0, 0

    def __call__(self, environ, start_response):
        if environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].count("/") > 1:  # not the bucket itself
            self.puts += 1
            if self.rng.random() < self.share:
                self.failed += 1
                if self.failed % 2:
                    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response("500 Internal Server Error", [("Content-Length", "0")])
                return [b""]
        return self.app(environ, start_response)


@pytest.fixture
def s3(monkeypatch):
    """A local S3 with a bucket; yields the middleware that makes its PUTs fail."""
    moto = pytest.importorskip("moto.moto_server.werkzeug_app", reason="needs moto[server]")
    serving = pytest.importorskip("werkzeug.serving")
    monkeypatch.setattr(logging.getLogger("werkzeug"), "level", logging.ERROR)
    app = Failing(moto.DomainDispatcherApplication(moto.create_backend_app), share=0.0)
    server = serving.make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(key, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
    yield app
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.faults
def test_three_of_ten_puts_that_fail_cost_no_step_of_a_mirror_on_s3(run, s3, capfd):
    pytest.importorskip("s3fs")
    s3.share, url = 0.3, "s3://bucket/runs/a"
    (run / "checkpoints" / "20" / "params" / "d" / "large").write_bytes(random.Random(1).randbytes(10**6) * 60)
    mirror = Mirror(url, CONFIG, run)
    assert mirror.restore() is None
    for step in (10, 20):
        mirror.begin(step)
        assert mirror.wait(300)
        assert mirror.latest() == step
    assert mirror.close(60)
    assert s3.failed > 5
    was = {name: data for name, data in content(run).items() if "checkpoints/10" not in name}
    shutil.rmtree(run)
    again = Mirror(url, CONFIG, run)
    assert again.restore() == 20
    assert content(run) == was
    assert again.close(60)
    again = Mirror(url, dataclasses.replace(CONFIG, mirror_keep_last=1), run)
    again.restore()
    again.begin(20)
    assert again.close(60)
    assert tiny_mirror.restore(url, run.parent / "back" / "run")[0] == 20
    tiny_mirror.save(run, 30)
    again = Mirror(url, CONFIG, run)
    again.restore()
    s3.share = 1.0
    again.begin(30)
    assert not again.close(3)  # nothing can be written: the run ends, and says what is not in the mirror
    assert again.latest() == 20
