"""Where a server listens: what can't be is one line, with the exit code that says who must mend it."""

import socket

import pytest

from jaxlm.cli import cli
from jaxlm.config import ConfigError, RunError
from jaxlm.serve import address


def test_it_listens_at_once_and_says_where():
    with address.listen("127.0.0.1", 0) as listening:
        host, port = listening.getsockname()
        assert address.url(listening) == f"http://127.0.0.1:{port}"
        with socket.create_connection((host, port), timeout=5):
            pass
        with pytest.raises(RunError, match=f"port {port} of 127.0.0.1 is in use: .*--port=0"):
            address.listen("127.0.0.1", port)


def test_an_address_of_six_has_brackets():
    try:
        listening = address.listen("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    with listening:
        assert address.url(listening) == f"http://[::1]:{listening.getsockname()[1]}"


@pytest.mark.parametrize(
    ("host", "port", "says"),
    [
        ("127.0.0.1", 70000, "--port=70000 must be from 0 to 65535"),
        ("127.0.0.1", -1, "--port=-1 must be from 0 to 65535"),
        ("no.such.host.invalid", 0, "can't listen at no.such.host.invalid: .*--host"),
        ("192.0.2.1", 0, "can't listen at 192.0.2.1"),  # no machine has it (RFC 5737)
    ],
)
def test_what_can_never_be_is_a_config_error(host, port, says):
    with pytest.raises(ConfigError, match=says):
        address.listen(host, port)


def test_the_arena_ends_as_serve_does(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "p", "text": "{name}"}}\n')
    pytest.importorskip("nicegui")
    assert cli.main(["arena", "a.jsonl", "b.jsonl", "--host=no.such.host.invalid"]) == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.main(["arena", "a.jsonl", "b.jsonl", f"--port={taken.getsockname()[1]}"]) == 1
    said = capsys.readouterr().err
    assert "can't listen at no.such.host.invalid" in said
    assert "is in use" in said
