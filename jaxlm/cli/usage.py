"""Writes the help of the console script."""

import ast
import textwrap

from jaxlm.cli.verbs import VERBS
from jaxlm.config import config_files
from jaxlm.config import help as config_help


def screen(name: str) -> str:
    """Returns the help on a verb: what it does, its arguments, the sections of keys."""
    verb = VERBS[name]
    if verb.others:
        target = f"{verb.others} {verb.others} ..."
        arguments = {verb.others: "RUN or RUN@STEP, a model's folder, http://HOST:PORT[#MODEL], FILE.jsonl"}
    elif verb.models == "only":
        target, arguments = "HF_DIR", {"HF_DIR": "the folder of a Hugging Face model"}
    else:
        takes = f"{'DIR|' * bool(verb.folder)}CONFIG|RUN{'|HF_DIR' * bool(verb.models)}"
        target = f"RUN_A {verb.second}" if verb.second else takes
        documents = {"DIR": "a folder, file or glob of documents, prepared by a shipped recipe"}
        also = "HF_DIR: that of a Hugging Face model" if verb.models else "also --config.workdir=RUN"
        arguments = (documents if verb.folder else {}) | {
            "CONFIG": "a shipped config (see jaxlm --help) or a FILE.py; also --config=CONFIG",
            "RUN": f"the folder of a run: its own config; {also}",
        }
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
            "",
            *(f"  {argument:<{width}}  {text}" for argument, text in arguments.items()),
            "sections of keys:",
            *config_help.overview(config_help.read(), verb.keys),
        ]
    )


def overview() -> str:
    """Returns the help on jaxlm: its verbs and the shipped configs."""
    lines = ["usage: jaxlm VERB CONFIG|RUN [--config.KEY=VALUE ...]", "", "verbs (jaxlm VERB --help for each):"]
    for name, verb in VERBS.items():
        lines += _entry(f"  {name:<10}", verb.summary)
    lines += ["", "shipped configs:"]
    for name in config_files.shipped_configs():
        lines += _entry(f"  {name:<20}", _config_summary(name))
    lines += [
        "",
        "exit codes: 0 done, 1 failed (the same command may do better), 2 bad input (it never will),",
        "3 stopped (non-finite steps, a gate, a budget), 4 interrupted (the same command goes on)",
    ]
    return "\n".join(lines)


def _entry(name: str, text: str) -> list[str]:
    return textwrap.wrap(text, config_help.WIDTH, initial_indent=name, subsequent_indent=" " * len(name))


def _config_summary(name: str) -> str:
    text = (config_files.CONFIG_PACKAGE / f"{name}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(text)).splitlines()[0]
