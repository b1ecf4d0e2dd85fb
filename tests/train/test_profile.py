"""The window of traced steps: what is refused, and runs that end within it."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from jaxlm import config, config_files
from jaxlm.config import ConfigError, ProfileConfig
from jaxlm.train import profile


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("5", "first and the last step to trace as A:B"),
        ("5:", "first and the last step to trace as A:B"),
        ("a:b", "first and the last step to trace as A:B"),
        ("9:3", "the last at least the first"),
        ("0:3", "at least 1"),
        ("5:11", "at most train.steps=10"),
    ],
)
def test_a_bad_window_is_refused(steps, message):
    keys = ["data.path=x", "optim.warmup_steps=0", "train.steps=10", f"profile.steps={steps}"]
    with pytest.raises(ConfigError, match=message):
        config.resolve(config_files.load("base", keys))


def test_a_window_in_the_past_is_refused():
    profile.check(ProfileConfig("5:9"), first=5)
    profile.check(ProfileConfig(""), first=5)
    with pytest.raises(ConfigError, match="begins before step 6"):
        profile.check(ProfileConfig("5:9"), first=6)


def test_a_run_that_ends_within_the_window_shows_the_steps_it_made(tmp_path):
    said, paused = [], []
    f = jax.jit(lambda x: x @ x)
    state = f(jnp.ones((64, 64)))
    with profile.Tracer((2, 9), tmp_path, said.append, paused.append) as tracer:
        for step in (1, 2, 3):
            tracer.before(step, state)
            state = f(state)
            tracer.after(step, state)
        tracer.end(3, state)
    assert said[0].startswith("steps 2 to 3: ")
    assert said[-1].startswith(f"trace: {tmp_path}")
    assert sum(paused) > 0
    assert list(tmp_path.rglob("perfetto_trace.json.gz"))


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch):
    said, stop = [], jax.profiler.stop_trace

    def full():
        stop()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", full)
    with profile.Tracer((1, 1), tmp_path, said.append, lambda s: None) as tracer:
        tracer.before(1, ())
        tracer.after(1, ())
    assert "No space left on device" in said[0]


def test_a_loop_that_fails_leaves_no_trace_running(tmp_path):
    with contextlib.suppress(KeyError), profile.Tracer((1, 9), tmp_path, print, lambda s: None) as tracer:
        tracer.before(1, ())
        raise KeyError
    jax.profiler.start_trace(str(tmp_path))  # raises when one is running
    jax.profiler.stop_trace()
