"""`jaxlm serve` as a process: it says where it is, and ends cleanly."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import types

import httpx
import pytest
import tiny_chats

from jaxlm.cli import cli
from jaxlm.commands import serve
from jaxlm.config import ConfigError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tiny_chats.base(tmp_path_factory.mktemp("run"), n_layers=1)


@contextlib.contextmanager
def serving(run, *flags: str):
    """(the process, its address), once it serves; what it said is in `process.said`."""
    command = [sys.executable, "-m", "jaxlm.cli.cli"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [*command, "serve", str(run), "--port=0", *flags], stderr=subprocess.PIPE, text=True, env=environment
    )
    process.said, ready = [], threading.Event()

    def listen():
        for line in process.stderr:
            process.said.append(line)
            if line.startswith("serving "):
                ready.set()
        ready.set()

    threading.Thread(target=listen, daemon=True).start()
    try:
        assert ready.wait(120)
        yield process, re.search(r"http://[\d.:]+", "".join(process.said))[0]
    finally:
        process.kill()
        process.wait()


def test_it_serves_until_ctrl_c_also_with_streams_open(run, capsys):
    with serving(run, "--rows=2") as (process, url):
        assert process.said[-1] == f"serving {run.name} at {url} (ctrl-C ends it)\n"
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == 64
        assert httpx.get(url, headers={"Host": "example.org"}).status_code == 403
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "one two", "max_tokens": 5}, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] <= 5
        code = cli.main(["serve", str(run), f"--port={url.rpartition(':')[2]}"])
        assert (code, capsys.readouterr().err.count("is in use")) == (1, 1)
        body = {"prompt": ["one"] * 200, "max_tokens": 50, "stream": True, "logit_bias": {"2": -100}}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
            assert json.loads(next(stream.iter_lines()).removeprefix("data: "))["object"] == "text_completion"
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        assert not [line for line in process.said if "Traceback" in line or "rror" in line]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--rows=0"], "--rows=0 must be at least 1"),
        (["--port=70000"], "--port=70000 must be from 0 to 65535"),
        (["--host=no.such.host.invalid"], "can't listen at no.such.host.invalid"),
        (["--config.distributed.num_processes=2"], "one process"),
    ],
)
def test_a_flag_that_makes_no_sense(run, capsys, flags, says):
    assert cli.main(["serve", str(run), *flags]) == 2
    assert says in capsys.readouterr().err


def test_no_run_and_no_libraries(run, tmp_path, monkeypatch):
    args = types.SimpleNamespace(config="quickstart")
    with pytest.raises(ConfigError, match="no run in"):
        serve.run(types.SimpleNamespace(workdir=str(tmp_path)), args)
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install -e ".*/.*\[serve\]"'):
        serve.run(types.SimpleNamespace(workdir=str(run)), args)
