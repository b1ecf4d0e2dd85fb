"""The console script `jaxlm VERB ...`: flags in, program out, nothing else."""

import argparse
import dataclasses
import difflib
import errno
import functools
import importlib
import inspect
import logging
import os
import pathlib
import re
import sys
import typing

from absl import logging as absl_logging
from ml_collections import config_dict

from jaxlm import config as config_lib
from jaxlm import config_files
from jaxlm.config import ConfigError, RunError


@dataclasses.dataclass(frozen=True)
class Verb:
    """One command.

    Attributes:
      module: whose `run(config, args)` does it and returns the exit code; None: the program that `config.program` names.
      summary: one line for the help.
      options: flags beside --config: name -> arguments of `add_argument`.
      reads_run: it works on a run that exists: WORKDIR/config.json is its config.
      keys: sections of the config that its help lists first.
      resumes: the same command goes on from what an interrupted one has done.
    """

    module: str | None
    summary: str
    options: dict[str, dict] = dataclasses.field(default_factory=dict)
    reads_run: bool = False
    keys: tuple[str, ...] = ()
    resumes: bool = False


_JSON = {"--json": {"action": "store_true", "help": "print JSON instead of a table"}}
VERBS = {
    "train": Verb(
        None, "train a model; the same as python -m jaxlm.main. Run it again to resume or to continue", resumes=True
    ),
    "prepare": Verb(
        "prepare",
        "clean, deduplicate and audit documents into config.data.dir, with a report",
        _JSON,
        keys=("data", "prepare"),
        resumes=True,
    ),
    "tokenize": Verb(
        "tokenize",
        "make the tokenizer, the shards and the manifest in config.data.dir",
        {
            "--sweep": {"metavar": "N,N,...", "help": "only compare vocabularies of these sizes; writes nothing"},
            "--reference": {
                "default": "embedded:prose",
                "metavar": "FILE.model",
                "help": "the tokenizer to compare with; none for none (default: one trained on embedded prose)",
            },
            **_JSON,
        },
        keys=("data",),
    ),
    "tune": Verb(
        "tune",
        "time candidate settings of the train step on this device, and write the fastest as overrides",
        {
            "--out": {"metavar": "FILE", "help": "where the overrides go (default: WORKDIR/tuned.txt or ./tuned.txt)"},
            **_JSON,
        },
        keys=("tune", "train", "model", "loss", "hardware"),
    ),
    "plan": Verb(
        "plan",
        "parameters, FLOPs, memory, hours and dollars on each accelerator, before anything is rented",
        _JSON,
        keys=("plan",),
    ),
    "sample": Verb(
        "sample",
        "continue prompts with the model of a run",
        {
            "--prompt": {"action": "append", "metavar": "TEXT", "help": "text to continue; again for more than one"},
            "--checkpoint": {"default": "latest", "help": "latest, best or a step (default: latest)"},
            **_JSON,
        },
        reads_run=True,
    ),
    "audit": Verb(
        "audit",
        "find junk in prepared documents, in existing shards or in the sources, worst first",
        {
            "--top": {"type": int, "default": 50, "metavar": "N", "help": "findings to print (default: 50; 0 = all)"},
            "--source": {"default": "", "metavar": "NAME", "help": "print the findings of this source only"},
            "--max-bytes": {"type": int, "default": 0, "metavar": "N", "help": "of each source to read; 0 = all"},
            **_JSON,
        },
        reads_run=True,
        keys=("data", "prepare"),
    ),
    "trace": Verb(
        "trace",
        "which documents were in the batch of a step",
        {"--step": {"type": int, "required": True, "metavar": "N", "help": "the step, counted from 1"}, **_JSON},
        reads_run=True,
    ),
}
PROGRAMS = {"pretrain": "pretrain"}


