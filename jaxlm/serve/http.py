"""The server: routes, limits, streams. OpenAI's API over a batcher."""

import asyncio
import bisect
import collections
import contextlib
import dataclasses
import functools
import hmac
import importlib.resources
import itertools
import json
import threading
import time
import traceback
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxlm.config import ConfigError, RunError
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.devices.processes import say
from jaxlm.models.decode.schedule import Ask, Ticket, Update
from jaxlm.serve import answers
from jaxlm.serve.batcher import Batcher, Busy, Stats
from jaxlm.serve.body import Refused
from jaxlm.serve.guard import Guard
from jaxlm.serve.requests import Reader, Request

_OPEN = ("/", "/health")  # need no key: the page holds no data, and asks for the key
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_PING_S = 15
_BODY_S = 30.0  # for a body to arrive
_AGAIN_S = 0.05  # before a request that found the queue full is submitted again
_SEND_S = 60.0  # for a client to go on reading
_DRAINED = 2**26  # bytes of a refused body that are read and dropped, so that the client sees the answer
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # upper ends of the histogram's buckets


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of one request.

    Attributes:
      seconds: the most seconds from its arrival to its end.
      window: how many of its answers may be in the batcher at once.
      here: True refuses a request that was sent to another name than this machine's own; see `Guard`.
    """

    body_bytes: int = 4 * 2**20
    seconds: float = 600.0
    window: int = 8
    here: bool = False


class Metrics:
    """Counts answers by route and status, and the time to the first token of each row, for Prometheus."""

    def __init__(self):
        self._lock = threading.Lock()
        self._answers: collections.Counter[tuple[str, int]] = collections.Counter()
        self._buckets, self._sum = [0] * (len(_SECONDS) + 1), 0.0

    def answered(self, route: str, status: int) -> None:
        with self._lock:
            self._answers[route, status] += 1

    def first_token(self, seconds: float) -> None:
        with self._lock:
            self._buckets[bisect.bisect_left(_SECONDS, seconds)] += 1
            self._sum += seconds

    def text(self, stats: Stats) -> str:
        lines = []
        for name, kind, says, value in (
            ("prompt_tokens_total", "counter", "tokens of prompts read", stats.prompt_tokens),
            ("prefix_tokens_total", "counter", "tokens of prompts found in the prefix cache", stats.prefix_tokens),
            ("generated_tokens_total", "counter", "new tokens", stats.tokens),
            ("rows", "gauge", "requests that can run at once", stats.rows),
            ("rows_busy", "gauge", "requests that run", stats.busy),
            ("queue", "gauge", "requests that wait for a row", stats.queued),
        ):
            lines += [*_head(name, kind, says), f"jaxlm_{name} {value}"]
        with self._lock:
            by_route, counts, total = sorted(self._answers.items()), [*itertools.accumulate(self._buckets)], self._sum
        lines += _head("requests_total", "counter", "answers by route and status")
        lines += [f'jaxlm_requests_total{{route="{route}",status="{status}"}} {n}' for (route, status), n in by_route]
        name = "time_to_first_token_seconds"
        lines += _head(name, "histogram", "from a request's arrival to the first token of each of its rows")
        ends = [*map(str, _SECONDS), "+Inf"]
        lines += [f'jaxlm_{name}_bucket{{le="{end}"}} {n}' for end, n in zip(ends, counts, strict=True)]
        lines += [f"jaxlm_{name}_sum {total}", f"jaxlm_{name}_count {counts[-1]}"]
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, says: str) -> list[str]:
    return [f"# HELP jaxlm_{name} {says}", f"# TYPE jaxlm_{name} {kind}"]


class Flight:
    """The batcher's requests of one HTTP request. Raises Busy if there is no room for the first; the others wait for room.

    At most `window` of them are submitted at once, so that other clients get their turn. Raises RunError if the batcher ended.
    """

    def __init__(self, batcher: Batcher, metrics: Metrics, asks: Sequence[Ask], window: int):
        self._batcher, self._metrics, self._window = batcher, metrics, window
        self._loop, self._updates = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Update]]()
        self._waiting, self._tickets = collections.deque(enumerate(asks)), dict[int, Ticket]()
        self._began, self._seen = time.monotonic(), set[int]()
        self._submit()

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """Yields (the request's number, its update) until all requests have ended or were stopped."""
        while self._tickets or self._waiting:
            if not self._hand_in():
                await asyncio.sleep(_AGAIN_S)
                continue
            number, update = await self._updates.get()
            if number not in self._tickets:
                continue  # sent before the batcher stopped the request
            if update.tokens and number not in self._seen:
                self._seen.add(number)
                self._metrics.first_token(time.monotonic() - self._began)
            if update.ended:
                del self._tickets[number]
            yield number, update

    def stop(self, number: int) -> None:
        if ticket := self._tickets.pop(number, None):
            ticket.cancel()

    def close(self) -> None:
        self._waiting.clear()
        for number in list(self._tickets):
            self.stop(number)

    def _hand_in(self) -> bool:
        """Submits waiting requests, as far as there is room. Returns False if no request is running then."""
        while self._waiting and len(self._tickets) < self._window:
            try:
                self._submit()
            except Busy:
                break
        return bool(self._tickets)

    def _submit(self) -> None:
        number, ask = self._waiting[0]

        def tell(update: Update) -> None:
            self._loop.call_soon_threadsafe(self._updates.put_nowait, (number, update))

        self._tickets[number] = self._batcher.submit(ask, tell)
        self._waiting.popleft()


class Server:
    """Answers over HTTP with one model, and adapters beside it.

    Args:
      readers: by the names that clients send as `model`: the model's, then the adapters'. Without adapters any name will do.
      key: what clients must show as `Authorization: Bearer KEY`; "" for nothing.
    """

    def __init__(self, readers: Mapping[str, Reader], batcher: Batcher, limits: Limits = Limits(), key: str = ""):
        self.name, self._reader = next(iter(readers.items()))
        self._readers, self._batcher, self._limits, self._key = readers, batcher, limits, key
        self.metrics, self._names, self._began = Metrics(), answers.Names(self._reader.tokenizer), int(time.time())

    def app(self) -> ASGIApp:
        routes = [
            Route(path, self._counted(path, answer), methods=[method])
            for method, path, answer in (
                ("POST", "/v1/completions", functools.partial(self._answered, read="completion")),
                ("POST", "/v1/chat/completions", functools.partial(self._answered, read="chat")),
                ("POST", "/v1/embeddings", functools.partial(self._answered, read="embeddings")),
                ("POST", "/tokenize", self._tokenize),
                ("POST", "/detokenize", self._detokenize),
                ("GET", "/", self._page),
                ("GET", "/v1/models", self._models),
                ("GET", "/v1/models/{name:path}", self._models),
                ("GET", "/health", self._health),
                ("GET", "/metrics", self._metrics),
                ("GET", "/tokenizer_info", self._tokenizer_info),
            )
        ]
        app = Starlette(routes=routes, exception_handlers={404: _no_route, 405: _no_route})
        return Guard(_Keyed(app, self._key), self._limits.here, "start the server with --api-key=KEY")

    def _counted(self, route: str, answer: Callable[[HttpRequest], Awaitable[Response]]) -> typing.Any:
        """Returns an endpoint that turns errors of `answer` into responses, and counts all responses."""

        async def endpoint(request: HttpRequest) -> Response:
            try:
                response = await answer(request)
            except Refused as refused:
                response = _refusal(refused, request)
            except Busy as busy:
                after = {"Retry-After": str(max(1, round(busy.retry_after_s)))}
                response = JSONResponse(Refused(str(busy), 429, code="server_busy").body(), 429, after)
            except (RunError, _Failed) as error:
                response = _refusal(Refused(str(error), 500 if isinstance(error, _Failed) else 503))
            except ClientDisconnect:
                response = Response(status_code=499)  # nobody reads it
            except Exception as error:
                say("".join(traceback.format_exception(error)).rstrip())  # uvicorn is silent
                response = _refusal(Refused(f"the server failed: {type(error).__name__}: {error}", 500))
            self.metrics.answered(route, response.status_code)
            return response

        return endpoint

    async def _answered(self, http: HttpRequest, read: str) -> Response:
        """Answers by the method `read` of the reader of the model that is asked for."""
        body = await self._body(http)
        name = self._asked(body)
        deadline = asyncio.get_running_loop().time() + self._limits.seconds
        make = getattr(self._readers[name], read)
        request = await asyncio.to_thread(make, body)  # a long prompt, or a grammar, takes a while
        flight = Flight(self._batcher, self.metrics, request.asks, self._limits.window)
        writer = answers.Writer(self._names, request, name)
        if request.stream:
            return _Stream(flight, self._events(flight, request, writer, deadline))
        try:
            return JSONResponse(await _unless_gone(http, self._whole(flight, request, writer, deadline)))
        finally:
            flight.close()

    async def _whole(self, flight: Flight, request: Request, writer: answers.Writer, deadline: float) -> dict:
        each, whole = self._answers(request), [answers.Delta() for _ in request.asks]
        async for number, delta in self._deltas(flight, each, deadline):
            whole[number] += delta
        return writer.whole(whole, answers.usage(request, each))

    async def _events(
        self, flight: Flight, request: Request, writer: answers.Writer, deadline: float
    ) -> AsyncIterator[dict[str, str]]:
        each = self._answers(request)
        try:
            for number in range(len(each) if request.chat else 0):
                yield _event(writer.opening(number))
            async for number, delta in self._deltas(flight, each, deadline):
                if delta.text or delta.placed or delta.calls or delta.ended:
                    yield _event(writer.piece(number, delta))
            if request.include_usage:
                yield _event(writer.usage(answers.usage(request, each)))
        except Refused as refused:
            yield _event(refused.body())
        except (RunError, _Failed) as failed:
            yield _event(Refused(str(failed), 500).body())
        yield {"data": "[DONE]"}

    def _answers(self, request: Request) -> list[answers.Answer]:
        prompts = [prompt for prompt in request.prompts for _ in range(request.n)]
        return [answers.Answer(self._reader.tokenizer, self._names, request, prompt) for prompt in prompts]

    async def _deltas(
        self, flight: Flight, each: list[answers.Answer], deadline: float
    ) -> AsyncIterator[tuple[int, answers.Delta]]:
        """Yields (the answer's number, its Delta). Raises Refused after the deadline, _Failed if the model can't go on."""
        updates = flight.updates()
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    number, update = await anext(updates)
            except StopAsyncIteration:
                return
            except TimeoutError:
                message = f"this took longer than {self._limits.seconds:g} s, the limit: ask for fewer tokens"
                raise Refused(message, 408, code="timeout") from None
            if update.ended in ("failed", "cancelled"):
                raise _Failed(update.why or "the server is shutting down")
            yield number, each[number].take(update)
            if each[number].ended:
                flight.stop(number)

    async def _tokenize(self, request: HttpRequest) -> Response:
        body = await self._body(request)
        ids = await asyncio.to_thread(self._readers[self._asked(body)].tokenize, body)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self._reader.context})

    async def _detokenize(self, request: HttpRequest) -> Response:
        return JSONResponse({"prompt": self._reader.detokenize(await self._body(request))})

    async def _tokenizer_info(self, request: HttpRequest) -> Response:
        tokenizer = self._reader.tokenizer
        named = {i: piece for piece, i in tokenizer.controls.items()}
        bos = named.get(tokenizer.opening[-1]) if tokenizer.opening else None
        info = {"eos_token": named.get(tokenizer.eos_id), "bos_token": bos, "chat_template": _template(tokenizer)}
        return JSONResponse(info)

    async def _models(self, request: HttpRequest) -> Response:
        models, shared = {}, {"object": "model", "created": self._began, "owned_by": "jaxlm"}
        for name, reader in self._readers.items():
            own = {"max_model_len": reader.context, "chat_template": _template(reader.tokenizer) is not None}
            models[name] = {"id": name, **shared, **own, "parent": self.name if name != self.name else None}
        wanted = request.path_params.get("name")
        return JSONResponse(models[self._known(wanted)] if wanted else {"object": "list", "data": [*models.values()]})

    def _asked(self, body: Mapping) -> str:
        """Returns the name of the model that a body asks for. Raises Refused as `_known`."""
        return self.name if len(self._readers) == 1 else self._known(body.get("model") or self.name)

    def _known(self, name: typing.Any) -> str:
        """Returns the name of a model. Raises Refused if it is not served here."""
        if not isinstance(name, str) or name not in self._readers:
            says = f"no model {name!r:.100}: here is {', '.join(self._readers)}"
            raise Refused(says, 404, param="model", code="model_not_found")
        return name

    async def _health(self, request: HttpRequest) -> Response:
        if why := self._batcher.stats().down:
            return JSONResponse({"status": "down", "why": why}, 503)
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: HttpRequest) -> Response:
        return PlainTextResponse(self.metrics.text(self._batcher.stats()), media_type="text/plain; version=0.0.4")

    async def _page(self, request: HttpRequest) -> Response:
        page = importlib.resources.files("jaxlm.serve").joinpath("page.html").read_text(encoding="utf-8")
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"})

    async def _body(self, request: HttpRequest) -> dict[str, typing.Any]:
        """Returns the JSON object in a body. Raises Refused if the body is too large, too late or no JSON object."""
        most, raw = self._limits.body_bytes, bytearray()
        length = request.headers.get("content-length", "")
        too_long = Refused(f"the body is larger than {most:,} bytes, the limit: send less", 413, code="body_too_large")
        if length.isdigit() and int(length) > most:
            raise too_long
        try:
            async with asyncio.timeout(_BODY_S):
                async for part in request.stream():
                    raw += part
                    if len(raw) > most:
                        raise too_long
        except TimeoutError:
            raise Refused(f"the body did not arrive within {_BODY_S:g} s", 408, code="timeout") from None
        try:
            body = json.loads(raw)
            json.dumps(body, ensure_ascii=False).encode()  # no lone surrogate, which is no text
        except (ValueError, RecursionError) as error:
            says = "it is not UTF-8, has half of a surrogate pair, nests too deeply, or has a number of thousands of digits"
            why = str(error) if isinstance(error, json.JSONDecodeError) else says
            raise Refused(f"the body is no JSON: {why}", code="invalid_json") from None
        if not isinstance(body, dict):
            raise Refused("the body must be a JSON object", code="invalid_json")
        return body


