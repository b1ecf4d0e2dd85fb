"""`config.profile.steps=A:B`: traces steps A to B of a run and says where their time went.

Every process traces its own devices, into WORKDIR/profile/ (WORKDIR/profile/process_N where there are several), in the
layout that TensorBoard's profile plugin reads, with a perfetto_trace.json.gz beside it for https://ui.perfetto.dev.
The device is waited for before the first traced step and after the last one: nowhere else.
"""

import pathlib
import time
import typing

import jax

from jaxlm.config import ConfigError, ProfileConfig
from jaxlm.train import xplane


def check(config: ProfileConfig, first: int) -> None:
    """Refuses a window that begins before step `first`, the next one of a run. Raises ConfigError."""
    if config.window and config.window[0] < first:
        raise ConfigError(
            f"config.profile.steps={config.steps} begins before step {first}, the next of this run: name later steps"
        )


class Tracer:
    """Starts and stops the trace around the steps; `with` ends it also when the loop fails.

    Args:
      window: first and last step to trace, or None.
      folder: WORKDIR/profile.
      say: shows a line to the person.
      pause: is told the seconds that tracing took beside the steps.
    """

    def __init__(
        self,
        window: tuple[int, int] | None,
        folder: pathlib.Path,
        say: typing.Callable[[str], None],
        pause: typing.Callable[[float], None],
    ):
        self._first, self._last = window or (0, 0)
        self._folder = folder / f"process_{jax.process_index()}" if jax.process_count() > 1 else folder
        self._say, self._pause = say, pause
        self._running = False

    def before(self, step: int, state: typing.Any) -> None:
        """To be called before `step` is dispatched on `state`."""
        if step != self._first:
            return
        jax.block_until_ready(state)
        start = time.monotonic()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # its events are many, and slow the host that is to be watched
        jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True, profiler_options=options)
        self._running = True
        self._pause(time.monotonic() - start)

    def after(self, step: int, state: typing.Any) -> None:
        """To be called after `step` was dispatched and gave `state`."""
        if self._running and step == self._last:
            self._finish(step, state)

    def end(self, step: int, state: typing.Any) -> None:
        """The run ends after `step`, be it within the window."""
        if self._running:
            self._finish(step, state)

    def _finish(self, step: int, state: typing.Any) -> None:
        jax.block_until_ready(state)
        start = time.monotonic()
        try:
            self._stop()
            if jax.process_index() == 0:
                newest = max((self._folder / "plugins" / "profile").iterdir(), key=lambda path: path.stat().st_mtime)
                self._show(step, newest)
        except Exception as error:  # a trace that can't be written or read is no reason to lose a run
            self._say(f"trace: {self._folder}; it can't be summarised: {type(error).__name__}: {error}")
        self._pause(time.monotonic() - start)

    def _show(self, last: int, folder: pathlib.Path) -> None:
        (path,) = folder.glob("*.xplane.pb")
        steps = last - self._first + 1
        found = xplane.summarise(xplane.read(path), steps)
        kind = jax.local_devices()[0].device_kind
        self._say(f"steps {self._first} to {last}: {1e3 * found.seconds:.1f} ms a step on {kind}")
        for line in xplane.lines(found):
            self._say(line)
        self._say(f"trace: {folder} (perfetto_trace.json.gz opens in ui.perfetto.dev)")

    def _stop(self) -> None:
        self._running = False
        jax.profiler.stop_trace()

    def __enter__(self) -> "Tracer":
        return self

    def __exit__(self, *exc) -> None:
        if self._running:
            self._stop()
