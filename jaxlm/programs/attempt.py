"""One attempt at a run: from its newest good checkpoint to its next ending. A rollback leads to another attempt."""

import contextlib
import dataclasses
import pathlib

from jaxlm import processes
from jaxlm.config import Config
from jaxlm.data.order import check_fingerprint
from jaxlm.objectives.base import Variables
from jaxlm.plan import admission
from jaxlm.processes import from_first, say, together
from jaxlm.programs import between
from jaxlm.programs.task import Data, Ready, Task
from jaxlm.step.state import TrainState
from jaxlm.train import announcement, hooks, ledger, loop, phases, profile, signals, stability, start
from jaxlm.train.checkpoints import restore, weights
from jaxlm.train.checkpoints.mirror import Mirror
from jaxlm.train.checkpoints.store import Checkpointer
from jaxlm.train.clock import COMPILE, EVALUATE, RESTORE, SAVE, Clock
from jaxlm.train.origin import check_base
from jaxlm.train.scores import Scores


@dataclasses.dataclass(frozen=True)
class Attempt:
    """What one attempt needs.

    Attributes:
      ready, program: config, parts and data, with nothing passed over yet; what compiles the step.
      asked: the config with "auto" as the user left it.
      folder: the run's folder, locked.
      clock, log: the time and the books of this attempt.
      scores: the held-out losses of all starts, and by what the best checkpoints are chosen; the attempt adds its own.
      stop: turns signals into a request to stop.
      mirror: where verified checkpoints are copied; None without one, and on all processes but the first.
    """

    task: Task
    ready: Ready
    asked: Config
    folder: pathlib.Path
    program: admission.Once
    clock: Clock
    log: start.Log
    scores: Scores
    stop: signals.StopSignal
    mirror: Mirror | None

    def run(self) -> loop.Ending:
        """Trains until an ending. A ROLL_BACK is in run.json then, and the next attempt goes on past it."""
        c, folder = self.ready.config, self.folder
        checkpointer = Checkpointer(folder / "checkpoints", c.checkpoint, scores=self.scores)
        with contextlib.ExitStack() as stack:  # what is opened first is closed last
            log = stack.enter_context(self.log)
            log.on_full = checkpointer.reserve.free
            stack.callback(self._close, checkpointer)  # a save in flight is finished, also when the loop failed
            bill = phases.of_run(c, folder, log.spent)
            if ending := bill.begin() or stability.held_back(self._rollbacks(), c.optim, c.stability, c.train):
                return ending
            checkpointer.prepare(self.ready.parts.abstract, c.train.steps)
            checkpointer.stopping = self.stop.asked
            with self.clock.spend(RESTORE, str(checkpointer.directory)):
                ready, state, frozen, meta = self._restore(checkpointer)
            with self.clock.spend(EVALUATE, "the reference"):
                ready = self.task.begin(ready, state, frozen)
            done = int(state.step)
            if self.mirror:
                between.follow(checkpointer, self.mirror, done)
            program = self.program(done)
            parts = between.Between(self.task, ready, folder, checkpointer, bill, self.scores, self.stop, self.clock)
            doing, watching = parts.make(stack)
            owed = hooks.owed(doing, done, c.train.steps, meta.get("interrupted", False))
            if done >= c.train.steps and not owed:
                why = f"complete: {folder} is at step {done} of {c.train.steps}; raise config.train.steps to continue"
                return loop.Ending(loop.DONE, why)
            if done < c.train.steps:
                profile.check(c.profile, done + 1)
            batches = self.task.batches(ready, done)
            stack.callback(batches.close)
            batches.on_failure = lambda error: self.stop.ask(loop.failure("no batch", self.clock.step + 1, error))
            recorder = log.begin(self.asked, c, ready.data.data, ready.parts.mesh, done, watching)
            recorder.losses, recorder.noted = self.scores.losses, self.scores.note
            passes, trained = self.task.passes(ready.data, c.train.steps), self.task.trained
            announcement.announce(ready.parts, ready.data.data, passes, program, done, trained)
            inner = (frozen, batches, doing, watching, recorder, self.clock, self.stop, owed)
            state, ending = loop.run(loop.Run(ready.parts.mesh, c.train.steps, program and program.step, *inner), state)
            self.clock.begin(SAVE, "the last checkpoint")  # until all is closed
            ending = self._ended(ending, int(state.step), ready.data, checkpointer)
            with self.stop:  # a signal must not cost the save in flight
                stack.pop_all().close()
            return ending

    def _rollbacks(self) -> list[dict]:
        return from_first(lambda: ledger.read(self.folder)["rollbacks"])

    def _close(self, checkpointer: Checkpointer) -> None:
        checkpointer.close()
        processes.left_behind |= checkpointer.left_behind

    def _restore(self, checkpointer: Checkpointer) -> tuple[Ready, TrainState, Variables, dict]:
        """The newest good state and what goes with it: (ready, state, frozen variables, what its checkpoint says)."""
        ready, parts = self.ready, self.ready.parts
        rollbacks, where = self._rollbacks(), checkpointer.directory
        for step in from_first(lambda: stability.spoiled(restore.read_metas(where, checkpointer.steps()), rollbacks)):
            checkpointer.set_aside(step)
        # A checkpoint has all that is trained: only what is frozen, or compared with, is read from the origin again.
        begun = from_first(lambda: weights.begun(where))
        kept = bool(parts.frozen) or self.task.keeps_origin
        origin = self.task.origin(ready.config) if kept or not begun else None
        base = from_first(origin.identity) if kept and origin else {}
        with self.clock.spend(COMPILE):  # before anything takes memory
            self.program(from_first(lambda: max(checkpointer.steps(), default=0)))
        if begun:
            state, meta = checkpointer.restore_latest(parts.abstract, parts.shardings, ("config", "fingerprint"))
            now = ready.data.fingerprint()
            check_fingerprint(meta["fingerprint"], now, int(state.step), meta.get("passed_over", ()))
            check_base(meta.get("base", {}), base, self.folder)
            frozen = parts.load_frozen(origin)
        elif ready.config.origin_state:
            state, frozen, meta = origin.branch(parts, ready.data.fingerprint())
        else:
            (state, frozen), meta = parts.create(origin), {}
        data = self._pass_over(int(state.step), meta.get("passed_over", ()), [r["batches"] for r in rollbacks])
        return dataclasses.replace(ready, data=data, base=base), state, frozen, meta

    def _pass_over(self, done: int, saved: list, spoiled: list) -> Data:
        """The data without the batches that rollbacks and `stability.skip` pass over."""
        data, asked = self.ready.data, self.ready.config.stability.windows
        windows, late = stability.passed_over(saved, [*spoiled, *asked], data.passing_over(saved).batch_number(done))
        for first, last in late:
            say(f"batches {first} to {last} are not passed over: the checkpoint of step {done} was trained on them")
        if set(asked) & set(windows):
            say("batches passed over: " + ", ".join(f"{first} to {last}" for first, last in windows))
        data = data.passing_over(windows)
        together(lambda: ledger.put(self.folder, "passed_over", [list(w) for w in data.passed_over]), first_only=True)
        return data

    def _ended(self, ending: loop.Ending, step: int, data: Data, checkpointer: Checkpointer) -> loop.Ending:
        """The ending, after a ROLL_BACK was written into run.json; or the STOPPED that takes its place."""
        if ending.code != loop.ROLL_BACK:
            return ending
        c, saved = self.ready.config, checkpointer.steps()
        batches = [data.batch_number(ending.first_bad), data.batch_number(step)]
        settings = stability.settings(c.optim, c.stability, c.train)
        if why := from_first(lambda: stability.carry_out(self.folder, ending, step, batches, saved, settings)):
            return dataclasses.replace(ending, code=loop.STOPPED, why=why)
        self.scores.forget(ending.first_bad)
        return ending
