"""HumanEval (arXiv:2107.03374): the model completes Python functions, and their tests run in a sandbox.

Every program runs in its own interpreter with a clean environment, an empty temporary folder and closed standard input.
On Linux host/sandbox_child.py confines it (seccomp, Landlock), on macOS `sandbox-exec`. A program passes if its process
writes a random token after the program's last line, so that a program that ends early fails. A program could still find the
token in its own frames: the sandbox guards against accidents and mischief, not against an attack on the score.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import platform
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from jaxlm.config import ConfigError, EvalConfig, RunError, optional
from jaxlm.corpus.benchmarks import reading
from jaxlm.data.tokenizer.ids import document
from jaxlm.eval import completions
from jaxlm.eval.likelihood import Scorer
from jaxlm.eval.results import Item, TaskResult, means, spread
from jaxlm.host import console, files, sandbox_child

# lm-evaluation-harness's own task is not used: on import it downloads its scorer from the hub.
DATASET = "openai/openai_humaneval"
_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # those of lm-evaluation-harness
_NEW_TOKENS = 1024
_MOST = 300  # bytes kept of a program's error
_START_S = 60.0  # for an interpreter to start: this machine may be busy
_PATIENCE = 4  # wall-clock limit, in multiples of the limit on CPU time
_MAC = "(version 1)(allow default)(deny network*)(deny process-fork)(deny file-write*)"
_PROBE = """
import socket
try:
    socket.create_connection(("127.0.0.1", {port}), 2)
except OSError:
    pass
else:
    raise SystemExit(1)
"""


def check(part: str, settings: EvalConfig) -> None:
    if part:
        raise ConfigError(f"humaneval has no parts: --tasks=humaneval, not humaneval:{part}")
    if settings.data_dir:
        read(settings.data_dir)
    run("pass", settings)


def evaluate(scorer: Scorer, part: str, settings: EvalConfig, items: int) -> list[TaskResult]:
    """Returns one result, with pass@1: the share of problems whose tests pass with the model's greedy completion."""
    problems = read(settings.data_dir)
    problems = [problems[number] for number in spread(len(problems), items)]
    prompts = [document(scorer.tokenizer, problem["prompt"]) for problem in problems]
    drawing, what = completions.greedy(_NEW_TOKENS), "writing programs"
    texts = completions.complete(scorer, prompts, _STOPS, drawing, what, follows=True)
    return [grade(problems, texts, settings)]


def grade(problems: Sequence[dict], texts: Sequence[str], settings: EvalConfig) -> TaskResult:
    """Returns the result of running the problems' tests on completions. Raises ConfigError if `eval.run_code` is False."""
    programs = [program_of(problem, text) for problem, text in zip(problems, texts, strict=True)]
    items = []
    for problem, text, outcome in zip(problems, texts, run_all(programs, settings), strict=True):
        detail = {"question": problem["prompt"], "answer": text, "why": outcome.why}
        items.append(Item(problem["task_id"], {"pass_at_1": float(outcome.passed)}, detail))
    return TaskResult("humaneval", *means(items), None, 0, items)


def read(data_dir: str) -> list[dict]:
    """Returns the problems in a folder laid out as the hub is, or on the hub if "". Raises ConfigError if there are none."""
    if not data_dir:
        return _from_hub()
    root = pathlib.Path(data_dir).expanduser()
    folder = root / DATASET
    for path in (*sorted(folder.rglob("*.jsonl*")), *sorted(root.glob("HumanEval.jsonl*"))):
        rows = [row for _, row in reading.records(str(path))]
        if rows and {"task_id", "prompt", "test", "entry_point"} <= rows[0].keys():
            return rows
        raise ConfigError(f"{path} does not hold HumanEval: no task_id, prompt, test and entry_point")
    raise ConfigError(
        f"humaneval reads {DATASET}, and eval.data_dir={data_dir} lacks it: copy it there (scripts/hub_layout.py does)"
    )


def _from_hub() -> list[dict]:
    datasets = optional("datasets", "humaneval needs the hub's datasets", "eval")
    try:
        return list(datasets.load_dataset(DATASET, split="test"))
    except (OSError, ValueError, RuntimeError) as error:
        raise RunError(f"humaneval: can't fetch {DATASET} from https://huggingface.co: {error}") from error


