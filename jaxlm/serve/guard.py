"""Guards both servers, serve's and the arena's: who may ask, and how long a request may take to arrive."""

import asyncio
import ipaddress
import re
import urllib.parse

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from jaxlm.serve.body import Refused

HEADERS_S = 10.0  # for the headers of a request to arrive
HALF_SENT = 128  # connections without a complete next request, idle ones too; one more closes the oldest


class Guard:
    """An application that pages of other sites can't reach.

    Args:
      here: True refuses a request that was sent to another name than this machine's own. A web page elsewhere may give this
        machine's address to its own name (DNS rebinding), and could then read answers in spite of CORS.
      mend: how to start the server so that it accepts other names.
    """

    def __init__(self, app: ASGIApp, here: bool, mend: str):
        self._app, self._here, self._mend = app, here, mend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = self._refused(scope) if scope["type"] in ("http", "websocket") else ""
        if not why:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": why})
        else:
            await JSONResponse(Refused(why, 403).body(), 403, {"Connection": "close"})(scope, receive, send)

    def _refused(self, scope: Scope) -> str:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:
            return "the request names two hosts"
        if self._here and not is_loopback(re.sub(r":\d*$", "", host).strip("[]")):
            return f"ask for 127.0.0.1 or localhost, or {self._mend}"
        site = headers.get(b"sec-fetch-site")
        if site in ("cross-site", "same-site"):  # a link may lead here
            of_link = (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest"), scope.get("method"))
            foreign = of_link != ("navigate", "document", "GET")
        else:
            origin = headers.get(b"origin", "")
            foreign = bool(origin) and site != "same-origin" and urllib.parse.urlsplit(origin).netloc != host
        return "a page of another site sent this: only this server's own page and programs may ask" if foreign else ""


def is_loopback(name: str) -> bool:
    """Returns True if a name or address is always this machine's own."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"


class Arriving(AutoHTTPProtocol):
    """uvicorn's connection. It is closed if headers don't arrive in time, or if too many connections wait for a request."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.since = self.loop.time()
        self._wait()
        half_sent = [other for other in self.connections if isinstance(other, Arriving) and other.is_half_sent()]
        for other in sorted(half_sent, key=lambda other: other.since)[:-HALF_SENT]:
            other.transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._waits_for_headers():
            self._stop()
        elif not self._timer:
            self.since = self.loop.time()
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def is_half_sent(self) -> bool:
        """Returns True if headers or a part of a body are still missing, of the first request or of the next one."""
        return self._waits_for_headers() or self.cycle.more_body

    def _waits_for_headers(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> None:
        self._timer = self.loop.call_later(HEADERS_S, self._late)

    def _stop(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if self in self.connections and self._waits_for_headers():  # a WebSocket has left this protocol
            self.transport.close()
