"""The console script `jaxlm VERB ...`: parses the flags and calls the program."""

import argparse
import ast
import contextlib
import difflib
import errno
import importlib
import itertools
import logging
import os
import pathlib
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from absl import logging as absl_logging
from ml_collections import config_dict

from jaxlm import config as config_lib
from jaxlm.cli.verbs import GROUPS, VERBS, Verb, module
from jaxlm.config import ConfigError, RunError, branch, checks, config_files, milestones, shrink, swept, theirs
from jaxlm.config import key_help as config_help
from jaxlm.host import console, files, interrupts

_MADE = ("manifest.json", "prepared.json")  # in a data directory
_MEND = {
    errno.EROFS: "; that disk can't be written here: use a copy of the folder on another one",
    errno.ENOSPC: "; free some room and run the same command again",
    errno.EFBIG: "; `ulimit -f` limits the size of files in this shell: raise it and run the same command again",
}


def main(argv: Sequence[str] | None = None, script: bool = False) -> int:
    """Runs `jaxlm ARGV` and returns the exit code (0 done, 1 failed, 2 bad input, 3 stopped, 4 preempted).

    With `script`, or without `argv`, this process does nothing else, so training may run in a child (`runs.supervise`).
    """
    console.open_closed()
    script = script or argv is None
    code = _main(list(sys.argv[1:] if argv is None else argv), script)
    processes = sys.modules.get("jaxlm.devices.processes")
    if script and processes and processes.left_behind.is_set():
        os._exit(code)  # else Python waits for ever for threads that hang on storage
    return code


def _main(argv: list[str], script: bool) -> int:
    """Runs a command and returns its exit code; turns errors into lines and exit codes."""
    handlers = [console.LogHandler()]  # nothing that is logged stops a run
    logging.basicConfig(format="jaxlm: %(message)s", level=logging.WARNING, force=True, handlers=handlers)
    absl_logging.set_verbosity(absl_logging.FATAL)  # Orbax reports through exceptions too
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    console.drop_leftovers()
    resumes = VERBS[argv[0]].resumes if argv and argv[0] in VERBS and not _help(argv) else ""
    try:
        code = _run(argv, script)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        console.say(f"jaxlm: {error}")
        return 2
    except BrokenPipeError:  # `| head` has read enough; in a command that resumes, it may be another pipe
        if resumes:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (RunError, OSError) as error:  # no permission, disk full, ...: the system's own words name the file
        _mark_fault(error)
        full = "Not enough free space" in str(error)  # NumPy's words, without a number
        console.say(f"jaxlm: {error}{_MEND.get(errno.ENOSPC if full else getattr(error, 'errno', None), '')}")
        return 1
    except RuntimeError as error:  # JAX's, not imported here: the workers of `prepare` import this module without JAX
        if console.peer_is_gone(error):
            console.say(
                f"jaxlm: another process of the run died, or can't be reached ({config_files.first_line(error)}); the same "
                "command, given to all of them, goes on"
            )
            return 1
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        console.say(
            f"jaxlm: out of memory ({config_files.first_line(error)}): lower train.microbatch_size or train.seq_len, "
            "set model.remat=names, dots or full, or split the model by mesh.fsdp"
        )
        return 1
    except KeyboardInterrupt:
        console.say(f"jaxlm: stopped{resumes and f'; the same command {resumes}'}")
        if (supervised := sys.modules.get("jaxlm.run.supervised")) and supervised.since() is not None:
            console.settle()
            os._exit(4)  # else Python waits for XLA, and the supervisor kills it and reports the stop twice
        return 4 if resumes else 1
    finally:
        with contextlib.suppress(KeyboardInterrupt):  # too late: the command is done, or refused
            interrupts.release()
        console.settle()


def _mark_fault(error: BaseException) -> None:
    """Tells the supervisor of this training, if it has one, of an error that storage or network caused."""
    supervised = sys.modules.get("jaxlm.run.supervised")
    if supervised and files.of_system(error):
        supervised.mark_fault()


def _general(argv: list[str]) -> str:
    """Returns the answer to a command without a verb: help, the list of configs or the version; "" for a verb."""
    if argv == ["help", "configs"]:
        return _configs()
    if not argv or argv[0] in ("-h", "--help", "help"):
        return _overview()
    return f"jaxlm {importlib.import_module('jaxlm').__version__}" if argv[0] in ("-V", "--version") else ""


