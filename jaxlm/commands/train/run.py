"""Runs any kind of training: connects it to the training loop, and tries again after a rollback. Run it again to resume."""

import contextlib
import dataclasses
import functools
import pathlib
import time

import jax

from jaxlm.commands.train import pages
from jaxlm.commands.train.kind import Kind, Opened, Ready
from jaxlm.config import Config, older
from jaxlm.data.batches.order import Order, check_fingerprint
from jaxlm.devices import processes
from jaxlm.devices.processes import from_first, say, together
from jaxlm.eval import harness, samples
from jaxlm.host import console
from jaxlm.plan import accelerators, settle
from jaxlm.plan.tune import machines, tune
from jaxlm.run import ledger, metrics, receipt, signals, spent, supervised, workdir
from jaxlm.run.checkpoints import keep, meta, store
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.run.clock import COMPILE, EVALUATE, MIRROR, RESTORE, SAVE, Clock, Pulse
from jaxlm.run.metrics import Scores
from jaxlm.run.survive import farewell, notify
from jaxlm.step.objectives.base import Variables
from jaxlm.step.state import TrainState
from jaxlm.train import announcement, average, hooks, loop, outlook, phases, profile, stability, start, watches
from jaxlm.train.loop import Every, Hook, Watch
from jaxlm.train.origin import check_base

EXIT_CODES = {loop.DONE: 0, loop.FAILED: 1, loop.REFUSED: 2, loop.STOPPED: 3, loop.PREEMPTED: 4}


def run(config: Config, kind: Kind) -> int:
    """Trains to `train.steps`; returns the exit code."""
    older.check_trains(config)
    pulse = Pulse.of_parent()
    clock = Clock(pulse=pulse, since=spent.begun())
    with contextlib.ExitStack() as stack:
        opened, log = _open(config, kind, clock, stack)
        stop = signals.StopSignal(lambda: clock.activity)
        while True:
            ending = Attempt(opened, clock, log, stop).run()
            if ending.code != loop.ROLL_BACK:
                break
            ended = {"step": clock.step, "code": 3, "why": ending.why, "cause": ending.cause}
            together(functools.partial(ledger.end, opened.folder, **ended), first_only=True)
            if stop.alone():
                ending = loop.Ending(loop.PREEMPTED, ending.why)
                break
            # All but the clock, its log and the checkpoints stays open: a rollback needs no new lock, data or program.
            clock = Clock(pulse=pulse, since=time.monotonic())
            log = start.Log(opened.folder, clock, config.train, config.hardware)
        if ending.code == loop.PREEMPTED and not ending.why and supervised.orphaned():
            ending = dataclasses.replace(ending, why="the supervisor was gone")
        if ending.cause == loop.MOVED:
            say(ending.why)
        else:
            _conclude(opened, ending, clock)
    return EXIT_CODES[ending.code]


