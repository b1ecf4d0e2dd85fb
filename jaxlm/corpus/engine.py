"""Runs the tasks of a phase with datatrove's executors: on this machine, on a Ray cluster or under Slurm.

A finished task leaves a mark in `folder/tasks/PHASE/completions`, so that after a crash the same command does the rest.
"""

import concurrent.futures
import contextlib
import ctypes
import importlib
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import threading
import typing

import pyarrow as pa
from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from jaxlm.config import ConfigError, PrepareConfig, RunError, optional
from jaxlm.corpus import tally
from jaxlm.host import console, files


class Task(PipelineStep):
    """A datatrove step that calls `module.function(folder, task)`, and writes a note if that raises an error."""

    type, name = "jaxlm", "task"

    def __init__(self, function: str, folder: str, phase: str):
        super().__init__()
        self.function, self.folder, self.phase = function, folder, phase

    def run(self, data: typing.Any, rank: int = 0, world_size: int = 1) -> typing.Iterator[typing.Any]:
        module, _, name = self.function.rpartition(".")
        note = pathlib.Path(self.folder, "tasks", self.phase, f"failed-{rank:05d}")
        note.unlink(missing_ok=True)
        try:
            getattr(importlib.import_module(module), name)(pathlib.Path(self.folder), rank)
        except Exception as error:
            note.write_text(_in_short(error), encoding="utf-8")
            raise
        pa.default_memory_pool().release_unused()  # the next task may need no table
        yield from ()


_WORKER_GB = 1  # in addition to prepare.memory_gb
_LOOK_S = 0.5
_FEW_TASKS = 100  # more tasks are looked at less often, to spare a shared disk
_LOOK_AT_MANY_S = 10.0
_KILLED = "a worker was killed, perhaps for memory: then lower prepare.workers or prepare.task_mb"


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def run(engine: str, settings: PrepareConfig, folder: pathlib.Path, phase: str, function: str, tasks: int) -> None:
    """Runs `function` ("package.module.name") for the tasks 0 .. tasks-1 that are not done. Raises RunError if some failed."""
    place = folder / "tasks" / phase
    place.mkdir(parents=True, exist_ok=True)
    logger.remove()  # datatrove logs to stderr; its files in tasks/PHASE/logs have the same
    step = Task(function, str(folder.resolve()), phase)
    executor = _EXECUTORS[engine](settings, [step], tasks, str(place.resolve()))
    problem = ""
    try:
        with _shown(place, phase, tasks):
            executor.run()
    except (ConfigError, RunError, KeyboardInterrupt):
        raise
    except Exception as error:  # of any kind: the tasks that are not done decide
        problem = _KILLED if isinstance(error, concurrent.futures.BrokenExecutor) else _in_short(error)
    left = executor.get_incomplete_ranks(skip_completed=True)
    if left:
        notes = [note for task in left if (note := place / f"failed-{task:05d}").exists()]
        failed = [int(note.name.removeprefix("failed-")) for note in notes] or left
        # A note is empty where the disk was too full to write it.
        why = (notes and notes[0].read_text(encoding="utf-8")) or problem or "it ended without a message"
        names = ", ".join(map(str, failed[:5])) + (f" and {len(failed) - 5} more" if len(failed) > 5 else "")
        raise RunError(
            f"{phase}: task {names} of {tasks} failed ({why}); its log is {place / 'logs' / f'task_{failed[0]:05d}.log'}; "
            "fix this and run the same command again: finished tasks are kept"
        )


@contextlib.contextmanager
def _shown(place: pathlib.Path, phase: str, tasks: int) -> typing.Iterator[None]:
    """Shows how many tasks are done and how many documents were read, by the files in the phase's folder."""
    ended, pause = threading.Event(), _LOOK_S if tasks <= _FEW_TASKS else _LOOK_AT_MANY_S
    with console.working(phase, tasks, "tasks", end=False) as tell:

        def look() -> None:
            while not ended.wait(pause):
                with contextlib.suppress(OSError):
                    documents, parts = tally.progress(place)
                    done = max(sum(1 for _ in (place / "completions").glob("*")), parts)
                    named = f", {console.count(documents)} documents" if documents > 1 else ""
                    percent = 100 * done / tasks
                    tell(done * (percent >= 1), f"{int(percent)}%{named}")  # the time left is no guess from nothing

        threading.Thread(target=look, daemon=True).start()
        try:
            yield
        finally:
            ended.set()