def _run(argv: list[str], script: bool) -> int:
    if argv[:1] == ["help"] and len(argv) > 1 and argv != ["help", "configs"]:  # jaxlm help train
        argv = [*argv[1:], "--help"]
    if answer := _general(argv):
        print(answer)
        return 0
    name = argv[0]
    if name not in VERBS:
        near = difflib.get_close_matches(name, VERBS, n=1)
        raise ConfigError(f"no command {name!r}; " + (f"did you mean {near[0]}?" if near else ", ".join(VERBS)))
    _check_utf8(argv)
    verb = VERBS[name]
    rest, overrides = _split_overrides(argv[1:])
    asked = _help(rest)
    overrides, several = swept.split(overrides) if verb.sweeps and not asked else (overrides, {})
    if asked == "screen":
        print(_verb_help(name))
        return 0
    words = [word for word in rest if not word.startswith("--help=")]
    args = _parse(name, verb, words, _workdir(overrides), needs_all=not asked)
    args.overrides = overrides = [*overrides, *_short(verb, args)]
    args.config = _one_of(args.config, args.target) or _stand_in(verb, args, overrides)
    if asked:
        given = args.config or _workdir(overrides)
        config = _of_folder(verb, args, overrides) or (
            _config(name, args.config, overrides) if given else config_files.load("base", overrides)
        )
        print(config_help.page(config_help.read(), asked, config))
        return 0
    trains = name == "train"
    config = importlib.import_module("jaxlm.run.supervised").adopt() if trains and script else None
    alone = trains and script and not config
    config = config or _resolved(name, args, overrides)
    if verb.sweeps:
        _sweep(name, args, overrides, several)
    args.config = args.config or config.workdir

    def program() -> int:
        with console.working("loading", end=False, quiet=True):
            command = importlib.import_module(f"jaxlm.commands.{module(name, config.program)}")
        if trains and script:
            importlib.import_module("jaxlm.run.supervised").stop_at_once_until_training()
        else:
            interrupts.release(raising=bool(verb.resumes))
        return command.run(config, args)

    if not alone:
        return program()
    return importlib.import_module("jaxlm.run.survive.supervisor").run(config, program)


def _resolved(name: str, args: argparse.Namespace, overrides: list[str]) -> config_lib.Config:
    """Returns the command's config, checked; says what was chosen or is odd."""
    verb, lines = VERBS[name], []
    if getattr(args, "params", None) is not None:
        overrides += _of_size(name, args, overrides)
    given = (_branch(args, overrides) if name == "train" else None) or _of_folder(verb, args, overrides)
    given = given or _settled(name, args.config, overrides, lines.append)
    config = config_lib.resolve(given)
    if given.phases.shrink:
        console.say(shrink.summary(config, given.data.dir))
    if name == "train":
        if run := config_files.averaged(config.workdir):
            raise ConfigError(
                f"{config.workdir} is an average, which has no optimizer: go on with jaxlm train {run}, or branch "
                f"from it: jaxlm train {run} --branch=decay"
            )
        importlib.import_module("jaxlm.data.batches.which_data").check(config, args.config, overrides, lines.append)
    if name in ("train", "plan"):
        lines += _of_shape(name, args.config, overrides, config)
    for line in lines:
        console.say(line)
    if tasks := _tasks(name, args, config):
        importlib.import_module("jaxlm.eval.task_names").check(tasks)
    return config


def _sweep(name: str, args: argparse.Namespace, overrides: list[str], several: dict[str, Sequence[str]]) -> None:
    """Stores the keys with several values in `args.space`, the config's own values in `args.own`, all arms in `args.arms`.

    `args.arm` takes overrides and returns an arm: (values, config). A search's `arms` only show that its values go together.
    """

    def arm(more: Sequence[str]) -> tuple[dict[str, str], config_lib.Config]:
        config = _settled(name, args.config, [*overrides, *more], lambda line: None)
        return {key: str(config_files.value_of(config, key.split("."))) for key in several}, config_lib.resolve(config)

    args.arm, args.own = arm, arm([])[0]
    made = list(map(arm, swept.combined(several, args.one_at_a_time)))
    args.arms = list({tuple(values.values()): (values, config) for values, config in made}.values())
    different = {key: list(dict.fromkeys(values[key] for values, _ in args.arms)) for key in several}
    args.space = {key: values if isinstance(values, tuple) else different[key] for key, values in several.items()}