def _open(config: Config, kind: Kind, clock: Clock, stack: contextlib.ExitStack) -> tuple[Opened, start.Log]:
    """Locks the run's folder, settles the config and opens the data. Also opens the log of the first attempt."""
    # The order is by the cost of a refusal: first the checks that cost nothing, last what builds data or compiles.
    mesh = processes.start(config.hardware, config.distributed, config.mesh, config.model.dtype)
    settled = settle.on_platform(config, jax.devices()[0].platform)
    folder = together(lambda: workdir.workdir(config.workdir))
    if held := together(lambda: ledger.lock(folder), first_only=True):
        stack.callback(held.close)
        console.keep(folder / console.LOG)
    scores = Scores(config.checkpoint)
    with clock.spend(MIRROR):  # restores the folder if it was lost
        alive = functools.partial(clock.begin, MIRROR)
        mirror = together(lambda: farewell.open_mirror(config, folder, scores, alive), first_only=True)
    together(lambda: workdir.check(settled.runs, mesh))
    if not from_first(lambda: workdir.has_checkpoints(folder)):
        together(lambda: tune.check_room(settled.runs, mesh))
    together(lambda: accelerators.check_price(settled.runs, mesh.devices.flat[0].device_kind, mesh.size))
    settled = settled.as_begun(folder)
    scores.take(*from_first(lambda: scores.read(folder).pairs()))
    asked_for = harness.find(settled.runs.eval)
    log = start.Log(folder, clock, config.train, config.hardware)
    stack.push(log.closed_by)
    data = kind.data(settled.runs)
    with clock.spend(RESTORE, str(folder / "checkpoints")):
        together(lambda: workdir.check_same_batches(folder, data.fingerprint(), data.data.as_before))
    together(lambda: pages.of_data(settled.runs), first_only=True)
    settled = settled.with_vocabulary(data.data.vocab_size)
    begun = functools.partial(from_first, lambda: workdir.has_checkpoints(folder))
    with clock.spend(COMPILE):
        settled = dataclasses.replace(settled, runs=tune.fit(settled.runs, mesh, say, kind.parts, begun))
    ready = Ready(settled.runs, kind.parts(settled.runs, mesh), data, asked_for)
    return Opened(kind, settled, folder, ready, tune.Once(ready.parts), scores, mirror), log


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One attempt at a run, with its clock and log: from the newest good checkpoint to the next ending, perhaps a rollback."""

    opened: Opened
    clock: Clock
    log: start.Log
    stop: signals.StopSignal

    def run(self) -> loop.Ending:
        """Trains until an ending. A ROLL_BACK is then in run.json, and the next attempt skips its batches."""
        o, c, kind = self.opened, self.opened.settled.runs, self.opened.kind
        with contextlib.ExitStack() as stack:  # what is opened first is closed last
            log = stack.enter_context(self.log)
            bill = phases.Phases(c, o.folder, log.spent)
            link = receipt.Chain(o.folder, o.ready.data.data.sha256).link
            options = {"pinned": bill.milestones, "mirror": o.mirror, "saved": link, "stopping": self.stop.asked}
            checkpointer = Checkpointer(o.folder / "checkpoints", c.checkpoint, scores=o.scores, **options)
            stack.callback(checkpointer.close)  # a save in flight is finished, even if the loop failed
            if ending := bill.begin() or stability.held_back(self._rollbacks(), c):
                return ending
            checkpointer.prepare(o.ready.parts.abstract, c.train.steps)
            with self.clock.spend(RESTORE, str(checkpointer.directory)):
                ready, state, frozen = self._restore(checkpointer)
            with self.clock.spend(EVALUATE, "the reference"):
                ready = kind.begin(ready, state, frozen)
            done = int(state.step)
            stale = o.mirror and o.mirror.latest() != done
            if stale and (done == 0 or checkpointer.verified(done)):
                o.mirror.roll_back(done)
            program = o.program(done)
            doing, watching = self._hooks_and_watches(ready, checkpointer, bill, stack)
            owed = hooks.owed(doing, done, c.train.steps)
            if done >= c.train.steps and not owed:
                why = f"complete: {o.folder} is at step {done} of {c.train.steps}; raise config.train.steps to continue"
                return loop.Ending(loop.DONE, why)
            if done < c.train.steps:
                profile.check(c.profile, done + 1)
            batches = kind.batches(ready, done, self._no_batch)
            stack.callback(batches.close)
            mesh, data, make_room = ready.parts.mesh, ready.data.data, checkpointer.reserve.free
            recorder = log.begin(o.settled, data, mesh, done, o.scores, (doing, watching), make_room)
            tokens, passes = data.token_counts("train"), ready.data.passes(c.train.steps)
            for line in announcement.lines(ready.parts, tokens, passes, program, done, kind.trained):
                say(line)
            inner = (frozen, batches, doing, watching, recorder, self.clock, self.stop, owed)
            options = c, mesh, ready.parts.shardings, done
            train_step = program and average.following(program.step, *options)
            state, ending = loop.run(loop.Run(mesh, c.train.steps, train_step, *inner), state)
            self.clock.begin(SAVE, "the last checkpoint")  # until all is closed
            ending = self._ended(ending, int(state.step), ready.data, checkpointer)
            with self.stop:  # a signal must not cost the save in flight
                stack.pop_all().close()
            return ending

    def _hooks_and_watches(
        self, ready: Ready, checkpointer: Checkpointer, bill: phases.Phases, stack: contextlib.ExitStack
    ) -> tuple[list[Hook], list[Watch]]:
        """Returns the hooks and the watches in their order. `stack` closes the files that they open."""
        opened, clock, c, ends = self.opened, self.clock, ready.config, bill.milestones
        kind, folder, scores = opened.kind, opened.folder, opened.scores
        model, data, mesh, order = ready.parts.model, ready.data.data, ready.parts.mesh, ready.data
        # Overfit gets the training loss as a watch, and the held-out loss from the hook HeldOut.
        overfit = stability.Overfit(c.stability.overfit_evals, order.switch())
        sample = together(lambda: samples.make(c.sample, c.seed, model, data, folder)) if c.sample.prompts else None
        held_out, remark = bill.checked(kind.held_out(ready)), kind.remark(ready)
        trace = stack.enter_context(profile.Trace(c.profile.window, folder / "profile"))
        ask = harness.make(ready.benchmarks, c, model, data, mesh, folder)
        rows = folder / "metrics.jsonl"
        measured = {*from_first(lambda: [*metrics.benchmarked(rows, ledger.read(folder)["rollbacks"])])}
        look, chooses = outlook.of_run(folder, c), c.checkpoint.best_metric.startswith("samples/")
        about, alive = meta.of_run(c, order, ready.base), functools.partial(clock.begin, SAVE, "room on the disk")
        often, failures, usd_per_hour = c.train.eval_every_steps, c.plan.preemptions_per_day, c.hardware.usd_per_hour
        at_start, sampled = {0} if c.eval.at_start else set(), Every(c.sample.every_steps, {*c.sample.at_steps, *ends})
        # Saving comes first, so that nothing is lost if a later hook fails; the bill after the hooks whose figures it reads.
        between = [
            trace,
            hooks.Save(checkpointer, c.checkpoint, failures, about, ends, scores.missing, alive),
            hooks.HeldOut(held_out, Every(often, ends | at_start), scores.losses, overfit.evaluated, remark),
            hooks.Benchmarks(ask, Every(c.eval.tasks_every_steps, ends), measured),
            hooks.Sample(sample, sampled, folder / "samples", remark, chooses),
            outlook.StopByForecast(look, c.stop, often),
            outlook.Report(look, c.stop, ends),
            bill,
            pages.Shown(c, folder, opened.mirror, Every(often, ends, end=False)),
            trace.begin,
        ]
        between = [hooks.Here(checkpointer.moved, between), *between]
        tell = stability.teller(folder / "spikes.jsonl", order.places, order.batch_number, say)
        beats = [notify.Heartbeat(c.notify)] if jax.process_index() == 0 else []
        return between, [  # the first one that ends the run counts
            watches.SaveInFlight(checkpointer, c.checkpoint, usd_per_hour, self.stop.ask),
            stability.NonFinite(c.train.max_nonfinite_steps, c.stability, checkpointer.hold),
            stability.Spikes(c.stability, tell, checkpointer.hold, order.switch()),
            overfit,
            *kind.watches(ready),
            *beats,
            announcement.FirstRate(clock, between, c.train.steps, bill.spent, usd_per_hour, say),
        ]

    def _rollbacks(self) -> list[dict]:
        return from_first(lambda: ledger.read(self.opened.folder)["rollbacks"])

    def _no_batch(self, error: Exception) -> None:
        self.stop.ask(loop.failure("no batch", self.clock.step + 1, error))

    def _restore(self, checkpointer: Checkpointer) -> tuple[Ready, TrainState, Variables]:
        """Returns (ready, state, frozen variables) of the newest good checkpoint; without a checkpoint, of the origin."""
        kind, ready, parts = self.opened.kind, self.opened.ready, self.opened.ready.parts
        rollbacks, where = self._rollbacks(), checkpointer.directory
        for step in from_first(lambda: stability.spoiled(store.read_metas(where, checkpointer.steps()), rollbacks)):
            checkpointer.set_aside(step)
        # A checkpoint has all trained variables: only frozen ones, and a reference, are read from the origin again.
        begun = from_first(lambda: keep.begun(where))
        origin = kind.origin(ready.config) if kind.keeps_origin or not begun else None
        base = from_first(origin.identity) if kind.keeps_origin else {}
        with self.clock.spend(COMPILE):  # before anything takes memory
            self.opened.program(from_first(lambda: max(checkpointer.steps(), default=0)))
        if begun:
            state, saved = checkpointer.restore_latest(parts.abstract, parts.shardings, ("config", "fingerprint"))
            now = ready.data.fingerprint()
            check_fingerprint(saved["fingerprint"], now, int(state.step), saved.get("passed_over", ()))
            check_base(saved.get("base", {}), base, self.opened.folder)
            frozen = parts.load_frozen(origin)
        elif ready.config.origin_state:
            state, frozen, saved = origin.branch(parts, ready.data)
        else:
            (state, frozen), saved = parts.create(origin), {}
            state = checkpointer.with_moments(state)
        data = self._pass_over(int(state.step), saved.get("passed_over", ()), [r["batches"] for r in rollbacks])
        state = state if ready.config.checkpoint.average else dataclasses.replace(state, average={})
        return dataclasses.replace(ready, data=data, base=base), state, frozen

    def _pass_over(self, done: int, saved: list, spoiled: list) -> Order:
        """Returns the data without the batches that rollbacks and `stability.skip` skip; says which, and updates run.json."""
        data, skipped = self.opened.ready.data, self.opened.settled.runs.stability.windows
        windows, late = stability.passed_over(saved, [*spoiled, *skipped], data.passing_over(saved).batch_number(done))
        for first, last in late:
            say(f"batches {first} to {last} are not skipped: the checkpoint of step {done} was trained on them")
        if set(skipped) & set(windows):
            say("batches skipped: " + ", ".join(f"{first} to {last}" for first, last in windows))
        data = data.passing_over(windows)
        put = functools.partial(ledger.put, self.opened.folder, "passed_over", [list(w) for w in data.passed_over])
        together(put, first_only=True)
        return data

    def _ended(self, ending: loop.Ending, step: int, data: Order, checkpointer: Checkpointer) -> loop.Ending:
        """Writes a ROLL_BACK into run.json. Returns the ending; STOPPED if another rollback would not help."""
        if ending.code != loop.ROLL_BACK:
            return ending
        c, folder, saved = self.opened.settled.runs, self.opened.folder, checkpointer.steps()
        batches = [data.batch_number(ending.first_bad), data.batch_number(step)]
        if why := from_first(lambda: stability.carry_out(folder, ending, step, batches, saved, stability.settings(c))):
            return dataclasses.replace(ending, code=loop.STOPPED, why=why)
        self.opened.scores.forget(ending.first_bad)
        return ending


def _conclude(opened: Opened, ending: loop.Ending, clock: Clock) -> None:
    c, folder, mirror = opened.settled.runs, opened.folder, opened.mirror

    def write_down() -> None:
        why = ending.why or ending.code
        ledger.end(folder, step=clock.step, code=EXIT_CODES[ending.code], why=why, cause=ending.cause)
        pages.of_run(c, folder)

    clock.begin(EVALUATE, "the report")  # the state is saved: no supervisor must say that it waits for a save
    together(write_down, first_only=True)
    _say_ending(ending, folder, c.program, all_done=clock.step == c.train.steps and not ending.why)  # `why`: a rollback
    with clock.spend(MIRROR):
        timeout_s = c.checkpoint.mirror_timeout_s
        together(lambda: mirror and ledger.note(folder, mirrored=mirror.close(timeout_s)), first_only=True)
    if ending.code == loop.DONE and jax.process_index() == 0:
        _record_speed(c, opened.ready.parts.mesh, folder)


def _record_speed(config: Config, mesh: jax.sharding.Mesh, folder: pathlib.Path) -> None:
    """Records the speed of this machine for `jaxlm doctor`: the median of the logged speeds."""
    with contextlib.suppress(OSError):  # the run is done: an error here must not change the exit code
        if step_s := metrics.step_s(folder / "metrics.jsonl", config):
            speed, key = config.train.batch_size * config.train.seq_len / step_s, machines.key(config, mesh.shape)
            machines.record(jax.devices()[0].device_kind, mesh.size, key, speed, "train")


def _say_ending(ending: loop.Ending, folder: pathlib.Path, program: str, all_done: bool) -> None:
    if ending.why:
        say(ending.why)
    saved = "all steps are done and saved, but not measured to the end" if all_done else "the state is saved"
    words = f"interrupted, {saved}" if ending.code == loop.PREEMPTED else ending.code
    goes_on = ending.code in (loop.PREEMPTED, loop.FAILED)
    say(f"{words}: {folder}" + ("; the same command goes on" if goes_on else ""))
    for line in pages.to_open(folder) if not goes_on else ():
        say(line)
    if ending.code == loop.DONE:
        say(f"next: {outlook.next_command(program, folder)}")
