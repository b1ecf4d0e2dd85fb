"""Faults inside the processes of a run. Python imports this at its start, because the harness puts the folder on PYTHONPATH.

INSIDE names a file of JSON, which may change while the run goes on:

    hold        no batch is given out for a step above this one
    settle      true: no batch is given out while a checkpoint is being saved or read back, for five seconds at most, so
                that none is skipped, however fast the steps are
    spoil       [[first, last, kind], ...]: batches, by number in the order; "nan": the loss is NaN; "far": words that
                the model has never seen, a spike
    few         true: batches are made in one thread, one ahead
    unverified  true: nothing that was written is ever compared with what was saved, for the test of the tests
    held_out    "hangs": the measurement of the held-out loss waits; "EIO": it fails
    crash       the process is ended by SIGKILL when it asks for the batch of the step after this one

It wraps public functions of jaxlm once their module is imported, and imports nothing by itself.
"""

import errno
import importlib.abc
import importlib.machinery
import json
import os
import pathlib
import signal
import sys
import threading
import time


def now(key: str, default=None):
    """What INSIDE says now."""
    return json.loads(pathlib.Path(os.environ["INSIDE"]).read_text()).get(key, default)


def settle(left: set[str]) -> None:
    """Waits until no thread saves or verifies a checkpoint, five seconds at most; adds to `left` those that still do."""
    end = time.monotonic() + 5
    while names := {t.name for t in threading.enumerate() if t.name.startswith("save ")} - left:
        if time.monotonic() > end:
            left |= names
        time.sleep(0.01)


def hold_batches(module) -> None:
    """`LoaderBatches` gives no batch for a step above `hold`."""
    give = module.LoaderBatches.__call__

    def held(self, state):
        # Counted, since to read the state would wait for the device.
        self.step = self.step + 1 if hasattr(self, "step") else int(state.step)
        step = self.step
        if now("settle"):
            settle(self.__dict__.setdefault("left", set()))
        while (last := now("hold")) is not None and step >= last:
            time.sleep(0.01)
        if now("crash") == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return give(self, state)

    module.LoaderBatches.__call__ = held


def stop_evaluations(module) -> None:
    """`HeldOut` waits or fails, as `held_out` says."""
    measure = module.HeldOut.__call__

    def stopped(self, moment):
        while now("held_out") == "hangs":
            time.sleep(0.01)
        if now("held_out") == "EIO":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return measure(self, moment)

    module.HeldOut.__call__ = stopped


def spoil_batches(module) -> None:
    """`Rows` spoils the batches that `spoil` names."""
    give = module.Rows.batch

    def spoiled(self, item, rows=None):
        batch, number = give(self, item, rows), self.batch_number(item + 1)
        for first, last, kind in now("spoil"):
            if first <= number <= last:
                if kind == "nan":
                    batch["weights"] = batch["weights"] * float("nan")
                else:
                    batch["targets"] = batch["targets"] * 0 + 380
        return batch

    module.Rows.batch = spoiled


def read_few_ahead(module) -> None:
    """`TrainLoader` has one thread, which is one batch ahead."""
    module.TrainLoader.__init__.__kwdefaults__ |= {"num_threads": 1, "prefetch": 1}


def believe_all(module) -> None:
    """What reads back, hashes or compares finds nothing."""
    if module.__name__ == "jaxlm.data.shards.verify":
        module.Verifier.check = lambda self, entry: None
        module.Verifier.content = lambda self, entry: (self._root / str(entry["file"])).read_bytes()
    elif module.__name__ == "jaxlm.run.checkpoints.digest":
        module.differing = lambda items, saved: []
    elif module.__name__ == "jaxlm.run.checkpoints.meta":
        module.read = lambda folder, *options: json.loads((folder / "meta/metadata").read_bytes())
    else:
        module.read_back = lambda folder, digests, go_on=None: ""
        module.differing = lambda *args, **options: None


PATCHES = {
    "jaxlm.train.batches": [hold_batches],
    "jaxlm.train.hooks": [stop_evaluations],
    "jaxlm.data.batches.document_rows": [],
}


if os.environ.get("INSIDE"):
    if now("few"):
        PATCHES["jaxlm.data.batches.loader"] = [read_few_ahead]
    if now("spoil"):
        PATCHES["jaxlm.data.batches.document_rows"].append(spoil_batches)
    if now("unverified"):
        checkpoints = "jaxlm.run.checkpoints"
        for name in (
            f"{checkpoints}.verify",
            f"{checkpoints}.digest",
            f"{checkpoints}.meta",
            "jaxlm.data.shards.verify",
        ):
            PATCHES[name] = [believe_all]


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules to wrap as Python does, and wraps them when they were run."""

    def find_spec(self, name, path=None, target=None):
        """The module's own spec, with a loader that wraps the module."""
        if not PATCHES.get(name):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def run_and_wrap(module):
            run(module)
            for patch in PATCHES[name]:
                patch(module)

        spec.loader.exec_module = run_and_wrap
        return spec


if os.environ.get("INSIDE"):
    sys.meta_path.insert(0, Finder())