def _branch(args: argparse.Namespace, overrides: list[str]) -> config_dict.ConfigDict | None:
    if args.without is None:
        return branch.config(args, overrides)
    if args.branch or args.steps:
        raise ConfigError("--without goes to the run's own last step: leave --branch and --steps out")
    return importlib.import_module("jaxlm.commands.train.without").config(args, overrides)


def _check_utf8(paths: list[str]) -> None:
    """Raises ConfigError if a word of the command or the current folder is not UTF-8."""
    with contextlib.suppress(FileNotFoundError):  # the current folder was removed: its name does not matter
        paths = [*paths, os.getcwd()]
    if odd := [path for path in paths if files.printable(path) != path]:
        raise ConfigError(f"{files.printable(odd[0])} is no UTF-8, as paths must be: rename that file or folder")


def _of_size(name: str, args: argparse.Namespace, given: Sequence[str]) -> list[str]:
    """Returns the overrides that give the model `--params`, and says them. Raises ConfigError if one is given, or for a run."""
    if args.config and config_files.find(args.config).kind == "run":
        raise ConfigError(f"--params goes with a config: the run in {args.config} has its size")
    if getattr(args, "budget", None):
        raise ConfigError("--budget chooses the size that --params sets: leave one of the two out")
    params, config = args.params, _settled(name, args.config, [*given], lambda line: None)
    keys = importlib.import_module("jaxlm.plan.size").overrides(config_lib.resolve(config), params)
    if both := {key.partition("=")[0] for key in keys} & {key.partition("=")[0] for key in given}:
        raise ConfigError(f"--params sets config.{min(both)} too: leave one of the two out")
    console.say(f"--params={params}: {' '.join(f'--config.{key}' for key in keys)}")
    batch, length = config.train.batch_size, config.train.seq_len
    console.say(f"train.batch_size={batch} and train.seq_len={length} stay: {batch * length:,} tokens a step")
    return keys


def _of_shape(name: str, word: str | None, overrides: list[str], config: config_lib.Config) -> Iterator[str]:
    """Yields lines on odd shapes that were typed, and on phases that only the flags name: a typo makes one too."""
    if any(override.startswith("model.") for override in overrides):
        yield from checks.odd(config.model)
    if typed := {override.split(".")[2] for override in overrides if override.startswith("phases.plan.")}:
        old = _config(name, word, [override for override in overrides if override.startswith("workdir=")]).phases.plan
        phases = [phase.name for phase in milestones.planned(config.phases, config.train)]
        for before, phase in zip(["", *phases], phases, strict=False):
            if phase in typed and phase not in old:
                yield f"new phase {phase}, {f'after {before}' if before else 'the first'}"


def _tasks(name: str, args: argparse.Namespace, config: config_lib.Config) -> list[str]:
    """Returns the benchmarks that a command will ask for."""
    if name == "eval" and args.tasks is not None:
        return [task.strip() for task in args.tasks.split(",")]
    return [*config.eval.tasks] if name in ("eval", "train") else []


def _of_folder(verb: Verb, args: argparse.Namespace, overrides: list[str]) -> config_dict.ConfigDict | None:
    if not verb.folder:
        return None
    return importlib.import_module(f"jaxlm.commands.{verb.folder}").config(args, overrides)


def _one_of(option: str | None, target: str | None) -> str | None:
    """Returns --config= or the plain argument; both may be given if they name the same config."""
    if option and target and config_files.find(option) != config_files.find(target):
        raise ConfigError(f"two configs: {target} and --config={option}; give one of them")
    return option or target


def _stand_in(verb: Verb, args: argparse.Namespace, overrides: list[str]) -> str | None:
    option, config = verb.stands_in
    return config if option and getattr(args, option) and not _holds_run(_workdir(overrides)) else None


def _workdir(overrides: list[str]) -> str:
    return next((o.partition("=")[2] for o in reversed(overrides) if o.startswith("workdir=")), "")


def _holds_run(workdir: str) -> bool:
    return bool(workdir) and (pathlib.Path(workdir) / "config.json").is_file()


