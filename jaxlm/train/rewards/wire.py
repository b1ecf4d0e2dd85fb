"""Messages over a socket, each behind its length. What a process prints can't get between them."""

import socket
import struct
import time
from collections.abc import Callable

_LENGTH = struct.Struct(">Q")
_LOOK_S = 0.2  # between looks at whether the other side is alive
_CHUNK = 1 << 20


def send(link: socket.socket, content: bytes, timeout_s: float | None = None) -> None:
    """Sends a message. Raises TimeoutError if the other side has not taken it by then, OSError if that is gone."""
    link.settimeout(timeout_s)
    link.sendall(_LENGTH.pack(len(content)) + content)


def receive(link: socket.socket, timeout_s: float | None = None, alive: Callable[[], bool] = lambda: True) -> bytes:
    """Returns the next message.

    Args:
      timeout_s: how long to wait for all of it; None for ever.
      alive: False once the other side has ended: a process that it left behind may hold the socket open.

    Raises:
      TimeoutError: it has not come by then.
      EOFError: the other side is gone.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = _LENGTH.unpack(_read(link, _LENGTH.size, end, alive))
    return _read(link, length, end, alive)


def _read(link: socket.socket, size: int, end: float | None, alive: Callable[[], bool]) -> bytes:
    found = bytearray()
    while len(found) < size:
        left = _LOOK_S if end is None else end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        link.settimeout(min(left, _LOOK_S))
        living = alive()  # before the look, so that what it sent before its end is read
        try:
            more = link.recv(min(size - len(found), _CHUNK))
        except TimeoutError:
            if not living:
                raise EOFError from None
            continue
        except ConnectionError:
            more = b""
        if not more:
            raise EOFError
        found += more
    return bytes(found)
