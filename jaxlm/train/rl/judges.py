"""The program of a child process: it generates questions, judges answers, calls the user's function. Imports no JAX.

Packages of the extra `rl` are imported when a task needs them.
"""

import ast
import concurrent.futures
import contextlib
import dataclasses
import difflib
import functools
import gc
import importlib
import inspect
import itertools
import json
import logging
import math
import os
import pathlib
import random
import re
import resource
import select
import signal
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxlm.host import files, sandbox_child
from jaxlm.host.errors import pip_install

# Tasks of reasoning-gym that evaluate an answer as Python, by `eval` or by sympy's `parse_expr`.
EVALUATED = {
    *("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"),
    *("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"),
}
_MOST = 4096  # bytes of a result
_PIPE = 3  # the file descriptor of the result in a fork
_WAIT_S = 5.0  # the time limit of a fork's call, which usually takes milliseconds
_MEMORY = 1 << 30  # bytes of address space that a fork may add to this process's
# What an evaluated answer may use of Python, besides the names of sympy.
_PYTHON = {"abs", "float", "int", "join", "len", "list", "max", "min", "pow", "range", "round", "split", "str", "sum"}
_LINE = 300  # characters of an error's line
_LARGEST = 3.4e38  # of float32
_BLOCK = 500  # questions that a task generates at a time, if it can't generate a single one
_MATH_S = 2  # for math-verify to read, and to compare: evaluating an answer such as 9**9**9 never ends
_READ = 2000  # characters of an answer that math-verify reads: the last ones
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# Of an answer such as "(17, 18)", "17 or 18" or "x < 18" math-verify takes one number. These patterns find such clauses.
_N = r"(?>(?:(?<!\d)[-+])?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)"  # atomic: else 1,000,000,... matches for ever
_NUMBER, _GAP, _ENDLESS = re.compile(_N), r"[\s$*]*(?:[A-Za-z]\s*=\s*)?", r"[-+]?(?:oo|inf\w*|\\infty|\u221e)"
_OR = r"[^\d.,;:\n]{0,20},?\s*\bor\b(?:\s*[A-Za-z]+\s)?"
_TO = r"[\s$*]*(?:\b(?:to|through)\b|[\u2013\u2014\u2026\u00b1]|\.\.+|\\(?:pm|cup)\b)"
_ORDER = r"\s*(?:[<>]=?|[\u2264\u2265\u2260]|\\(?:[lg]eq?|neq?|lt|gt)\b)\s*"
_LIST = rf"{_N}(?:[\s$*]*(?:[,;]?\s*\b(?:and|or)\b|[,;]){_GAP}{_N})+"
_SEVERAL = re.compile(
    rf"(?:(?:^|[(\[{{]|\banswers?\s(?:is|are)\b|\bbetween\b){_GAP}{_LIST}|{_N}(?:{_OR}{_GAP}{_N})+"
    rf"|(?<![Ff]rom )(?<![\d.,$*])[$*]*{_N}(?:{_TO}{_GAP}{_N})+|(?P<bound>(?:(?<![<\w/])[A-Za-z]|{_N}){_ORDER}{_N}"
    rf"|{_N}{_ORDER}[A-Za-z]\b|\b(?:not|at (?:least|most))\s+{_N}|{_ENDLESS}\s*,\s*{_N}|{_N}\s*,\s*{_ENDLESS}))[^\d]*$"
    rf"|{_LIST}\W*$|^\s*{_N}(?:\s+{_N})+\W*$"
)
_CLAUSE = re.compile(r"(?<!\.)[.?!](?:\s+|$)|\n(?!\s*[-+$\d.,]+\s*$)")  # what separates clauses
Options = Mapping[str, str]


class Refused(Exception):
    """Bad input from the user, in one line."""


class Wrong(Exception):
    """The user's function returned no valid rewards; the text says why."""


