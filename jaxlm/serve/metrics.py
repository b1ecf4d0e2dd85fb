"""What the server counts, in the text format of Prometheus."""

import bisect
import collections
import itertools
import threading

from jaxlm.serve.batcher import Stats

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # upper ends of the histogram


class Metrics:
    """Counts answers by route and status, and the time to the first token of each row."""

    def __init__(self):
        self._lock = threading.Lock()
        self._answers: collections.Counter[tuple[str, int]] = collections.Counter()
        self._buckets, self._sum = [0] * (len(SECONDS) + 1), 0.0

    def answered(self, route: str, status: int) -> None:
        with self._lock:
            self._answers[route, status] += 1

    def first_token(self, seconds: float) -> None:
        """Counts a row whose first token came after some seconds."""
        with self._lock:
            self._buckets[bisect.bisect_left(SECONDS, seconds)] += 1
            self._sum += seconds

    def text(self, stats: Stats) -> str:
        """Returns all of it, with the batcher's numbers."""
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
            answers, counts, total = sorted(self._answers.items()), [*itertools.accumulate(self._buckets)], self._sum
        lines += _head("requests_total", "counter", "answers by route and status")
        lines += [f'jaxlm_requests_total{{route="{route}",status="{status}"}} {n}' for (route, status), n in answers]
        name = "time_to_first_token_seconds"
        lines += _head(name, "histogram", "from a request's arrival to the first token of each of its rows")
        ends = [*map(str, SECONDS), "+Inf"]
        lines += [f'jaxlm_{name}_bucket{{le="{end}"}} {n}' for end, n in zip(ends, counts, strict=True)]
        lines += [f"jaxlm_{name}_sum {total}", f"jaxlm_{name}_count {counts[-1]}"]
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, says: str) -> list[str]:
    return [f"# HELP jaxlm_{name} {says}", f"# TYPE jaxlm_{name} {kind}"]
