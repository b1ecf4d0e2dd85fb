"""Messages, the heartbeat, and the command at the end: what arrives, and that nothing of it disturbs a run."""

import dataclasses
import logging
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest
from werkzeug import Response

from jaxlm import config
from jaxlm.config import ConfigError, config_files
from jaxlm.run.survive import notify


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(notify, "PAUSE_S", 0.01)
    monkeypatch.setattr(notify, "_told", set())
    monkeypatch.setattr(logging.getLogger("werkzeug"), "disabled", True)  # the server's own lines on standard error
    yield
    notify.wait()


def resolve(*overrides: str) -> config.Config:
    return config.resolve(config_files.load("base", ["data.path=x", *overrides]))


def settings(*urls: str, **keys) -> config.NotifyConfig:
    return dataclasses.replace(resolve().notify, urls=urls, **keys)


def test_a_webhook_gets_what_slack_and_discord_read(httpserver):
    httpserver.expect_oneshot_request("/services/SECRET", method="POST").respond_with_data("ok")
    notify.tell(settings(httpserver.url_for("/"), events=("crash",)), "end", "it was not asked for", "runs/one")
    notify.tell(settings(httpserver.url_for("/services/SECRET")), "gate", "loss 9.1 is over 7", "runs/one", step=200)
    notify.wait()
    ((request, _),) = httpserver.log
    body = request.get_json()
    assert body["text"] == body["content"]
    assert body["text"].startswith("jaxlm gate: one on ")
    assert body["text"].endswith(", step 200: loss 9.1 is over 7")
    assert (body["event"], body["run"], body["step"]) == ("gate", "runs/one", 200)
    assert body["host"]
    assert request.headers["User-Agent"] == "jaxlm"


def test_a_message_is_short_enough_for_discord(httpserver):
    httpserver.expect_request("/").respond_with_data("")
    notify.tell(settings(httpserver.url_for("/")), "crash", "x" * 5000, "run")
    notify.wait()
    assert len(httpserver.log[0][0].get_json()["content"]) <= 2000


def test_a_failure_is_tried_three_times_and_said_once(httpserver, capsys):
    httpserver.expect_request("/services/SECRET").respond_with_data("", status=500)
    asked = settings(httpserver.url_for("/services/SECRET"))
    for _ in range(2):
        notify.tell(asked, "stall", "no step for 400 s", "run")
        notify.wait()
    assert len(httpserver.log) == 2 * notify.TRIES
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "HTTP 500" in said
    assert "SECRET" not in said


def test_the_second_try_may_succeed(httpserver, capsys):
    httpserver.expect_oneshot_request("/").respond_with_data("", status=503)
    httpserver.expect_oneshot_request("/").respond_with_data("")
    notify.tell(settings(httpserver.url_for("/")), "end", "done", "run")
    notify.wait()
    assert [reply.status_code for _, reply in httpserver.log] == [503, 200]
    assert capsys.readouterr().err == ""


def test_nobody_listens_and_nobody_waits(capsys):
    began = time.monotonic()
    notify.tell(settings("http://127.0.0.1:9/x"), "end", "done", "run")
    assert time.monotonic() - began < 0.2
    notify.wait()
    assert "config.notify.urls[0] (http://127.0.0.1:9/***) can't be reached: " in capsys.readouterr().err


def test_a_server_that_never_answers_holds_nothing_up(httpserver, monkeypatch):
    """Neither the caller nor, beyond its time, the end of the program."""
    release = threading.Event()

    def late(request):
        release.wait(5)
        return Response("")

    httpserver.expect_request("/").respond_with_handler(late)
    monkeypatch.setattr(notify, "TRIES", 1)
    began = time.monotonic()
    notify.tell(settings(httpserver.url_for("/")), "end", "done", "run")
    notify.wait(0.2)
    assert time.monotonic() - began < 1
    release.set()