class Forks:
    """Calls functions in forks of this process that can do nothing but compute and return a result.

    A fork takes milliseconds, a new interpreter with its packages seconds. On Linux a fork gives up network, disk and other
    processes before the call (sandbox_child.py), and has no open file but the pipe for its result.

    Attributes:
      confined: True if a fork can reach no network, disk or process, by a test.
    """

    def __init__(self):
        self._readable = [*sandbox_child.readable(), *(path for path in sys.path if path.endswith("-packages"))]
        self._rules = sandbox_child.rules()
        self.confined = self.results([_is_confined]) == [True]
        if not self.confined:
            self._rules = b""

    def results(self, calls: Iterable[Callable[[], object]]) -> list:
        """Returns the result of each call, passed as JSON; for a call without one, a text that says why."""
        with concurrent.futures.ThreadPoolExecutor(files.cores()) as pool:
            return list(pool.map(self._result, calls))

    def _result(self, call: Callable[[], object]) -> object:
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            self._end_with(call, write)
        os.close(write)
        try:
            ended = select.select([read], [], [], _WAIT_S)[0]
            said = os.read(read, _MOST) if ended else b""
        finally:
            os.close(read)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if not ended:
            return f"took over {_WAIT_S:g} s"
        with contextlib.suppress(ValueError):  # the fork wrote nothing, or only a part
            return json.loads(said)
        return "ended before it was judged"

    def _end_with(self, call: Callable[[], object], write: int) -> None:
        try:
            os.dup2(write, _PIPE)
            null = os.open(os.devnull, os.O_RDWR)
            for number in range(_PIPE):
                os.dup2(null, number)
            os.closerange(_PIPE + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            if self._rules:
                pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])  # of this process's addresses
                sandbox_child.limit(2 * _WAIT_S, pages * resource.getpagesize() + _MEMORY)
                sandbox_child.give_up(self._rules, self._readable)
            result = call()
        except BaseException as error:  # SystemExit too
            result = type(error).__name__
        os.write(_PIPE, json.dumps(result).encode()[:_MOST])
        os._exit(0)


def _is_confined() -> bool:
    try:
        os.open(os.devnull, os.O_WRONLY)
    except PermissionError:
        return True
    return False


def only_computes() -> Callable[[str, tuple], None]:
    """Returns an audit hook (`sys.addaudithook`) that refuses code compiled from a text if it does more than compute.

    The code may name what sympy exports, some Python builtins and one-letter variables. So an answer that its task
    evaluates can't name the true answer, which is in a variable of the caller, nor the judge's functions.
    """
    allowed = {"sympy", *importlib.import_module("sympy").__all__, *_PYTHON}

    def hook(event: str, arguments: tuple) -> None:
        if event != "exec" or not arguments[0].co_filename.startswith("<"):
            return
        codes = [arguments[0]]
        for code in codes:
            codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
            if wrong := {name for name in code.co_names if len(name) > 1} - allowed:
                raise PermissionError(f"an answer may not use {min(wrong)}")

    return hook


def final(answer: str) -> str:
    """Returns the part of an answer that is judged: the text in its last <answer>...</answer>, else all, stripped."""
    answers = _ANSWER.findall(answer)
    return (answers[-1] if answers else answer).strip()


class Judge:
    """Holds the tasks and functions that `load` loaded, and carries out orders."""

    def __init__(self):
        self._tasks: list[Gym | None] = []
        self._forks: Forks | None = None
        self._function: Callable | None = None
        self._name = ""
        self._format: re.Pattern | None = None

    def load(self, tasks: Sequence[tuple[str, str, Options]], function: str, form: str, apart: bool = False) -> None:
        """Imports and checks packages and function. Raises Refused if one is missing, or a task can't be confined here.

        Args:
          tasks: (kind, name, options) of each; kind: "reasoning_gym" or "gsm8k".
          apart: True to judge each answer in a fork of this process, so that the packages are imported once.
        """
        try:
            self._tasks = [Gym(name, options) if kind == "reasoning_gym" else None for kind, name, options in tasks]
            if None in self._tasks:
                _import("math_verify", "math-verify", "gsm8k")
                logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # its log would quote unreadable answers
        except Refused as error:
            raise Refused(f"config.reward.tasks: {error}") from None
        self._name = f"config.reward.function={function}"
        try:
            self._function = _found(function) if function else None
        except Refused as error:
            raise Refused(f"{self._name}: {error}") from None
        self._format = re.compile(form, re.DOTALL) if form else None
        if apart:
            self._make_forks()

    def _make_forks(self) -> None:
        self._forks = Forks()
        for gym in self._tasks:
            if gym and gym.hook and not self._forks.confined:
                raise Refused(
                    f"config.reward.tasks: {gym.name} runs what the policy writes as Python, and here nothing keeps that from "
                    "network and disk (Linux on x86-64 or aarch64 does, by a seccomp filter): leave the task out"
                )
            with contextlib.suppress(Exception):  # imports what the task needs to judge, once for all forks
                gym.exact(0, gym.entry(0)["answer"]) if gym else _equal("2", "$1 + 1$")
        gc.collect()
        gc.freeze()  # forks share its memory as long as nobody writes to it

    def takes(self, columns: Sequence[str]) -> None:
        """Raises Refused if the function can't be called with these columns as keywords."""
        try:
            inspect.signature(self._function).bind([], [], **dict.fromkeys(columns))
        except ValueError:  # one written in C shows no signature
            return
        except TypeError as error:
            raise Refused(
                f"{self._name} can't be called with the columns {', '.join(columns) or '(none)'} of the prompts: {error}; "
                "it is called as f(prompts, answers, **columns)"
            ) from None

    def draw(self, wanted: Sequence[tuple[int, int]]) -> list[tuple[str, str | None] | str]:
        """Returns for each (task, number) the question and the true answer (None: several), or a text that says why not."""
        questions = []
        for task, number in wanted:
            try:
                entry = self._tasks[task].entry(number)
                answer = entry["answer"]
                questions.append((str(entry["question"]), None if answer is None else str(answer)))
            except Exception as error:
                questions.append(one_line(error))
        return questions

    def exact(self, answered: Sequence[tuple[int, int | str, str]]) -> list[float | str]:
        """Returns for each (task, question's number or true answer, answer) 1.0, 0.0 or a text: why it can't be judged."""
        calls = [functools.partial(self._judged, *each) for each in answered]
        if not self._forks:
            return [call() for call in calls]
        for task, question, _ in answered:  # once, for all forks
            with contextlib.suppress(Exception):  # which the fork raises again
                self._tasks[task].entry(question) if self._tasks[task] else _truth(question)
        return self._forks.results(calls)

    exact_truth = exact  # for answers that no policy wrote, in the process that draws

    def _judged(self, task: int, question: int | str, answer: str) -> float | str:
        gym = self._tasks[task]
        if self._forks and gym and gym.hook:
            sys.addaudithook(gym.hook)
        try:
            return gym.exact(question, final(answer)) if gym else _equal(question, final(answer))
        except Exception as error:
            return one_line(error)

    def function(self, prompts: list[str], answers: list[str], columns: dict[str, list]) -> list[float]:
        """Returns the function's reward for each answer. Raises Wrong if that is not one finite number each."""
        count = len(answers)  # before the function may change its lists
        return _numbers(self._function(prompts, answers, **columns), count)

    def format(self, answers: Sequence[str]) -> list[float]:
        return [float(self._format.fullmatch(answer) is not None) for answer in answers]


