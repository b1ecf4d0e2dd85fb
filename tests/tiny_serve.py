"""A server in a thread, with a small model or with rows that say what a test wants."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn

from jaxlm.models.decode.schedule import Ask, Token, Update
from jaxlm.serve.batcher import Busy, Stats
from jaxlm.serve.guard import Arriving

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog é"]},
        "legs": {"type": "integer", "minimum": 2, "maximum": 44},
        "old": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "kind", "legs", "old"],
    "additionalProperties": False,
}


class Scripted:
    """A batcher of `room` rows that say what `say` returns, a token every `pause` seconds, its number as its logp."""

    def __init__(self, say: Callable[[Ask], list[int]], pause: float = 0.0, room: int = 8):
        self.say, self.pause, self.room = say, pause, room
        self.asks: list[Ask] = []
        self.live: list[Row] = []
        self.down = ""

    def submit(self, ask: Ask, tell: Callable[[Update], None]) -> "Row":
        self.live = [row for row in self.live if row.thread.is_alive()]
        if len(self.live) >= self.room:
            raise Busy(7.0)
        self.asks.append(ask)
        row = Row(self, ask, tell)
        self.live.append(row)
        row.thread.start()
        return row

    def stats(self) -> Stats:
        busy = sum(row.thread.is_alive() for row in self.live)
        ids = sum(len(ask.ids) for ask in self.asks)
        return Stats(self.room, busy, 0, 256, len(self.asks), ids, 0, 0, 0, 0, {}, self.down)


class Row:
    """One request of `Scripted`."""

    def __init__(self, batcher: Scripted, ask: Ask, tell: Callable[[Update], None]):
        self._batcher, self._ask, self._tell = batcher, ask, tell
        self._cancelled = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def cancel(self) -> None:
        self._cancelled.set()

    def _run(self) -> None:
        said = self._batcher.say(self._ask)
        if self._ask.echo:
            first, *rest = (self._token(i) for i in self._ask.ids)
            self._tell(Update((), prompt=(Token(first.id), *rest)))
        for token in itertools.islice(said, self._ask.max_new_tokens):
            if self._cancelled.wait(self._batcher.pause):
                self._tell(Update((), ended="cancelled"))
                return
            if token in self._ask.stop_ids:
                self._tell(Update((), ended="stop"))
                return
            self._tell(Update((self._token(token),)))
        self._tell(Update((), ended="length"))

    def _token(self, token: int) -> Token:
        if self._ask.logprobs is None:
            return Token(token)
        return Token(token, -token / 100, tuple((token + n, -(token + n) / 100) for n in range(self._ask.logprobs)))


@contextlib.contextmanager
def running(app) -> Iterator[str]:
    """The address of an application that uvicorn serves in a thread."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=Arriving, log_config=None, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive()


def until(true: Callable[[], bool], seconds: float) -> float:
    """Seconds until something is true; fails after so many."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, "it did not come"
        time.sleep(0.01)
    return time.monotonic() - began


def half_sent(url: str, number: int, head: str) -> list[socket.socket]:
    """Connections that have sent `head` and no more."""
    host, port = url.removeprefix("http://").split(":")
    found = []
    for _ in range(number):
        found.append(socket.create_connection((host, int(port)), 5))
        found[-1].sendall(head.encode())
        found[-1].setblocking(False)
    return found


def still_open(connections: list[socket.socket]) -> int:
    """How many of them the server has not closed."""
    number = 0
    for connection in connections:
        try:
            connection.recv(1)
        except BlockingIOError:
            number += 1
        except OSError:
            pass
    return number
