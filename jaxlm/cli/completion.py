"""Completes command lines for the shell through argcomplete: verbs, configs, runs, options, keys, values. Imports no JAX."""

import argparse
import glob
import itertools
import os

import argcomplete

from jaxlm.cli.verbs import VERBS, Verb
from jaxlm.config import config_files, key_help


class _Finder(argcomplete.CompletionFinder):
    def collect_completions(
        self, active_parsers: list[argparse.ArgumentParser], parsed_args: argparse.Namespace, cword_prefix: str
    ) -> list[str]:
        texts = completions(parsed_args.words, cword_prefix)
        self.get_display_completions().update(texts)  # which zsh and fish show
        return [*texts]


def answer() -> None:
    """Answers the question in the environment, which argcomplete's shell code puts there, and ends the process."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("words", nargs="*")
    _Finder()(parser)


def completions(words: list[str], prefix: str) -> dict[str, str]:
    """Returns what may stand in place of `prefix`, with a description or "". `words` are the plain arguments before it."""
    option, equals, value = prefix.partition("=") if prefix.startswith("-") else ("", "", prefix)
    verb = VERBS.get(words[0]) if words else None
    if words in ([], ["help"]):
        texts = {name: verb.summary for name, verb in VERBS.items()} | {"configs" if words else "help": ""}
    elif verb is None:
        return {}
    elif option.startswith("--config.") and not equals:
        texts = _keys(prefix)
    elif option and not equals:
        texts = {name + "=" * ("action" not in given): given["help"] for name, given in verb.options.items()}
        texts |= {"--config.": "a key", "--config=": "a config", "--help": ""}
    else:
        values = (
            _values(verb, option) if option else [*config_files.shipped_configs() * (len(words) == 1), *_runs(value)]
        )
        values = [name for name in values if name.startswith(value)] or _runs(value) or _paths(value)
        texts = dict.fromkeys((option + equals + name for name in values), "")
    return {text: words for text, words in texts.items() if text.startswith(prefix)}


def _keys(prefix: str) -> dict[str, str]:
    """Returns keys and sections that begin with `prefix`, to the first level at which they differ."""
    keys = {f"--config.{key.name}=": key.comment for key in key_help.read().keys if ".NAME" not in key.name}
    keys = {key: comment for key, comment in keys.items() if key.startswith(prefix)}
    for dots in itertools.count(prefix.count(".")):
        parts = {key: key.split(".", dots + 1) for key in keys}
        last = {key: words for key, words in keys.items() if len(parts[key]) == dots + 1}
        texts = {".".join(words[: dots + 1]) + ".": "" for key, words in parts.items() if key not in last} | last
        if len(texts) != 1 or last:
            return texts


def _values(verb: Verb, option: str) -> list[str]:
    if option == "--config":
        return config_files.shipped_configs()
    key = next((key for key in key_help.read().keys if f"--config.{key.name}" == option), None)
    if key is None:
        return [*verb.options.get(option, {}).get("choices", ())]
    choices = {"bool": "True, False"}.get(key.type, key.limits.partition("one of ")[2])
    return choices.split(", ") if choices else []


def _runs(prefix: str) -> list[str]:
    """Returns the folders with a config.json whose path begins with `prefix`, two levels deep."""
    found = (path for deep in ("", "*/") for path in glob.iglob(f"{glob.escape(prefix)}*/{deep}config.json"))
    return [os.path.dirname(path) for path in found]


def _paths(prefix: str) -> list[str]:
    return [path + "/" * os.path.isdir(path) for path in glob.iglob(f"{glob.escape(prefix)}*")]
