"""Who may ask the servers, how long a request may take to arrive, and where they listen."""

import asyncio
import socket
import time

import httpx
import pytest
import tiny_serve
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from jaxlm.cli import cli
from jaxlm.config import ConfigError, RunError
from jaxlm.serve import address, guard
from jaxlm.serve.guard import Guard

SITE = "http://127.0.0.1:80"
PAGE = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
ASKED = {  # headers, whether they are let through
    "program": ({}, True),
    "own page": ({"origin": SITE, "sec-fetch-site": "same-origin"}, True),
    "own page, older browser": ({"origin": SITE}, True),
    "own page behind a proxy": ({"origin": "https://chat.example.org", "sec-fetch-site": "same-origin"}, True),
    "address bar": ({"sec-fetch-site": "none", **PAGE}, True),
    "link elsewhere": ({"sec-fetch-site": "cross-site", **PAGE}, True),
    "form elsewhere": ({"origin": "https://example.org", "content-type": "application/x-www-form-urlencoded"}, False),
    "script elsewhere": ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}, False),
    "other port": ({"origin": "http://127.0.0.1:81", "sec-fetch-site": "same-site"}, False),
    "frame elsewhere": (
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
        False,
    ),
    "no origin's name": ({"origin": "null"}, False),
    "rebound name": ({"host": "example.org"}, False),
}


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(("headers", "passes"), ASKED.values(), ids=ASKED)
def test_no_page_of_another_site_asks(kind, headers, passes):
    reached, sent = [], []

    async def app(scope, receive, send):
        reached.append(scope)

    async def send(message):
        sent.append(message)

    named = {"host": "127.0.0.1:80"} | headers
    scope = {"type": kind, "method": "GET", "headers": [(k.encode(), v.encode()) for k, v in named.items()]}
    asyncio.run(Guard(app, True, "start it otherwise")(scope, None, send))
    assert bool(reached) is passes
    if not passes:
        assert sent[0].get("status") == 403 or sent[0]["type"] == "websocket.close"


HEADS = {
    "headers": "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n",
    "body": "POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n",
    "nothing": "",
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_half_sent_requests_are_capped(monkeypatch, head):
    monkeypatch.setattr(guard, "HALF_SENT", 8)
    with tiny_serve.running(waiting()) as url:
        connections = tiny_serve.half_sent(url, 40, head)
        assert httpx.get(url).status_code == 200
        assert 0 < tiny_serve.still_open(connections) <= 8
        for connection in connections:
            connection.close()


def test_headers_arrive_in_time_or_the_connection_is_closed(monkeypatch):
    """The first request's, and those of another on the same connection."""
    monkeypatch.setattr(guard, "HEADERS_S", 0.2)
    with tiny_serve.running(waiting()) as url:
        connections = tiny_serve.half_sent(url, 1, HEADS["headers"]) + tiny_serve.half_sent(
            url, 1, HEADS["headers"] + "\r\nGET / "
        )
        connections += tiny_serve.half_sent(url, 1, "GET /slow HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        until = time.monotonic() + 5
        connections[1].setblocking(True)
        while connections[1].recv(1000):
            assert time.monotonic() < until
        assert tiny_serve.still_open(connections[:1]) == 0
        connections[2].setblocking(True)
        assert connections[2].recv(1000).startswith(b"HTTP/1.1 200")  # what is asked in time may take longer
        for connection in connections:
            connection.close()


def waiting():
    """An application that waits for the body."""

    async def answer(request):
        await request.body()
        await asyncio.sleep(0.5 if request.url.path == "/slow" else 0)
        return PlainTextResponse("here")

    return Starlette(routes=[Route(path, answer, methods=["GET", "POST"]) for path in ("/", "/slow")])


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