def test_the_end_of_the_program_waits_for_the_message(httpserver):
    httpserver.expect_request("/").respond_with_data("")
    code = (
        "from jaxlm import config; from jaxlm.config import config_files; from jaxlm.run.survive import notify\n"
        f"c = config.resolve(config_files.load('base', ['data.path=x', 'notify.urls=(\"{httpserver.url_for('/')}\",)']))\n"
        "notify.tell(c.notify, 'end', 'done', 'run')\n"
        "import sys; assert 'jax' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    assert len(httpserver.log) == 1


def test_other_schemes_go_through_apprise(httpserver):
    pytest.importorskip("apprise")
    httpserver.expect_request("/hook").respond_with_data("")
    url = httpserver.url_for("/hook").replace("http://", "json://")
    notify.check(settings(url))
    notify.tell(settings(url), "budget", "$50 are spent", "runs/one")
    notify.wait()
    body = httpserver.log[0][0].get_json()
    assert body["title"] == "jaxlm budget: one"
    assert body["message"].endswith("$50 are spent")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"urls": ("hooks.example/SECRET",)}, "config.notify.urls[0]=*** is no URL"),
        ({"urls": ("https://ok.example/x", "https:///SECRET")}, r"config.notify.urls[1]=https:///*** has no host"),
        ({"urls": ("https://me:SECRET@host:port/x",)}, "config.notify.urls[0]=https://host:port/*** has no host"),
        ({"urls": ("https://host/SECRET and more",)}, "is no URL"),
        ({"urls": ("nosuch://SECRET",)}, "config.notify.urls[0]=nosuch://*** "),
        ({"heartbeat_url": "mailto://SECRET@host"}, "heartbeat_url=mailto://*** must begin with https://"),
        ({"heartbeat_url": "https://"}, "heartbeat_url=https:///*** has no host"),
    ],
)
def test_malformed_urls_are_refused_without_their_secrets(keys, words):
    with pytest.raises(ConfigError) as refused:
        notify.check(settings(*keys.pop("urls", ()), **keys))
    assert words in str(refused.value)
    assert "SECRET" not in str(refused.value)


def test_without_apprise_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(ConfigError, match=r'pip install -e ".*/.*\[notify\]"'):
        notify.check(settings("ntfy://topic"))


def test_good_urls_pass():
    notify.check(settings("https://hooks.slack.com/services/T/B/X", heartbeat_url="https://hc-ping.com/uuid"))
    notify.check(settings())


def test_the_heart_beats_while_steps_go_on(httpserver):
    httpserver.expect_request("/ping").respond_with_data("")
    heart = notify.Heartbeat(settings(heartbeat_url=httpserver.url_for("/ping"), heartbeat_minutes=1.5 / 60))
    heart(1, {})
    heart(2, {})  # too soon
    notify.wait()
    assert [request.method for request, _ in httpserver.log] == ["GET"]
    time.sleep(1.6)
    heart(1, {})  # no step since
    heart(3, {})
    notify.wait()
    assert len(httpserver.log) == 2


def ended(tmp_path, command: str, code: int = 0, mirrored: bool = True, **keys) -> str:
    """What the command wrote to the file that stands for OUT in it; "" if it did not run."""
    out = tmp_path / "out"
    cause = notify.CAUSES[code]
    runs = resolve(f"runs.on_exit.{cause}={command.replace('OUT', str(out))}", "runs.on_exit_unmirrored=True").runs
    runs = dataclasses.replace(runs, on_exit_unmirrored=keys.pop("unmirrored", False))
    notify.at_exit(runs, code, "all 60 steps", mirrored, tmp_path / "run", **keys)
    return out.read_text() if out.exists() else ""


@pytest.mark.parametrize("code", notify.CAUSES)
def test_the_command_of_the_cause_runs_and_knows_why(tmp_path, code):
    said = ended(tmp_path, 'echo "$JAXLM_CODE $JAXLM_WHY $JAXLM_WORKDIR" > OUT', code)
    assert said == f"{code} all 60 steps {tmp_path}/run\n"