class _LocalExecutor(PipelineExecutor):
    """datatrove's local executor, on a pool that notices when a worker is killed (multiprocess.Pool waits for ever)."""

    def __init__(self, settings: PrepareConfig, pipeline: list, tasks: int, logging_dir: str):
        super().__init__(pipeline, logging_dir)
        self.tasks, self.workers = tasks, settings.workers or files.cores()

    @property
    def world_size(self) -> int:
        return self.tasks

    def get_distributed_env(self, node_rank: int = -1) -> dict[str, str]:
        names = ("node_ips", "cpus_per_task", "mem_per_cpu", "gpus_on_node", "executor")
        return dict(zip((f"datatrove_{name}" for name in names), ("localhost", "-1", "-1", "-1", "LOCAL"), strict=True))

    def run(self) -> None:
        ranks = self.get_incomplete_ranks()
        if min(self.workers, len(ranks)) <= 1:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):  # in the task's log too
                for rank in ranks:
                    self._run_for_rank(rank, 1)
            return
        with worker_processes(self.workers) as pool:
            waiting = [pool.submit(self._run_for_rank, rank, 1) for rank in ranks]
            try:
                for done in concurrent.futures.as_completed(waiting):
                    done.result()
            except BaseException:
                _close()
                raise


_pool: concurrent.futures.ProcessPoolExecutor | None = None


@contextlib.contextmanager
def worker_processes(count: int) -> typing.Iterator[concurrent.futures.Executor]:
    """A context that gives the worker processes of the `with` block around it, else `count` new ones.

    Each takes a second to start, so they are kept until the outermost block ends, also on ctrl-C.
    """
    global _pool
    own = _pool is None
    if own:
        context = multiprocessing.get_context("spawn")  # the parent may have threads: JAX's, Arrow's
        _pool = concurrent.futures.ProcessPoolExecutor(count, context, initializer=_begin, initargs=(os.getpid(),))
    try:
        yield _pool
    finally:
        if own:
            _close()


def _close() -> None:
    """Ends the local worker processes at once. A task that was running is done again later."""
    global _pool
    pool, _pool = _pool, None
    if pool:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()


def _begin(parent: int) -> None:
    """Silences datatrove in a worker, leaves ctrl-C to the parent, and ends the worker if its parent dies."""
    sys.stderr = open(os.devnull, "w")  # datatrove's logger would repeat the task's log there
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent died before this took effect
        os._exit(1)
    # Arrow's first conversion of a list looks for pandas, whose import takes 50 MB and a quarter of a second. Only then, since
    # a stage of the user's own may want it.
    sys.meta_path.insert(0, _NoPandas)
    pa.array([0])
    sys.meta_path.remove(_NoPandas)


class _NoPandas:
    @staticmethod
    def find_spec(name: str, *rest: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def _ray(settings: PrepareConfig, pipeline: list, tasks: int, logging_dir: str) -> PipelineExecutor:
    ray = optional("ray", "engine=ray needs Ray", "ray")
    from datatrove.executor.ray import RayPipelineExecutor

    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="ERROR", **_options(settings))
    return RayPipelineExecutor(
        pipeline,
        tasks=tasks,
        workers=settings.workers or -1,
        mem_per_cpu_gb=settings.memory_gb + _WORKER_GB,
        logging_dir=logging_dir,
    )


def _slurm(settings: PrepareConfig, pipeline: list, tasks: int, logging_dir: str) -> PipelineExecutor:
    from datatrove.executor.slurm import SlurmPipelineExecutor

    options = _options(settings)
    try:
        subprocess.run(["sbatch", "--version"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        raise ConfigError("engine=slurm needs sbatch: run this on a login node of the cluster") from None
    executor = SlurmPipelineExecutor(
        pipeline,
        tasks=tasks,
        time=options.pop("time", "24:00:00"),
        partition=options.pop("partition", ""),
        workers=settings.workers or -1,
        mem_per_cpu_gb=max(1, round(settings.memory_gb + _WORKER_GB)),
        job_name="jaxlm-prepare",
        qos=options.pop("qos", ""),
        logging_dir=logging_dir,
        sbatch_args={"wait": "", **options},  # sbatch returns when the job has ended
        requeue=False,
    )
    executor.launch_merge_stats = lambda: None  # our own counts are merged when all tasks are done
    return executor


def _options(settings: PrepareConfig) -> dict[str, str | int]:
    """Returns extra options of `sbatch`, or arguments of `ray.init`, by name."""
    pairs = (word.split("=", 1) for word in settings.engine_options)
    return {name: int(value) if value.isdecimal() else value for name, value in pairs}


_EXECUTORS = {"local": _LocalExecutor, "ray": _ray, "slurm": _slurm}