def work(orders: Iterable[tuple[str, tuple]], tell: Callable[[dict], None]) -> None:
    """Answers each order, (a method of Judge, arguments), with `done`, `refused` or `failed`; started by its name."""
    sys.path.insert(0, os.getcwd())  # not earlier: a file there may have the name of a module that this program imports
    judge = Judge()
    for name, arguments in orders:
        try:
            answer = {"done": getattr(judge, name)(*arguments)}
        except Refused as error:
            answer = {"refused": str(error)}
        except Wrong as error:
            answer = {"failed": str(error)}
        except BaseException as error:  # SystemExit too: the function must not end this process
            traceback.print_exc()
            answer = {"failed": one_line(error)}
        tell(answer)


class Gym:
    """A task of reasoning-gym. Question `number` (0 to 2^32 - 1) is the same in each process."""

    def __init__(self, name: str, options: Options):
        rg = _import("reasoning_gym", "reasoning-gym", f"reasoning_gym:{name}")
        known = rg.factory.DATASETS
        if name not in known:
            raise Refused(f"reasoning_gym has no task {name!r}{_hint(name, known)}")
        values = _values(name, options, known[name][1])

        @functools.lru_cache(maxsize=2)
        def dataset(seed: int):
            _seed(seed)
            return rg.create_dataset(name, seed=seed, size=_BLOCK, **values)

        @functools.lru_cache(maxsize=4096)
        def entry(number: int) -> dict:
            _seed(number)
            try:
                return self._all[number]
            except IndexError:  # a few tasks have only `size` questions; most make question n from seed + n
                first = number - number % _BLOCK
                block = dataset(first)
                _seed(number)
                return block[number - first]

        self.entry, self.name = entry, f"reasoning_gym:{name}"
        self.hook = only_computes() if name in EVALUATED else None
        try:
            self._all = dataset(0)
        except Exception as error:
            raise Refused(f"reasoning_gym:{name} can't be made: {_text(error)}") from None

    def exact(self, number: int, said: str) -> float:
        return float(self._all.score_answer(said, self.entry(number)) >= 1)


def _seed(number: int) -> None:
    """Seeds the global generators: a few tasks draw from them."""
    random.seed(number)
    importlib.import_module("numpy").random.seed(number)


def _values(name: str, options: Options, config: type) -> dict[str, object]:
    fields = {field.name: field for field in dataclasses.fields(config) if field.name not in ("seed", "size")}
    values = {}
    for key, text in options.items():
        if key in ("seed", "size"):
            raise Refused(f"reasoning_gym:{name}: {key} can't be set: questions depend on config.seed")
        if key not in fields:
            raise Refused(f"reasoning_gym:{name} has no option {key!r}{_hint(key, fields)}")
        value, default = _value(text), fields[key].default
        kind = type(default)
        if kind is float and type(value) is int:
            value = float(value)
        if kind in (bool, int, float, str) and type(value) is not kind:
            raise Refused(f"reasoning_gym:{name}: {key}={text} is no {kind.__name__}; the default is {default}")
        values[key] = value
    return values


