"""Types and limits: what the schema says of a key is what `build` refuses."""

import dataclasses
import math
import typing

import pytest

from jaxlm import config
from jaxlm.config import ConfigError, build, config_files, schema
from jaxlm.config.annotations import above, at_least, from_to_below, within, written

BASE = config_files.load("base").to_dict()


def scalars(kind, prefix: str = ""):
    """(dotted key, type) of every scalar of a dataclass; those of tuples and of sections by name too."""
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        origin = typing.get_origin(hint)
        if origin in (dict, tuple):
            hint = typing.get_args(hint)[origin is dict and 1]
        if dataclasses.is_dataclass(hint):
            yield from scalars(hint, f"{prefix}{name}.")
        elif typing.get_origin(hint) is not dict:
            yield prefix + name, hint


def unlimited_numbers(kind) -> list[str]:
    return [key for key, hint in scalars(kind) if hint in (int, float)]


def test_every_number_of_the_schema_has_limits():
    assert unlimited_numbers(config.Config) == []


def test_a_number_without_limits_is_noticed():
    fields = [("lr", float), ("sizes", tuple[int, ...]), ("steps", typing.Annotated[int, at_least(1)]), ("name", str)]
    assert unlimited_numbers(dataclasses.make_dataclass("Section", fields)) == ["lr", "sizes"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused_for_every_key(value):
    tried = 0
    for key, hint in scalars(config.Config):
        if typing.get_origin(hint) is typing.Annotated and typing.get_args(hint)[0] is float:
            tried += 1
            with pytest.raises(ConfigError, match=" must be finite and "):
                build(hint, value, key)
    assert tried > 30


@pytest.mark.parametrize(
    ("limit", "good", "bad", "words"),
    [
        (at_least(1), (1, 2, 10**12), (0, -1), "must be at least 1"),
        (at_least(1, or_else={-1: "auto"}), (1, -1), (0, -2), "must be at least 1, or -1 for auto"),
        (above(0), (1, 10**9), (0, -1), "must be greater than 0"),
        (above(0, most=5), (1, 5), (0, 6), "must be greater than 0 and at most 5"),
        (within(0, 3), (0, 3), (-1, 4), "must be in 0 to 3"),
        (from_to_below(0, 3), (0, 2), (-1, 3), "must be at least 0 and below 3"),
    ],
)
def test_limits_of_numbers(limit, good, bad, words):
    kind = typing.Annotated[int, limit]
    assert [build(kind, value, "key") for value in good] == list(good)
    for value in bad:
        with pytest.raises(ConfigError) as error:
            build(kind, value, "key")
        assert str(error.value) == f"config.key={value} {words}"


CHOICE, LETTERS = typing.Literal["none", "lora"], typing.Annotated[str, written("[a-z]+", "small letters")]


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (int, 1.0, "=1.0: expected int"),
        (int, True, "=True: expected int"),
        (float, True, "=True: expected float"),
        (float, "1", "='1': expected float"),
        (bool, 1, "=1: expected bool"),
        (str, None, "=None: expected str"),
        (tuple[str, ...], "a", "='a': expected tuple of str"),
        (tuple[int, ...], ("a",), "=('a',): 'a': expected int"),
        (dict[str, config.SourceConfig], 3, "expected section"),
        (config.LossConfig, 3, "must be a section with the keys z_loss, tile_tokens"),
        (LETTERS, "a1", "='a1' must be small letters"),
        (tuple[schema.Pattern, ...], ("a", "("), "=('a', '('): '(' is not a regular expression: missing )"),
        (CHOICE, "lra", "='lra': choose one of none, lora; did you mean 'lora'?"),
        (CHOICE, 3, "=3: expected str"),
        (tuple[CHOICE, ...], ("none", "x"), "=('none', 'x'): 'x': choose one of none, lora"),
        (typing.Literal[3, 5], 4, "=4: choose one of 3, 5"),
    ],
)
def test_types_are_checked(kind, value, words):
    with pytest.raises(ConfigError, match=r"config\.key") as error:
        build(kind, value, "key")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("kind", "value", "built"),
    [
        (float, 1, 1.0),
        (tuple[float, ...], [1, 2.5], (1.0, 2.5)),
        (dict[str, config.SourceConfig], {"a": {"path": "p", "weight": 1}}, {"a": config.SourceConfig("p", 1.0)}),
        (LETTERS, "abc", "abc"),
        (CHOICE, "lora", "lora"),
        (typing.Literal[3, 5], 3, 3),
    ],
)
def test_values_become_what_the_schema_says(kind, value, built):
    assert repr(build(kind, value, "key")) == repr(built)


def test_a_limit_inside_a_section_by_name_names_the_whole_key():
    sources = {"web": {"path": "p", "weight": -1.0}}
    with pytest.raises(ConfigError, match=r"config\.data\.sources\.web\.weight=-1\.0 must be at least 0"):
        config.resolve(BASE | {"data": BASE["data"] | {"sources": sources}})
