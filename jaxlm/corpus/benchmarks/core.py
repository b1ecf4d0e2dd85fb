"""Rows of the CORE bundle in their three types (DCLM, Li et al. 2024, arXiv:2406.11794), as in nanochat.

{"query": ..., "choices": [...], "gold": 1}                      MultipleChoice: which choice follows the query
{"context_options": [...], "continuation": ..., "gold": 0}       Schema: after which context the continuation follows
{"context": ..., "continuation": ...}                            LanguageModeling: does the continuation follow
"""

import dataclasses

from jaxlm.config import ConfigError
from jaxlm.corpus.benchmarks import reading


@dataclasses.dataclass(frozen=True)
class MultipleChoice:
    """A query, its choices, and the index of the right choice, from 0."""

    query: str
    choices: tuple[str, ...]
    gold: int


@dataclasses.dataclass(frozen=True)
class Schema:
    """Contexts, their continuation, and the index of the right context, from 0."""

    context_options: tuple[str, ...]
    continuation: str
    gold: int


@dataclasses.dataclass(frozen=True)
class LanguageModeling:
    """A context and its continuation."""

    context: str
    continuation: str


Row = MultipleChoice | Schema | LanguageModeling
# As the bundle's core.yaml calls them (`icl_task_type`).
TYPES = {"multiple_choice": MultipleChoice, "schema": Schema, "language_modeling": LanguageModeling}


def kind(record: dict) -> type[Row] | None:
    """Returns the row type whose fields a record has, perhaps among others; None if it is no row of CORE."""
    fields = {each: [field.name for field in dataclasses.fields(each)] for each in TYPES.values()}
    return next((each for each, names in fields.items() if all(name in record for name in names)), None)


def row(record: dict) -> Row:
    """Returns a record as a row. Raises ValueError if a field is missing or of a wrong type."""
    row_type = kind(record)
    if row_type is None:
        raise ValueError(f"it has the fields {', '.join(record)}, which are no row of CORE")
    taken = {field.name: record[field.name] for field in dataclasses.fields(row_type)}
    for name, value in taken.items():
        if name in ("choices", "context_options"):
            if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
                raise ValueError(f"{name} is no list of texts")
            taken[name] = tuple(value)
            options = len(value)
        elif name != "gold" and not isinstance(value, str):
            raise ValueError(f"{name} is no text")
    if "gold" in taken and (type(taken["gold"]) is not int or not 0 <= taken["gold"] < options):
        raise ValueError(f"gold is {taken['gold']!r}, of {options} options")
    return row_type(**taken)


def rows(path: str) -> list[Row]:
    """Returns a file's rows. Raises ConfigError if it can't be read, has no rows, or its rows are not all of one type."""
    checked: list[Row] = []
    for number, record in reading.records(path):
        try:
            checked.append(row(record))
        except ValueError as error:
            raise ConfigError(f"{path}:{number} is no row of CORE: {error}") from None
        if type(checked[-1]) is not type(checked[0]):
            raise ConfigError(
                f"{path}:{number} is {type(checked[-1]).__name__}, the first row {type(checked[0]).__name__}: "
                "all rows of a file must be of one type"
            )
    if not checked:
        raise ConfigError(f"{path} holds no row")
    return checked
