"""Compares the recipe that made a folder with the recipe of this run."""

import pathlib
from collections.abc import Mapping

from jaxlm.config import ConfigError

PREPARED = "prepared.json"  # of finished documents in a data directory; of finished shards it is `manifest.MANIFEST`


def check_same(
    built: Mapping[str, object], wanted: Mapping[str, object], *, made: str, manifest: pathlib.Path, again: str
) -> None:
    """Raises ConfigError if two recipes differ. The message names the first key that differs, and how to go on.

    Args:
      built: the recipe in the folder's manifest.
      wanted: the recipe of this run. Its keys are compared first, then those that only `built` has.
      made: the beginning of the message: "DATA was prepared".
      manifest: the file to delete if the new recipe is wanted.
      again: what happens after that: "prepare it again".
    """
    for key in [*wanted, *(key for key in built if key not in wanted)]:
        was, now = built.get(key), wanted.get(key)
        if was == now:
            continue
        if isinstance(was, dict) and isinstance(now, dict):  # of settings, show those that differ
            was, now = ({k: v for k, v in a.items() if b.get(k) != v} for a, b in ((was, now), (now, was)))
        raise ConfigError(
            f"{made} with {key} = {was}, now it is {now}; set another data.dir, or delete {manifest} to {again}"
        )
