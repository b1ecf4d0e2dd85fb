"""Traces steps A to B of a run (`profile.steps=A:B`), and shows what their time was spent on.

Every process traces its own devices. It writes the trace to WORKDIR/profile (if there are several processes, to
WORKDIR/profile/process_N) in the format of TensorBoard's profile plugin, with a perfetto_trace.json.gz for
https://ui.perfetto.dev. The host waits for the device only before the first traced step and after the last.
"""

import pathlib

import jax

from jaxlm.config import ConfigError, ProfileConfig
from jaxlm.devices.processes import say
from jaxlm.train import xplane
from jaxlm.train.loop import Ending, Hook, Moment


def check(config: ProfileConfig, first: int) -> None:
    """Raises ConfigError if the steps to trace begin before `first`, the first step that this start will do."""
    if config.window and config.window[0] < first:
        raise ConfigError(
            f"config.profile.steps={config.steps} begins before step {first}, the next of this run: name later steps"
        )


class Trace(Hook):
    """Ends the trace and shows a summary. The hook `begin` starts the trace.

    This hook runs before all others and `begin` after them, so that only steps are traced. As a context manager it also ends
    the trace if the loop fails. `window`: the first and the last step to trace; None for no trace.
    """

    name = "trace"
    decoration = True

    def __init__(self, window: tuple[int, int] | None, folder: pathlib.Path):
        self.first, self.last = window or (0, 0)
        self.folder = folder / f"process_{jax.process_index()}" if jax.process_count() > 1 else folder
        self.begin = _Begin(self)
        self.running = False

    def due(self, step: int, end: int) -> bool:
        return self.running and step == self.last

    def __call__(self, moment: Moment) -> None:
        jax.block_until_ready(moment.state)
        try:
            self._stop()
            if jax.process_index() == 0:
                self._show(moment)
        except Exception as error:  # no trace is worth losing a run
            moment.say(f"trace: {self.folder}; it can't be summarised: {type(error).__name__}: {error}")

    def _show(self, moment: Moment) -> None:
        newest = max((self.folder / "plugins" / "profile").iterdir(), key=lambda path: path.stat().st_mtime)
        (path,) = newest.glob("*.xplane.pb")
        profile = xplane.summarise(xplane.read(path), moment.step - self.first + 1)
        kind = jax.local_devices()[0].device_kind
        moment.say(f"steps {self.first} to {moment.step}: {1e3 * profile.seconds:.1f} ms a step on {kind}")
        for line in xplane.lines(profile):
            moment.say(line)
        moment.say(f"trace: {newest} (perfetto_trace.json.gz opens in ui.perfetto.dev)")

    def close(self, moment: Moment, ending: Ending) -> None:
        if self.running:
            self(moment)

    def _stop(self) -> None:
        self.running = False
        jax.profiler.stop_trace()

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *exc) -> None:
        if self.running:
            try:
                self._stop()
            except Exception as error:
                say(f"trace: {self.folder} is not whole: {type(error).__name__}: {error}")


class _Begin(Hook):
    """Starts a trace before its first step."""

    name = "trace"
    decoration = True

    def __init__(self, trace: Trace):
        self._trace = trace

    def due(self, step: int, end: int) -> bool:
        return step == self._trace.first - 1

    def __call__(self, moment: Moment) -> None:
        jax.block_until_ready(moment.state)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it has so many events that it slows down the host
        jax.profiler.start_trace(str(self._trace.folder), create_perfetto_trace=True, profiler_options=options)
        self._trace.running = True
