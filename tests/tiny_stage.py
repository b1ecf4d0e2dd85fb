"""A stage made as `prepare` makes it, and applied to one text."""

import collections
import dataclasses
import json
import pathlib

from jaxlm.configs import base
from jaxlm.corpus.stage import Document, Remove, Stage
from jaxlm.corpus.stages import registry


@dataclasses.dataclass
class Outcome:
    """Of a document: `removed` is None if it stays."""

    removed: Remove | None
    text: str
    metadata: dict
    edits: collections.Counter

    @property
    def reason(self) -> str:
        return self.removed.reason if self.removed else ""


def make(line: str, folder: pathlib.Path | None = None, **settings) -> Stage:
    """`line` as in a config; `settings` for values that hold spaces. Builds in `folder` if there is one."""
    spec = registry.parse(line, base.get_config().prepare.stages.to_dict(), "test")
    spec.settings.update(settings)
    if folder is not None:
        registry.stage_class(spec.name).build(registry.typed_settings(spec), folder / spec.key)
    return registry.make(spec, folder or pathlib.Path())


def apply(stage: Stage, text: str, **metadata) -> Outcome:
    """What the stage makes of a text."""
    document = Document(text=text, id="test", metadata=metadata)
    edits = collections.Counter()
    removed = stage.apply(document, edits)
    return Outcome(removed, document.text, document.metadata, edits)


# The sets in tests/corpus/sets

SETS = pathlib.Path(__file__).parent / "corpus" / "sets"


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (SETS / name).read_text(encoding="utf-8").splitlines()]


def words(text: str) -> str:
    """Returns a text without line breaks, soft hyphens and the escapes of cells."""
    return " ".join(text.replace("\\|", "|").replace("\xad", "").split())


def pii(cases: list[dict], told: bool = True) -> tuple[list[str], list[str]]:
    """Returns (texts whose personal data stays, texts without any that are changed). `told`: the stage knows the language."""
    stage, missed, wrong = make("pii"), [], []
    for row in cases:
        text = apply(stage, row["text"], format="text", **({"language": row["language"]} if told else {})).text
        if row["find"]:
            missed += [row["text"]] if row["find"] in text else []
        else:
            wrong += [text] if text != row["text"] else []
    return missed, wrong
