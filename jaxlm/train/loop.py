"""The only training loop, and the classes that it takes: batches, hooks between two steps, watches over the metrics.

The host never waits for the step that it has just sent to the device. It reads the metrics of step N - 1, and only
those that a log line or a watch needs, after it has sent step N. It sends the batch of step N + 1 while step N runs.
Only hooks, and batches computed from the state, wait for the step just sent; before such a batch its metrics are read.

With several processes, every process runs this loop, and all must end at the same step in the same way: what a hook or a
watch decides must follow from values that all processes share (metrics, steps), or be taken from the first process
(`processes.from_first`).
"""

import dataclasses
import logging
import typing
from collections.abc import Collection, Sequence

import jax
from jax.sharding import Mesh

from jaxlm.config import ConfigError, RunError
from jaxlm.host.console import Say, peer_is_gone
from jaxlm.run.clock import COMPILE, EVALUATE, Clock
from jaxlm.run.signals import StopSignal
from jaxlm.step.objectives.base import Batch, Variables
from jaxlm.step.state import TrainState
from jaxlm.step.step import Metrics, TrainStep
from jaxlm.train.recorder import Recorder

DONE, STOPPED, PREEMPTED, ROLL_BACK = "done", "stopped", "preempted", "roll back"
FAILED, REFUSED = "failed", "refused"
MOVED = "moved"  # the cause of an ending: the run's folder is gone, and nothing is written any more


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a run ends.

    Attributes:
      code: DONE: all steps are done. STOPPED: the run should not continue like this. PREEMPTED: the same command continues
        the run. ROLL_BACK: the run should continue from an earlier checkpoint and skip the batches that spoiled it.
        FAILED: something outside failed, and the same command may succeed later. REFUSED: only a change can help.
      keep: True if the state is worth a checkpoint. The state of a ROLL_BACK never is.
      cause: its name in `runs.on_exit` and `notify.events`: "gate", "budget", "stall", ...; "" if it has none.
      first_bad: ROLL_BACK only: the first step whose batch is skipped; the last such step is where the run ended.
    """

    code: str
    why: str = ""
    keep: bool = True
    cause: str = ""
    first_bad: int = 0


@dataclasses.dataclass(frozen=True)
class Moment:
    """The state that hooks get after `step` steps. The next step donates `state`: a hook must not keep its arrays."""

    step: int
    state: TrainState
    frozen: Variables
    say: Say

    @property
    def variables(self) -> Variables:
        return self.frozen | self.state.params


class Batches(typing.Protocol):
    """Gives the batches of successive steps.

    Attributes:
      activity: the activity of `run.clock` to which the wait for a batch counts.
      from_state: True if a batch is computed from the state. Then the loop first waits for the previous step, as STEP time.
    """

    activity: str
    from_state: bool

    def __call__(self, state: TrainState) -> Batch:
        """Returns the batch of step `state.step` + 1, on the mesh. That step donates `state`."""

    def close(self) -> None: ...


class Every(typing.NamedTuple):
    """The steps after which a hook is due: multiples of `steps` (0: none), the steps in `at`; the last step only if `end`."""

    steps: int
    at: Collection[int] = frozenset()
    end: bool = True

    def due(self, step: int, end: int) -> bool:
        """True if a hook is due after `step`; `end`: the last step."""
        return self.end if step == end else self._is_multiple(step) or step in self.at

    def left(self, step: int, end: int) -> int:
        """Returns how often a hook is due from `step` on; `end`: the last step."""
        multiples = max(0, (end - 1) // self.steps - max(0, step - 1) // self.steps) if self.steps else 0
        others = sum(step <= other < end and not self._is_multiple(other) for other in self.at)
        return multiples + others + (self.end and step <= end)

    def _is_multiple(self, step: int) -> bool:
        return self.steps > 0 and step > 0 and step % self.steps == 0


class Hook:
    """Work between two steps. It may wait for the device and may take long.

    Attributes:
      activity: the activity of `run.clock` to which its time counts.
      vital: True if the run must not go on without the hook: if it fails, the run ends.
      decoration: True if the run loses nothing without the hook: its failure is only reported.
    """

    name = ""
    activity = EVALUATE
    vital = False
    decoration = False

    def due(self, step: int, end: int) -> bool:
        raise NotImplementedError

    def left(self, step: int, end: int) -> float:
        """Returns how often the hook will be due from `step` on, as far as is known; for the estimate of the time left."""
        return 0

    def __call__(self, moment: Moment) -> dict[str, float] | Ending | None:
        """Runs the hook. Returns figures for metrics.jsonl, or an Ending to end the run."""
        raise NotImplementedError

    def done(self, step: int) -> bool:
        """True if an earlier start of the run already ran the hook after `step`."""
        return False

    def close(self, moment: Moment, ending: Ending) -> None:
        """Called when the loop ends, whatever the ending; not after an exception."""


class Watch:
    """Looks at the metrics of every step, at most one step late; never touches the device. Returns an Ending to end the run.

    Attributes:
      reads: the names of metrics that the watch needs at every step. It gets the other metrics at logged steps only.
    """

    reads: tuple[str, ...] = ()

    def __call__(self, step: int, record: dict[str, float]) -> Ending | None:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that the loop needs. The hooks are called in their order.

    Attributes:
      train_step: donates the old `state`. None if no step is left.
      owed: the hooks to run before the first step: they evaluate the initial state, or an earlier start did not reach them.
    """

    mesh: Mesh
    steps: int
    train_step: TrainStep | None
    frozen: Variables
    batches: Batches
    hooks: Sequence[Hook]
    watches: Sequence[Watch]
    recorder: Recorder
    clock: Clock
    stop: StopSignal
    owed: Sequence[Hook] = ()

    def moment(self, step: int, state: TrainState) -> Moment:
        return Moment(step, state, self.frozen, self.recorder.say)


