"""Reads `reward.tasks`: `reasoning_gym:NAME?key=value&key=value`, `gsm8k`, `gsm8k:FILE`; several with commas between."""

import hashlib
import re
import typing
from collections.abc import Mapping

from jaxlm.config import ConfigError, nearest

_ONE_IN = 8  # questions, one is for evaluation
KINDS = ("reasoning_gym", "gsm8k")
_COMMA = re.compile(r",(?![^\[(]*[\])])")  # not between the brackets of a value


class Spec(typing.NamedTuple):
    """One task.

    Attributes:
      text: as it is written in the config.
      kind: one of KINDS.
      name: of the dataset in reasoning-gym; for gsm8k the file, or "".
      options: key -> value, as they are written.
    """

    text: str
    kind: str
    name: str
    options: Mapping[str, str]


def parse(tasks: str) -> list[Spec]:
    """Returns the tasks that `reward.tasks` names. Raises ConfigError if one is not written as it should be."""
    return [_spec(text.strip()) for text in _COMMA.split(tasks)] if tasks.strip() else []


def _spec(text: str) -> Spec:
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ConfigError(f"config.reward.tasks: there is no kind of task {kind!r}; {nearest(kind, KINDS)}")
    if kind == "gsm8k":
        return Spec(text, kind, rest, {})
    name, _, query = rest.partition("?")
    if not name:
        raise ConfigError(f"config.reward.tasks: {text!r} names no task: reasoning_gym:chain_sum, for example")
    options = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"config.reward.tasks: {part!r} in {text!r} is no key=value")
        options[key] = value
    return Spec(text, kind, name, options)


def for_evaluation(question: str) -> bool:
    """True if a question is never trained on: one in eight, by a hash of its text."""
    return hashlib.blake2b(question.encode(), digest_size=1).digest()[0] % _ONE_IN == 0