def _value(text: str) -> object:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _import(module: str, package: str, task: str):
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise Refused(f"{task} needs {package}: {pip_install('rl')}") from None


def _equal(truth: str, said: str) -> float:
    """Returns 1.0 if an answer is `truth`, or its last number or formula equals it and is not one of several; else 0.0."""
    if said == truth:
        return 1.0
    verify, said = importlib.import_module("math_verify").verify, said[-_READ:]
    return float(verify(_truth(truth), _parsed(said), timeout_seconds=_MATH_S) and not _is_one_of_several(truth, said))


def _is_one_of_several(truth: str, said: str) -> bool:
    """True if the last clause with the true number ends in a list, a range or a bound that includes the number."""
    number, read = _numbers_in(truth), _numbers_in(_parsed(said)[-1])
    clause = next((part for part in reversed(_CLAUSE.split(said)) if number <= _numbers_in(part)), "")
    several = _SEVERAL.search(clause) if _NUMBER.fullmatch(truth) and number <= read else None
    numbers = _numbers_in(several[0]) if several else set()
    return bool(several) and number <= numbers and (len(numbers) > 1 or bool(several["bound"]))


def _numbers_in(text: str) -> set[float]:
    return {float(number.translate({ord("$"): "", ord(","): ""})) for number in _NUMBER.findall(text)}


def _truth(text: str) -> list:
    return _parsed(f"${text}$") or _parsed(text)


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> list:
    return importlib.import_module("math_verify").parse(text, parsing_timeout=_MATH_S)


def _found(name: str) -> Callable:
    """Returns the function MODULE:FUNCTION. Raises Refused if there is none, or the module can't be imported."""
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise Refused(f"can't be imported: {one_line(error)}") from None
        here = [file.removesuffix(".py") for file in os.listdir() if file.endswith(".py")]
        near = _hint(module_name, here, every=False)
        raise Refused(f"there is no module {module_name} in {os.getcwd()} or on Python's path{near}") from None
    except BaseException as error:
        traceback.print_exc()
        raise Refused(f"can't be imported: {one_line(error)}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise Refused(f"{module_name} has no function {function_name}{_hint(function_name, own)}")
    return function


def _hint(name: str, names: Sequence[str], every: bool = True) -> str:
    """Returns words that name the nearest name; if none is near and `every`, all names, at most thirty."""
    near = difflib.get_close_matches(name, list(names), n=1)
    if near:
        return f"; did you mean {near[0]}?"
    known = sorted(names)
    more = ", ..." if len(known) > 30 else ""
    return f"; there are {', '.join(known[:30])}{more}" if every and known else ""


def _numbers(values: object, count: int) -> list[float]:
    """Returns a function's result as `count` floats. Raises Wrong if it is not that many finite numbers."""
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise Wrong(f"returned {_shown(values)}, not a list of numbers")
    numbers = list(itertools.islice(values, count + 1))
    if len(numbers) != count:
        many = f"{len(numbers)} number{'s' * (len(numbers) != 1)}" if len(numbers) < count else f"more than {count}"
        raise Wrong(f"returned {many} for {count} answer{'s' * (count != 1)}")
    return [_number(value) for value in numbers]


def _number(value: object) -> float:
    number = math.nan
    with contextlib.suppress(Exception):
        number = math.nan if isinstance(value, str | bytes) else float(value)
    if not abs(number) <= _LARGEST:
        raise Wrong(f"returned {_shown(value)}, which is no finite number")
    return number


def _shown(value: object) -> str:
    try:
        return " ".join(repr(value).split())[:60]
    except Exception:
        return f"a {type(value).__name__}"


def one_line(error: BaseException) -> str:
    """Returns an exception's own line: its type, what it says, and where it was raised: "ValueError: no (a.py:3)"."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno) for frame in frames if not _foreign(frame.filename)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    at = f" ({os.path.basename(places[-1][0])}:{places[-1][1]})" if places else ""
    said = _text(error)
    return f"{type(error).__name__}{': ' * bool(said)}{said}{at}"


def _foreign(file: str) -> bool:
    """True if a file is Python's, an installed package's or of this folder: a line of the user's own code says more."""
    standard = sysconfig.get_paths()["stdlib"]
    return file.startswith(("<", standard, os.path.dirname(__file__))) or "site-packages" in file


def _text(error: BaseException) -> str:
    try:
        said = error.msg if isinstance(error, SyntaxError) else str(error)
    except Exception:
        said = ""
    return " ".join(str(said).split())[:_LINE]