def _config(name: str, word: str | None, overrides: list[str]) -> config_dict.ConfigDict:
    """Returns the config of the file, run or model that `word` names, else of the run in `workdir`, with the overrides."""
    verb, workdir = VERBS[name], _workdir(overrides)
    named = config_files.find(word, verb.reads_run) if word and verb.models != "only" else None
    if verb.others:
        return config_files.load(word or "base", ["workdir=.", *overrides])
    if verb.models == "only" or (named and named.kind == "model" and verb.models):
        return importlib.import_module("jaxlm.interop.inherit").of_model(word or "", overrides)
    if verb.takes_data and named and any((named.path / made).is_file() for made in _MADE):
        return config_files.load("base", [f"data.dir={word}", *overrides])
    if named and named.kind in ("model", "documents"):
        raise ConfigError(_not_taken(name, word, named))
    if named and named.kind == "run":
        if workdir and pathlib.Path(workdir).resolve() != named.path.resolve():
            raise ConfigError(f"two runs: {word} and --config.workdir={workdir}; give one of them")
        return config_files.of_run(named.path, overrides)
    config = config_files.load(str(named.path), overrides) if named else None
    if config and not config.workdir:
        config.workdir = config_files.default_workdir(named.path, config)
    workdir = workdir or (config.workdir if config else "")
    if (verb.reads_run or not named) and _holds_run(workdir):
        return config_files.of_run(pathlib.Path(workdir), overrides)
    if config:
        return config
    if workdir and verb.reads_run:
        raise ConfigError(f"no run in {workdir}: it has no config.json")
    shipped, theirs = ", ".join(config_files.shipped_configs()), " or of a Hugging Face model" * bool(verb.models)
    theirs += " or of documents" * bool(verb.folder) + " or of data" * verb.takes_data
    raise ConfigError(f"no config: jaxlm {name} NAME, FILE.py or the folder of a run{theirs}; shipped: {shipped}")


def _settled(name: str, word: str | None, overrides: list[str], say: Callable[[str], None]) -> config_dict.ConfigDict:
    """Returns `_config`'s config with the keys that `data.dir`'s data and the model of `origin` imply; says what it adds.

    A warm-up that is not shorter than the typed `train.steps` becomes a tenth of them.
    """
    config, verb = _config(name, word, overrides), VERBS[name]
    named = config_files.find(word) if word and verb.models != "only" else None
    file = named.path if named and named.kind == "config" else None
    reads = name != "prepare" and not config.phases.shrink  # which has the embedded corpus
    names_data = reads and any(override.startswith("data.dir=") for override in overrides)
    if names_data and (line := importlib.import_module("jaxlm.data.batches.which_data").take(config, file, overrides)):
        say(line)
    typed = {override.partition("=")[0] for override in overrides}
    steps, warmup = config.train.steps, config.optim.warmup_steps
    if "train.steps" in typed and "optim.warmup_steps" not in typed and warmup >= steps > 0:
        config.optim.warmup_steps = steps // 10
        say(f"optim.warmup_steps={steps // 10} in place of {warmup}: a tenth of train.steps={steps}")
    if file and config.origin:
        inherit = importlib.import_module("jaxlm.interop.inherit")
        (inherit.grow if name == "grow" else inherit.take)(config, overrides, say)
    chosen = file and not _workdir(overrides) and config.workdir == config_files.default_workdir(file, config)
    if chosen and verb.makes and (name == "train" or not config.data.dir):
        say(f"folder: {config.workdir} (another by --config.workdir=DIR)")
    return config


def _not_taken(name: str, word: str, named: config_files.Found) -> str:
    """Returns a line that says why a verb does not take a plain argument, and what to do instead."""
    theirs = " or of a Hugging Face model" * bool(VERBS[name].models) + " or of data" * VERBS[name].takes_data
    path, takes = shlex.quote(word), f"jaxlm {name} takes a config or the folder of a run{theirs}"
    if named.kind == "model":
        way = f": jaxlm import {path} --out=RUN makes a run of it"
        way += f", jaxlm {name} base --config.origin={path} begins with it" if VERBS[name].makes else ""
        return f"{path} is a model in Hugging Face's format; {takes}{way}"
    if any((named.path / made).is_file() for made in _MADE):
        return f"{path} holds data that jaxlm made; {takes}, and --config.data.dir={path}"
    if line := importlib.import_module("jaxlm.data.shards.manifest").unfinished(named.path):
        return line
    texts = (
        f" (texts: --config.data.path={path}, others: first jaxlm prepare {path})" if "data" in VERBS[name].keys else ""
    )
    if VERBS[name].reads_run and named.path.is_dir():
        return f"no run in {path}: it has no config.json; {takes}{texts}"
    return f"{path} is no config (NAME or FILE.py) and no run (it has no config.json); {takes}{texts}"