def between_s(hooks: Sequence[Hook], clock: Clock, step: int, end: int) -> float:
    """Returns the seconds that hooks will take from `step` to `end`, by their mean times so far; 0 if unknown."""
    return sum(hook.left(step, end) * clock.usual_s(hook.name) for hook in hooks)


def run(run: Run, state: TrainState) -> tuple[TrainState, Ending]:
    """Trains from `state.step` to `run.steps`, or until a hook, a watch, a signal or a failed batch ends the run."""
    step = int(state.step)
    unread = None  # (step, metrics) that no watch has seen yet
    with run.stop, jax.set_mesh(run.mesh):
        ending = _call(run, run.owed, run.moment(step, state))
        batch = None if ending else _next(run, state, step)
        run.clock.begin(COMPILE)
        while batch is not None and not ending:
            if isinstance(batch, Ending):
                ending = batch
                break
            state, metrics = run.train_step(run.frozen, state, batch)
            step += 1
            run.clock.after(step)
            run.recorder.fetch(step, metrics)
            if run.batches.from_state:  # the next batch waits for this step
                ending, unread = _watch(run, (step, metrics)), None
                batch = None if ending else _next(run, state, step)
            else:
                batch = _next(run, state, step)  # while the device works on this step
                ending = _watch(run, unread)  # of the previous step: reading this step's metrics would wait for it
                unread = (step, metrics)
            if not ending and batch is not None and run.stop.requested(step):
                ending = run.stop.why() or Ending(PREEMPTED)
            due = [hook for hook in run.hooks if hook.due(step, run.steps)]
            if due and not ending and not isinstance(batch, Ending):
                # Hooks wait for the step anyway. So the watches see its metrics first, and no bad state is saved.
                ending, unread = _watch(run, unread), None
                ending = ending or _call(run, due, run.moment(step, state))
        # The watches have not seen the last step yet. A spike in it overrides these endings.
        if not ending or ending.code in (PREEMPTED, FAILED, REFUSED):
            ending = _watch(run, unread) or ending or Ending(DONE)
        _close(run, run.moment(step, state), ending)
    return state, ending


def _next(run: Run, state: TrainState, step: int) -> Batch | Ending | None:
    """Returns the batch of step `step` + 1; None after the last step; an Ending if the batch fails."""
    if step >= run.steps:
        return None
    if run.batches.from_state:
        jax.block_until_ready(state.step)
    with run.clock.spend(run.batches.activity):
        try:
            return run.batches(state)
        except Exception as error:  # the state is good: an error must not lose the steps since the last checkpoint
            return failure("no batch", step + 1, error)


def _watch(run: Run, unread: tuple[int, Metrics] | None) -> Ending | None:
    """Waits for a step, shows its metrics to the watches in turn, and returns the first Ending; None if there is none."""
    if unread is None:
        return None
    step, metrics = unread
    record = run.recorder.read(step, metrics)
    return next((ending for watch in run.watches if (ending := watch(step, record))), None)


def _call(run: Run, hooks: Sequence[Hook], moment: Moment) -> Ending | None:
    """Calls hooks in order, until one ends the run. Returns its Ending, or None."""
    # A failed hook ends the run if it is vital, or at the last step: then the next start, which owes the hook, runs it.
    # Before the last step any other failed hook is skipped; a decoration at any step.
    failed: list[Exception] = []
    for hook in hooks:
        if run.stop.alone():
            return run.stop.why() or Ending(PREEMPTED)
        try:
            with run.clock.spend(hook.activity, hook.name):
                done = hook(moment)
        except Exception as error:
            known = isinstance(error, ConfigError | RunError | OSError)
            if not known and not (hook.decoration and jax.process_count() == 1):  # others may wait for this process
                return failure(hook.name, moment.step, error)
            ends = hook.vital or (moment.step >= run.steps and not hook.decoration)
            then = "the next start makes up for it" if ends else "it is left out"
            moment.say(f"{hook.name} failed after step {moment.step}: {error or type(error).__name__}; {then}")
            failed += [error] * ends
            if hook.vital:
                break
            continue
        if isinstance(done, Ending):
            return done
        if done:
            run.recorder.add(moment.step, hook.name, done)
    if not failed:
        return None
    return Ending(REFUSED if isinstance(failed[0], ConfigError) else FAILED, str(failed[0]))


def failure(what: str, step: int, error: Exception) -> Ending:
    """Returns the ending for an error; the state is kept. Logs the traceback of an unexpected error."""
    if isinstance(error, ConfigError):
        return Ending(REFUSED, str(error), cause="data")
    if not isinstance(error, RunError | OSError) and not peer_is_gone(error):
        logging.error("%s at step %d", what, step, exc_info=error)
    return Ending(FAILED, f"{what} at step {step}: {error or type(error).__name__}", cause="stall")


def _close(run: Run, moment: Moment, ending: Ending) -> None:
    """Closes all hooks, even if one fails; then raises the first error of a hook that is no decoration."""
    errors = []
    for hook in run.hooks:
        try:
            with run.clock.spend(hook.activity, hook.name):
                hook.close(moment, ending)
        except Exception as error:
            if hook.decoration:
                moment.say(f"{hook.name} can't be ended: {error or type(error).__name__}")
            else:
                errors.append(error)
    if errors:
        raise errors[0]
