"""Documents that keep their places in the order of batches and teach nothing, as if they said something else."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping

import numpy as np

from jaxlm.config import ConfigError
from jaxlm.corpus import lists
from jaxlm.data.shards import removal
from jaxlm.data.shards.shards import DataDir


@dataclasses.dataclass(frozen=True)
class Removed:
    """The training documents of a list by `jaxlm trace --remove`.

    Attributes:
      sha256: of the list.
      places: source -> int64[N, 2], sorted: where a document begins in its stream, separator included, and where it ends.
      token: the id that all their tokens become.
    """

    sha256: str
    places: Mapping[str, np.ndarray]
    token: int

    def near(self, source: str, first: int, last: int) -> np.ndarray:
        """Returns the places that hold one of the tokens [first, last) of a source."""
        places_Nx2 = self.places.get(source, np.empty((0, 2), np.int64))
        begin = np.searchsorted(places_Nx2[:, 1], first, side="right")
        return places_Nx2[begin : np.searchsorted(places_Nx2[:, 0], last)]

    def blank(self, source: str, first: int, row_T1: np.ndarray, weights_T: np.ndarray) -> None:
        """Overwrites the documents' tokens in a row that begins at token `first` of a source, and sets weights to 0.

        Weight 0: each target inside a document, and the first one after it. The separator that opens a document is the
        target of the document before, and stays.
        """
        for start, end in (self.near(source, first, first + len(row_T1)) - first).tolist():
            row_T1[max(0, start + 1) : end] = self.token
            weights_T[max(0, start) : end] = 0


def read(data: DataDir, path: pathlib.Path) -> Removed:
    """Reads a list. Held-out documents are left out: losses stay comparable.

    Raises ConfigError if the list can't be read, a document is not in the data with this text, or none is for training.
    """
    if data.separator_id == data.eos_id and "separator_id" not in data.manifest["tokenizer"]:
        raise ConfigError(f"{data.path} is of an older recipe, in which EOS ends documents: tokenize the data anew")
    found = removal.places(data, lists.read(path, "--without"))
    places = {source: np.array(sorted(found[source, split]), np.int64) for source, split in found if split == "train"}
    if not places:
        raise ConfigError(f"all documents of {path} are held out: training never reads them")
    ordinary = np.flatnonzero(data.token_bytes() > 0)
    token = int(ordinary[ordinary != data.separator_id][0])
    return Removed(hashlib.sha256(path.read_bytes()).hexdigest(), places, token)