def _split_overrides(argv: list[str]) -> tuple[list[str], list[str]]:
    """Takes `--config.key=value` and `--config.key value` out; returns (other arguments, ["key=value", ...])."""
    rest, overrides = [], []
    words = iter(argv)
    for word in words:
        if not word.startswith("--config."):
            rest.append(word)
            continue
        override = word.removeprefix("--config.")
        if "=" not in override:
            value = next(words, None)
            if value is None or value.startswith("--"):
                raise ConfigError(f"{word} needs a value: {word}=VALUE")
            override = f"{override}={value}"
        overrides.append(override)
    return rest, overrides


def _help(argv: Sequence[str]) -> str:
    """Returns which help `argv` asks for: "" = none, "screen" = the verb's, else a section or key of the config."""
    if {"-h", "--help", "--help="} & set(argv):
        return "screen"
    return next((word.partition("=")[2] for word in argv if word.startswith("--help=")), "")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message + f"; {self.prog} --help lists them" * ("are required" in message))


def _is_something(word: str) -> bool:
    try:
        return bool(config_files.find(word))
    except (ConfigError, OSError, ValueError):  # OSError, ValueError: this text can't be a path
        return False


def _parse(name: str, verb: Verb, rest: list[str], workdir: str, needs_all: bool) -> argparse.Namespace:
    """Returns the parsed arguments other than keys of the config; required options may be missing unless `needs_all`."""
    parser = _Parser(prog=f"jaxlm {name}", allow_abbrev=False, add_help=False)
    for plain, taken in (("target", not verb.others), ("other", verb.second)):
        if taken:
            parser.add_argument(plain, nargs="?")
    parser.add_argument("--config")
    if verb.rest or verb.others:
        parser.add_argument("words", nargs="*")
    for option, arguments in verb.options.items():
        required = needs_all and arguments.get("required", False)
        parser.add_argument(option, **{k: v for k, v in arguments.items() if k != "key"} | {"required": required})
    args, unknown = parser.parse_known_intermixed_args(rest, argparse.Namespace(target=None))
    args.others_checkpoint = getattr(args, "checkpoint", None)
    unknown = [word for word in getattr(args, "words", ()) if word.startswith("--")] or unknown  # "--promt=50% off"
    target, step = config_files.at_step(args.target or "")
    if step and verb.takes_step and _is_something(target):
        if args.checkpoint not in ("latest", step) and name != "chat":
            raise ConfigError(f"{args.target} and --checkpoint={args.checkpoint} name two checkpoints: give one")
        args.target, args.checkpoint = target, step
    elif not step:
        args.target = target or None
    if verb.holds_runs and args.target:
        words = (args.target, *args.words)
        args.target, *args.words = itertools.chain.from_iterable(map(config_files.runs_in, words))
    if verb.rest and args.target and (args.config or workdir) and not _is_something(args.target):
        args.target, args.words = None, [args.target, *args.words]  # the run is named already: this is a prompt
    if args.target and "=" in args.target and not os.path.exists(args.target):
        unknown = [args.target, *unknown]
    if unknown:
        raise ConfigError(f"unknown argument {unknown[0]!r}; {_argument_hint(name, verb, unknown[0])}")
    return args


def _short(verb: Verb, args: argparse.Namespace) -> list[str]:
    """Returns the overrides for the verb's short options: `sample.temperature=1` for `--temperature=1`."""
    options = {arguments["key"]: option for option, arguments in verb.options.items() if "key" in arguments}
    values = {key: getattr(args, option[2:].replace("-", "_")) for key, option in options.items()}
    return [f"{key}={value}" for key, value in values.items() if value is not None]


