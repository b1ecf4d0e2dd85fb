"""Completes command lines for the shell through argcomplete: verbs, configs, runs, options, keys, values. Imports no JAX."""

import argparse
import glob
import os

import argcomplete

from jaxlm.cli.verbs import VERBS
from jaxlm.config import config_files, key_help


def answer() -> None:
    """Answers the question in the environment, which argcomplete's shell code puts there, and ends the process."""
    parser = argparse.ArgumentParser(add_help=False, prefix_chars="\0")  # so that options are words too
    words = parser.add_argument("words", nargs="*")
    words.completer = lambda prefix, parsed_args, **_: completions(parsed_args.words or [], prefix)
    argcomplete.autocomplete(parser)


def completions(words: list[str], prefix: str) -> dict[str, str]:
    """Returns what may follow `words`, with a description or "". argcomplete drops what does not begin with `prefix`."""
    plain = [word for word in words if not word.startswith("-")]
    option, equals, value = prefix.partition("=") if prefix.startswith("-") else ("", "", prefix)
    if plain in ([], ["help"]):
        return {name: verb.summary for name, verb in VERBS.items()} | {"configs" if plain else "help": ""}
    if (verb := VERBS.get(plain[0])) is None:
        return {}
    if option.startswith("--config.") and not equals:
        return _keys(prefix)
    if option and not equals:
        options = {name + "=" * ("action" not in given): given["help"] for name, given in verb.options.items()}
        return options | {"--config.": "a key", "--config=": "a config", "--help": ""}
    start, names = glob.escape(value), [*verb.options.get(option, {}).get("choices", ())]
    if option == "--config" or (len(plain) == 1 and not option):
        names = config_files.shipped_configs()
    if not names or not option:
        names += (os.path.dirname(file) for deep in ("", "*/") for file in glob.iglob(f"{start}*/{deep}config.json"))
    names = [name for name in names if name.startswith(value)]
    names = names or [path + "/" * os.path.isdir(path) for path in glob.iglob(f"{start}*")]
    return {f"{option}{equals}{name}": "" for name in names}


def _keys(prefix: str) -> dict[str, str]:
    """Returns the keys and sections at the level of `prefix`; if there is but one, all keys that begin with it."""
    known = key_help.read()
    names = {f"{key.name}=": key.comment for key in known.keys}
    names |= {f"{name}.": comment for name, comment in known.sections.items()}
    texts = {f"--config.{name}": of for name, of in names.items() if f"--config.{name}".startswith(prefix)}
    level = {text: of for text, of in texts.items() if text.rstrip(".").count(".") == prefix.count(".")}
    return level if len(level) > 1 else {text: of for text, of in texts.items() if text.endswith("=")}
