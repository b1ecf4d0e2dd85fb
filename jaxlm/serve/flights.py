"""The requests of one client in the batcher: their updates as they come, on the event loop; all cancelled when it leaves."""

import asyncio
import collections
import time
from collections.abc import AsyncIterator, Sequence

from jaxlm.serve.batcher import Ask, Batcher, Busy, Ticket, Update
from jaxlm.serve.metrics import Metrics

_AGAIN_S = 0.05  # before a request that found the queue full is handed in again


class Flight:
    """Some requests that belong together. The first one finds room, or Busy is raised; the others wait for it.

    Args:
      asks: the requests.
      window: how many of them are handed in at once, so that other clients get their turn.

    Raises:
      Busy: the queue is full.
      RunError: the batcher ended.
    """

    def __init__(self, batcher: Batcher, metrics: Metrics, asks: Sequence[Ask], window: int):
        self._batcher, self._metrics, self._window = batcher, metrics, window
        self._loop, self._updates = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Update]]()
        self._waiting, self._tickets = collections.deque(enumerate(asks)), dict[int, Ticket]()
        self._began, self._seen = time.monotonic(), set[int]()
        self._submit()

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """Yields (number of the request, what is new) until all have ended or were stopped."""
        while self._tickets or self._waiting:
            if not self._hand_in():
                await asyncio.sleep(_AGAIN_S)
                continue
            number, update = await self._updates.get()
            if number not in self._tickets:
                continue  # what it said before it heard that it is stopped
            if update.tokens and number not in self._seen:
                self._seen.add(number)
                self._metrics.first_token(time.monotonic() - self._began)
            if update.ended:
                del self._tickets[number]
            yield number, update

    def stop(self, number: int) -> None:
        """Ends a request early."""
        if ticket := self._tickets.pop(number, None):
            ticket.cancel()

    def close(self) -> None:
        """Cancels all that is left."""
        self._waiting.clear()
        for number in list(self._tickets):
            self.stop(number)

    def _hand_in(self) -> bool:
        """Hands in what waits, as far as there is room. False if none of the requests is under way."""
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