def _argument_hint(name: str, verb: Verb, argument: str) -> str:
    word = argument.partition("=")[0]
    if not word.startswith("-") and "=" not in argument:
        return f"jaxlm {name} takes one config or run, and one is given already"
    keys = [key.name for key in config_help.read().keys]
    if word.lstrip("-") in keys:
        return f"did you mean --config.{argument.lstrip('-')}?"
    if known := theirs.hint(word.lstrip("-"), keys):
        return known.replace("config.", "--config.", 1)
    last = word.lstrip("-").replace("-", "_").split(".")[-1]
    same = [key for key in keys if key.split(".")[-1] == last]
    if same:  # prefer a key of the verb's own sections
        own = [key for section in verb.keys for key in same if key.split(".")[0] == section]
        return f"did you mean {' or '.join(f'--config.{key}' for key in own[:1] or same)}?"
    near = difflib.get_close_matches(word, ["--config", "--help", *verb.options], n=1)
    return f"did you mean {near[0]}?" if near else f"jaxlm {name} --help lists all"


def _verb_help(name: str) -> str:
    verb = VERBS[name]
    if verb.others:
        target = f"{verb.others} {verb.others} ..."
        arguments = {verb.others: "RUN or RUN@STEP, a model's folder, http://HOST:PORT[#MODEL], FILE.jsonl"}
    elif verb.models == "only":
        target, arguments = "HF_DIR", {"HF_DIR": "the folder of a Hugging Face model"}
    else:
        takes = f"{'DIR|' * bool(verb.folder)}CONFIG|RUN{'|HF_DIR' * bool(verb.models)}{'|DATA' * verb.takes_data}"
        target = f"RUN_A {verb.second}" if verb.second else takes
        documents = {"DIR": "a folder, file or glob of documents, prepared by a shipped recipe"}
        also = "HF_DIR: that of a Hugging Face model" if verb.models else "also --config.workdir=RUN"
        arguments = (documents if verb.folder else {}) | {
            "CONFIG": "a shipped config (jaxlm help configs) or a FILE.py; also --config=CONFIG",
            "RUN": f"the folder of a run: its own config; {also}",
        }
        if verb.takes_data:
            arguments["DATA"] = "a data directory; the same as base --config.data.dir=DATA"
    if verb.rest:
        target, arguments[verb.rest] = f"{target} [{verb.rest} ...]", verb.rest_help
    arguments["--config.KEY=VALUE"] = "set a key of the config"
    if verb.second:
        arguments[verb.second] = "the folder of another run"
    for option, given in verb.options.items():
        metavar = given.get("metavar")
        arguments[f"{option}={metavar}" if metavar else option] = given["help"]
    arguments["--help=SECTION"] = "keys of a section (or one key, or all), with their values in CONFIG or RUN"
    width = max(map(len, arguments))
    return "\n".join(
        [
            f"usage: jaxlm {name} {target} [--config.KEY=VALUE ...]{' [OPTIONS]' * bool(verb.options)}",
            *textwrap.wrap(f"{verb.summary[0].upper()}{verb.summary[1:]}.", config_help.WIDTH),
            *(f"  {argument:<{width}}  {text}" for argument, text in arguments.items()),
            "sections of keys:",
            *config_help.overview(config_help.read(), verb.keys),
        ]
    )


def _overview() -> str:
    lines = ["usage: jaxlm VERB CONFIG|RUN [--config.KEY=VALUE ...]"]
    for title, names in GROUPS.items():
        lines += ["", title, *(f"  {name:<10}{VERBS[name].summary}" for name in names)]
    lines += [
        "",
        "jaxlm help VERB, jaxlm help configs, jaxlm --version",
        "exit codes: 0 done, 1 failed (the same command may do better), 2 bad input (it",
        "never will), 3 stopped (non-finite steps, a gate, a budget), 4 interrupted (the",
        "same command goes on)",
    ]
    return "\n".join(lines)


def _configs() -> str:
    lines = []
    for name in config_files.shipped_configs():
        text = (config_files.CONFIG_PACKAGE / f"{name}.py").read_text(encoding="utf-8")
        summary = ast.get_docstring(ast.parse(text)).splitlines()[0]
        indents = {"initial_indent": f"{name:<20}", "subsequent_indent": " " * 20}
        lines += textwrap.wrap(summary, config_help.WIDTH, **indents)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