def test_a_cause_without_a_command_runs_nothing(tmp_path, capsys):
    runs = resolve("runs.on_exit.done=touch never", "runs.on_exit_unmirrored=True").runs
    notify.at_exit(runs, 4, "SIGTERM", True, tmp_path)
    assert capsys.readouterr().err == ""


def test_nothing_is_thrown_away_that_is_not_mirrored(tmp_path, capsys):
    assert ended(tmp_path, "touch OUT; echo ran > OUT", mirrored=False, step=60) == ""
    assert capsys.readouterr().err == "runs.on_exit.done not run: step 60 is not in the mirror yet\n"
    assert ended(tmp_path, "echo ran > OUT", mirrored=False, unmirrored=True) == "ran\n"


def test_the_commands_output_and_failure_are_shown(tmp_path, capfd):
    ended(tmp_path, "echo stopping pod 7; exit 5")
    said = capfd.readouterr()
    assert "stopping pod 7\n" in said.err
    assert "runs.on_exit.done failed with exit code 5; the machine may still run" in said.err
    assert said.out == ""


def test_the_command_runs_though_nobody_reads_what_is_said(tmp_path):
    """`| tee` was killed: a line on standard error must not keep the machine running."""
    out = tmp_path / "out"
    code = (
        "from jaxlm import config; from jaxlm.config import config_files; from jaxlm.run.survive import notify\n"
        f"keys = ['data.path=x', 'runs.on_exit.done=echo a; echo b; echo ran > {out}', 'runs.on_exit_unmirrored=True']\n"
        "notify.at_exit(config.resolve(config_files.load('base', keys)).runs, 0, '', True, '.')"
    )
    reader, writer = os.pipe()
    os.close(reader)
    subprocess.run([sys.executable, "-c", code], stderr=writer, timeout=60, check=True)
    os.close(writer)
    assert out.read_text() == "ran\n"


def test_a_command_that_hangs_is_ended(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(notify, "COMMAND_S", 0.2)
    began = time.monotonic()
    ended(tmp_path, "sleep 30 & sleep 30")
    assert time.monotonic() - began < 5
    assert "took more than 0.2 s" in capsys.readouterr().err


def test_the_message_goes_out_before_the_machine(tmp_path, httpserver):
    httpserver.expect_request("/").respond_with_handler(lambda request: time.sleep(0.3) or Response(""))
    notify.tell(settings(httpserver.url_for("/")), "end", "done", "run")
    ended(tmp_path, "true")
    assert len(httpserver.log) == 1


def test_who_pressed_ctrl_c(monkeypatch):
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as terminal, open(os.devnull) as null:
        monkeypatch.setattr(sys, "__stdin__", terminal)
        assert notify.at_terminal(signal.SIGINT)
        assert not notify.at_terminal(signal.SIGTERM)
        assert not notify.at_terminal(None)
        monkeypatch.setattr(sys, "__stdin__", null)
        assert not notify.at_terminal(signal.SIGINT)
    monkeypatch.setattr(sys, "__stdin__", None)
    assert not notify.at_terminal(signal.SIGINT)
    os.close(ours)


@pytest.mark.parametrize("cause", ["done", "gate", "failed", "stopped"])
def test_a_command_at_the_end_needs_a_mirror(cause):
    with pytest.raises(
        ConfigError, match=rf"on_exit\.{cause} needs config\.checkpoint\.mirror, or .*on_exit_unmirrored=True"
    ):
        resolve(f"runs.on_exit.{cause}=runpodctl stop pod 1")
    resolve(f"runs.on_exit.{cause}=x", "checkpoint.mirror=/mnt/copy")
    resolve(f"runs.on_exit.{cause}=x", "runs.on_exit_unmirrored=True")


def test_the_line_that_names_the_command_hides_its_secrets(tmp_path, capsys):
    runs = resolve("runs.on_exit.done=true --api-key=HIDE", "runs.on_exit_unmirrored=True").runs
    notify.at_exit(runs, 0, "done", True, tmp_path)
    said = capsys.readouterr().err
    assert "runs.on_exit.done: true --api-key=***" in said
    assert "HIDE" not in said