# The sandbox


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Whether a program ran to its end; if not, `why`: its exception or "took over 10 s". `started`: False if it never ran."""

    passed: bool
    why: str
    started: bool = True


@dataclasses.dataclass(frozen=True)
class _Way:
    """A way to cut off the network: its name, a command that runs the program without network, a seccomp filter."""

    name: str
    command: tuple[str, ...] = ()
    rules: bytes = b""


def run(program: str, config: EvalConfig) -> Outcome:
    """Returns the outcome of one Python program, as `run_all`. Raises RunError if the program did not start."""
    (outcome,) = run_all([program], config)
    if not outcome.started:
        raise RunError(f"a program {outcome.why}")
    return outcome


def run_all(programs: Sequence[str], config: EvalConfig) -> list[Outcome]:
    """Returns the outcome of each program, in order. `files.cores` programs run at a time, one on each core.

    A program whose process does not start is tried once more. If that fails too, it counts as failed, and a line says so.

    Raises ConfigError if `eval.run_code` is False, or the network can't be cut off here and `eval.run_code_with_network` is
    False.
    """
    if not config.run_code:
        raise ConfigError("this runs programs that a model wrote: --config.eval.run_code=True allows it")
    chosen = way()
    if chosen is None and not config.run_code_with_network:
        raise ConfigError(
            f"eval.run_code: the network can't be cut off from programs here ({platform.system()} {platform.machine()}); "
            "eval.run_code_with_network=True runs them with network: use it in a virtual machine only"
        )
    limits = (config.code_seconds, config.code_memory_mb)
    _announce(chosen, *limits)
    with (
        console.working("running what the model wrote", len(programs), "programs", end=False) as tell,
        concurrent.futures.ThreadPoolExecutor(files.cores()) as pool,
    ):
        futures = [pool.submit(_try, program, chosen or _Way(""), *limits) for program in programs]
        try:
            outcomes = list(console.told((f.result() for f in futures), tell))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    if late := [outcome.why for outcome in outcomes if not outcome.started]:
        console.say(f"{len(late):,} of {len(programs):,} programs never ran and count as failed; the first {late[0]}")
    return outcomes


def program_of(problem: dict[str, str], completion: str) -> str:
    return f"{problem['prompt']}{completion}\n{problem['test']}\ncheck({problem['entry_point']})"


@functools.cache
def way() -> _Way | None:
    """Returns a way to cut programs off from the network here, checked by a trial; None if there is none."""
    tried = _Way("seccomp", rules=sandbox_child.rules())
    if platform.system() == "Darwin":
        tried = _Way("sandbox-exec", ("sandbox-exec", "-p", _MAC))
    if not (tried.rules or tried.command):
        return None
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.suppress(OSError):
        if _try(_PROBE.format(port=server.getsockname()[1]), tried, 60.0, 1024.0).passed:
            return tried
    return None


@functools.cache
def _announce(way: _Way | None, seconds: float, memory_mb: float) -> None:
    network = f"without network ({way.name})" if way else "WITH network"
    if way and way.rules and not sandbox_child.has_landlock():
        network += " but WITH all files to read (this kernel has no Landlock)"
    console.say(
        f"the model's programs run {network}, each with at most {seconds:g} s of CPU time and {memory_mb:,.0f} MB"
    )


def _try(program: str, way: _Way, seconds: float, memory_mb: float) -> Outcome:
    for _ in range(2):
        try:
            outcome = _run(program, way, seconds, memory_mb)
        except OSError as error:  # no process, or no temporary folder
            outcome = Outcome(False, f"did not start: {error}", started=False)
        if outcome.started:
            break
    return outcome


def _run(program: str, way: _Way, seconds: float, memory_mb: float) -> Outcome:
    """Returns the outcome of one program, run in its own process; kills the process's whole group afterwards."""
    token, (read, write) = secrets.token_hex(16), os.pipe()
    order = {
        "program": program, "token": token, "fd": write, "most": _MOST, "seconds": seconds,
        "memory": int(memory_mb * 2**20), "filter": way.rules.hex(),
        "readable": [".", *sandbox_child.readable()],
    }  # fmt: skip
    script = str(pathlib.Path(sandbox_child.__file__).resolve())
    # -X utf8 and no locale: the same text encoding everywhere. -S: the standard library alone.
    command = [*way.command, sys.executable, "-I", "-S", "-B", "-X", "utf8", script]
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, read)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxlm-program-", ignore_cleanup_errors=True))
        orders = stack.enter_context(tempfile.TemporaryFile())
        orders.write(json.dumps(order).encode())
        orders.seek(0)
        try:
            child = subprocess.Popen(
                command, cwd=folder, env={"OMP_NUM_THREADS": "1"}, stdin=orders, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, pass_fds=(write,), start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(write)
        output, late = "", False
        try:
            output = _until_ready(read, _START_S)
            if sandbox_child.READY in output:
                child.wait(_PATIENCE * seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(child)
        os.set_blocking(read, False)
        with contextlib.suppress(BlockingIOError):
            output += os.read(read, 2 * _MOST).decode(errors="replace")
    return _outcome(output, token, child.returncode, late, seconds)


def _until_ready(fd: int, seconds: float) -> str:
    output, end = "", time.monotonic() + seconds
    while sandbox_child.READY not in output and select.select([fd], [], [], max(0.0, end - time.monotonic()))[0]:
        if not (more := os.read(fd, 2 * _MOST)):
            break
        output += more.decode(errors="replace")
    return output


def _end(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has ended
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _outcome(output: str, token: str, code: int, late: bool, seconds: float) -> Outcome:
    started, ready, why = output.partition(sandbox_child.READY)
    if not ready:
        early = f"ended before its first line (exit code {code}) {started}".rstrip()
        why = f"did not come to its first line in {_START_S:g} s" if code == -signal.SIGKILL else early
        return Outcome(False, why, started=False)
    if code == -signal.SIGXCPU:
        return Outcome(False, f"took over {seconds:g} s")
    if late:
        return Outcome(False, f"took over {_PATIENCE * seconds:g} s by the clock")
    if why == token and code == 0:
        return Outcome(True, "")
    if code < 0:
        return Outcome(False, f"was ended by signal {-code}")
    return Outcome(False, why or "ended before its last line")