class _Failed(Exception):
    """The model could not go on with a request."""


class _Stream(EventSourceResponse):
    """A response of server-sent events. Its requests end with the connection, even if no event was ever sent."""

    def __init__(self, flight: Flight, events: AsyncIterator[dict[str, str]]):
        super().__init__(events, ping=_PING_S, sep="\n", send_timeout=_SEND_S)
        self._flight = flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._flight.close()


class _Keyed:
    """An application that only clients with the key can reach."""

    def __init__(self, app: ASGIApp, key: str):
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._key and scope["path"] not in _OPEN:
            shown = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(shown, b"Bearer " + self._key):
                says = "the key is missing or wrong: send Authorization: Bearer KEY"
                return await _refusal(Refused(says, 401, code="invalid_api_key"))(scope, receive, send)
        await self._app(scope, receive, send)


async def _unless_gone(request: HttpRequest, work: typing.Coroutine) -> typing.Any:
    """Returns the result of `work`. Raises ClientDisconnect, and cancels `work`, if the client leaves first."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _template(tokenizer: Coder) -> str | None:
    try:
        return chat.template(tokenizer)
    except ConfigError:
        return None


def _refusal(refused: Refused, request: HttpRequest | None = None) -> Response:
    if refused.status != 413 or request is None:
        return JSONResponse(refused.body(), refused.status)

    async def said() -> AsyncIterator[bytes]:
        """Sends the answer, then reads and drops some of the body: a client that only sends would miss the answer."""
        yield json.dumps(refused.body()).encode()
        left = _DRAINED
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(_BODY_S):
                async for part in request.stream():
                    left -= len(part)
                    if left < 0:
                        return

    headers = {"Connection": "close"}
    return StreamingResponse(said(), refused.status, headers, media_type="application/json")


async def _no_route(request: HttpRequest, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    message = f"no {request.url.path} here" if status == 404 else f"{request.url.path} takes no {request.method}"
    return _refusal(
        Refused(f"{message}: see /v1/models, /v1/completions, /v1/chat/completions, /v1/embeddings", status)
    )


def _event(content: dict[str, typing.Any]) -> dict[str, str]:
    return {"data": json.dumps(content, ensure_ascii=False)}
