"""Says in plain words what goes wrong while a model learns to answer: it forgets its base, or its answers do not end."""

import pathlib

from jaxlm.run import metrics

_MOST_FORGOTTEN = 0.02  # of the base's bits per byte
_FEWEST_ENDED = 0.5
_BASE, _CHANGE, _ENDED = "val/base/bits_per_byte", "val/base/change", "samples/ended"


class Remarks:
    """Looks at the figures of evaluations and of samples: `(step, figures) -> (more figures, lines for the user)`.

    Args:
      before: the bits per byte of the base's text before the first step; None if they are not known yet. Those that are
        measured at step 0 take their place.
      replay: the share of the targets that is pretraining text.
    """

    def __init__(self, before: float | None, replay: float):
        self._before, self._replay = before, replay

    def __call__(self, step: int, figures: dict[str, float]) -> tuple[dict[str, float], list[str]]:
        if step == 0:
            self._before = figures.get(_BASE, self._before)
            return {}, []
        more, lines = self._forgotten(figures)
        return more, lines + self._endless(figures)

    def _forgotten(self, figures: dict[str, float]) -> tuple[dict[str, float], list[str]]:
        now = figures.get(_BASE)
        if now is None or not self._before:
            return {}, []
        change = now / self._before - 1
        line = f"the base's own text: {now:.4f} bits per byte, {change:+.1%} since the first step"
        if change > _MOST_FORGOTTEN:
            more = (
                f"more replay (replay.share={self._replay:g} now), " if self._replay else "replay (replay.share=0.05), "
            )
            line += f"; it forgets what it knew: {more}a lower optim.lr, fewer steps, or LoRA (adapter.kind=lora) help"
        return {_CHANGE: change}, [line]

    def _endless(self, figures: dict[str, float]) -> list[str]:
        ended = figures.get(_ENDED, 1.0)
        if ended >= _FEWEST_ENDED:
            return []
        return [
            f"{1 - ended:.0%} of the answers do not end within sample.max_new_tokens: if that stays so to the last step, train "
            "longer or at a higher optim.lr, or look at the data: do its answers end?"
        ]


def before(folder: pathlib.Path) -> float | None:
    """Returns the bits per byte of the base's text that an earlier start of a run measured at step 0; None if none did."""
    measured = (
        record.get(_BASE)
        for record in metrics.records(folder / "metrics.jsonl", containing=f'"{_BASE}')
        if record.get("step") == 0
    )
    return next((value for value in measured if value is not None), None)