def main(argv: typing.Sequence[str] | None = None) -> int:
    """Runs `jaxlm ARGV`; returns the exit code (0 done, 1 failed, 2 bad input, 3 stopped, 4 preempted)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="jaxlm: %(message)s", level=logging.WARNING, force=True)
    absl_logging.set_verbosity(absl_logging.FATAL)  # Orbax reports through exceptions too
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.unraisablehook = _without_leftovers(sys.unraisablehook)
    resumes = bool(argv) and argv[0] in VERBS and VERBS[argv[0]].resumes
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        print(f"jaxlm: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"jaxlm: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head` has what it wanted; where work goes on, it may be another pipe
        if resumes:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # no permission, disk full, ...: the system's own words name the file
        mend = "; free some room and run the same command again" if error.errno == errno.ENOSPC else ""
        print(f"jaxlm: {error}{mend}", file=sys.stderr)
        return 1
    except RuntimeError as error:  # JAX's, not named here: the workers of `prepare` import this module and need no JAX
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(
            f"jaxlm: out of memory ({config_files.first_line(error)}): lower train.microbatch_size or train.seq_len, "
            "set model.remat=names, dots or full, or split the model by mesh.fsdp",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print(f"jaxlm: stopped{'; the same command goes on from what is done' * resumes}", file=sys.stderr)
        return 4 if resumes else 1


def _without_leftovers(
    hook: typing.Callable[[typing.Any], None],
) -> typing.Callable[[typing.Any], None]:
    """`hook` without what asyncio says of reads and writes that Orbax abandoned: the error itself was raised."""

    def unraisable(what: typing.Any) -> None:
        if "Event loop is closed" not in str(what.exc_value) and not inspect.iscoroutine(what.object):
            hook(what)

    return unraisable


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"jaxlm {importlib.import_module('jaxlm').__version__}")
        return 0
    name = argv[0]
    if name not in VERBS:
        near = difflib.get_close_matches(name, VERBS, n=1)
        raise ConfigError(
            f"no command {name!r}; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(VERBS)}")
        )
    verb = VERBS[name]
    rest, overrides = _split_overrides(argv[1:])
    args = _parse(name, verb, rest)
    args.overrides = overrides
    config = config_lib.resolve(_config(verb, args.config, overrides))
    module = verb.module or PROGRAMS.get(config.program)
    if module is None:
        raise ConfigError(f"config.program={config.program!r}: choose one of {', '.join(PROGRAMS)}")
    return importlib.import_module(f"jaxlm.programs.{module}").run(config, args)


def _config(verb: Verb, name: str | None, overrides: list[str]) -> config_dict.ConfigDict:
    """The config file, or for verbs that read a run what the run itself was made with, with overrides."""
    workdir = next((o.partition("=")[2] for o in reversed(overrides) if o.startswith("workdir=")), "")
    if not workdir and name and verb.reads_run:
        workdir = config_files.load(name, overrides).workdir
    saved = pathlib.Path(workdir) / "config.json"
    if verb.reads_run and workdir and saved.is_file():
        config = config_files.from_run(saved)
        for override in overrides:
            config_files.apply_override(config, override)
        return config
    if verb.reads_run and workdir and not name:
        raise ConfigError(f"no run in {workdir}: it has no config.json")
    if not name:
        raise ConfigError(
            "no config: give --config=NAME or --config=FILE.py"
            + (", or the --config.workdir=DIR of a run" if verb.reads_run else "")
            + f"; shipped: {', '.join(config_files.shipped_configs())}"
        )
    return config_files.load(name, overrides)


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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(message)


def _parse(name: str, verb: Verb, rest: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog=f"jaxlm {name}",
        description=f"{verb.summary[0].upper()}{verb.summary[1:]}.",
        epilog=_keys_help(verb.keys),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="NAME|FILE.py", help="a shipped config by name, or a config file")
    parser.add_argument(
        "--config.KEY", dest="_", metavar="VALUE", help="set any key of the config (all are listed below)"
    )
    for option, arguments in verb.options.items():
        parser.add_argument(option, **arguments)
    args, unknown = parser.parse_known_args(rest)
    if unknown:
        known = ["--config", *verb.options]
        word = unknown[0].partition("=")[0]
        keys = {key.split(".")[-1]: key for key, _, _ in reversed(_keys())}  # the first of a name
        near = difflib.get_close_matches(word, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"jaxlm {name} --help lists all"
        if word.lstrip("-").replace("-", "_").split(".")[-1] in keys:
            hint = f"did you mean --config.{keys[word.lstrip('-').replace('-', '_').split('.')[-1]]}?"
        raise ConfigError(f"unknown argument {unknown[0]!r}; {hint}")
    return args


def _overview() -> str:
    lines = [
        "usage: jaxlm VERB --config=NAME|FILE.py [--config.KEY=VALUE ...]",
        "",
        "verbs (jaxlm VERB --help for each):",
    ]
    lines += [f"  {name:<10}{verb.summary}" for name, verb in VERBS.items()]
    lines += ["", "shipped configs:"]
    lines += [f"  {name:<20}{_config_summary(name)}" for name in config_files.shipped_configs()]
    lines += [
        "",
        "exit codes: 0 done, 1 failed, 2 bad input, 3 stopped (non-finite steps), 4 interrupted, state saved",
    ]
    return "\n".join(lines)


def _config_summary(name: str) -> str:
    text = (config_files.CONFIG_PACKAGE / f"{name}.py").read_text(encoding="utf-8")
    return text.split('"""')[1].strip().splitlines()[0]


def _keys() -> list[tuple[str, str, str]]:
    """(key, default, comment) of every key; the comment stands beside it in the source of configs/base.py."""
    names, keys, defaults = {"c": ""}, [], config_files.load("base")
    for line in (config_files.CONFIG_PACKAGE / "base.py").read_text(encoding="utf-8").splitlines():
        code, _, comment = line.strip().partition("  # ")
        targets = [part.strip() for part in code.split(" = ")]
        owner, dot, attribute = targets[0].rpartition(".")
        if len(targets) < 2 or not dot or not attribute.isidentifier():
            continue
        base = names.get(owner)
        if base is None:
            base = names["c"] + "".join(f"{part}." for part in owner.split(".")[1:])
            base = names.get(owner.split(".")[0], "") + base
        key = f"{base}{attribute}"
        if targets[-1] == "ConfigDict()":
            names |= {alias: f"{key}." for alias in targets[:-1]}
            if key not in ("data.sources", "prepare.sources"):
                continue
        default = functools.reduce(lambda section, part: section[part], key.split("."), defaults)
        keys.append((key, "{}" if isinstance(default, config_dict.ConfigDict) else repr(default), comment))
    return keys


def _keys_help(first: tuple[str, ...]) -> str:
    lines = ["keys (default) and meaning:"]
    for key, default, comment in sorted(_keys(), key=lambda entry: entry[0].split(".")[0] not in first):
        lines.append(f"  --config.{key}  ({default})")
        if comment:
            lines.append(f"      {comment}")
    lines.append("keys of a source of prepare.sources, as --config.prepare.sources.NAME.KEY (default) and meaning:")
    for key, default, comment in _SOURCE_KEY.findall(
        (config_files.CONFIG_PACKAGE / "base.py").read_text(encoding="utf-8")
    ):
        lines += [f"  {key}  ({default})", f"      {comment}"]
    return "\n".join(lines).replace("%", "%%")


_SOURCE_KEY = re.compile(r"^        (\w+)=(.+),  # (.+)$", re.MULTILINE)  # of base.source


if __name__ == "__main__":
    sys.exit(main())
