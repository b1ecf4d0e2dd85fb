"""Compares the ways to fine-tune one model, by the memory that each takes: all parameters, LoRA, QLoRA."""

import dataclasses
import typing

from jaxlm.config import Config
from jaxlm.plan import fit
from jaxlm.plan.accelerators import Accelerator

# Name -> the adapter's kind, how its frozen layers are kept, the optimizer ("" for the config's own).
METHODS = {
    "all parameters, adamw": ("none", "none", "adamw"),
    "all parameters, adamw8bit": ("none", "none", "adamw8bit"),
    "LoRA": ("lora", "none", ""),
    "QLoRA (nf4)": ("lora", "nf4", ""),
}
REMATS = ("none", "full")


def changed(config: Config, name: str) -> Config:
    """Returns the config with another method, in microbatches of one row on one device."""
    kind, quantize, optimizer = METHODS[name]
    adapter = dataclasses.replace(config.adapter, kind=kind, quantize=quantize)
    return fit.with_changes(dataclasses.replace(config, adapter=adapter), optimizer=optimizer, microbatch=1)


def compare(config: Config, cards: typing.Sequence[Accelerator]) -> list[dict[str, typing.Any]]:
    """Returns for each method the bytes that a step takes on one device with one row in memory, and the card that it needs.

    Args:
      config: the config, with `model.dtype` and `model.attention` set (not auto).
      cards: those to choose from.

    Returns:
      A dict for each of METHODS. method: its name. bytes: remat policy -> bytes. card: the name of the smallest card that
        holds it with the last of REMATS; None if none does.
    """
    rows = []
    for name in METHODS:
        planner = fit.Planner(changed(config, name))
        taken = {remat: planner.memory(fit.ONE_DEVICE, remat=remat, microbatch=1).total for remat in REMATS}
        large = [card for card in cards if card.memory >= taken[REMATS[-1]]]
        card = min(large, key=lambda card: (card.memory, card.usd), default=None)
        rows.append({"method": name, "bytes": taken, "card": card and card.name})
    return rows
