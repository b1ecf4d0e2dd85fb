"""The window of traced steps: what is refused, and runs that end within it."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from jaxlm import config
from jaxlm.config import ConfigError, ProfileConfig, config_files
from jaxlm.train import profile
from jaxlm.train.loop import DONE, Ending, Moment


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


def moment(step, said, state=()):
    return Moment(step, state, {}, said.append)


ENDING = Ending(DONE)


def test_a_run_that_ends_within_the_window_shows_the_steps_it_made(tmp_path):
    said = []
    f = jax.jit(lambda x: x @ x)
    state = f(jnp.ones((64, 64)))
    with profile.Trace((2, 9), tmp_path) as trace:
        for step in (1, 2, 3):
            state = f(state)
            for hook in (trace, trace.begin):
                if hook.due(step, 20):
                    hook(moment(step, said, state))
        trace.close(moment(3, said, state), ENDING)
    assert said[0].startswith("steps 2 to 3: ")
    assert said[-1].startswith(f"trace: {tmp_path}")
    assert list(tmp_path.rglob("perfetto_trace.json.gz"))


def test_the_window_is_between_the_other_hooks_of_its_ends(tmp_path):
    """What else is due at the step before it is over when it begins, and it ends before what is due at its last step."""
    trace = profile.Trace((4, 6), tmp_path)
    assert [step for step in range(9) if trace.begin.due(step, 9)] == [3]
    assert not trace.due(6, 9)  # it was never begun, as in a run that resumed after its start
    trace.begin(moment(3, []))
    assert [step for step in range(9) if trace.due(step, 9)] == [6]
    trace.close(moment(6, []), ENDING)
    never = profile.Trace(None, tmp_path)
    assert not any(hook.due(step, 9) for hook in (never, never.begin) for step in range(10))


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch):
    said, stop = [], jax.profiler.stop_trace

    def full():
        stop()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", full)
    with profile.Trace((1, 1), tmp_path) as trace:
        trace.begin(moment(0, said))
        trace(moment(1, said))
    assert "No space left on device" in said[0]


def test_a_loop_that_fails_leaves_no_trace_running(tmp_path):
    with contextlib.suppress(KeyError), profile.Trace((1, 9), tmp_path) as trace:
        trace.begin(moment(0, []))
        raise KeyError
    jax.profiler.start_trace(str(tmp_path))  # raises when one is running
    jax.profiler.stop_trace()
