"""A stage made as `prepare` makes it, and applied to one text."""

import collections
import dataclasses
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
