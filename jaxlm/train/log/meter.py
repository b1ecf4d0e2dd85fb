"""Tokens/s, MFU, seconds, dollars and time left, out of finished steps."""

import dataclasses
import pathlib
import time

import jax

from jaxlm.config import Config, HardwareConfig
from jaxlm.plan import flops
from jaxlm.plan.flops import count_params
from jaxlm.run import ledger
from jaxlm.run.clock import DATA, REPEATED, ROLLOUT, STEP, Clock
from jaxlm.run.spent import Earlier

_NONE = Earlier()
_TRAINING = (DATA, ROLLOUT, STEP, REPEATED)  # the activities that count for tokens/s


@dataclasses.dataclass
class Meter:
    """Turns finished steps into tokens/s, MFU, the seconds of each activity, dollars and time left.

    Attributes:
      flops_palm, flops_causal: FLOPs a token, by the PaLM convention and with causal attention.
      peak_flops: FLOP/s of all devices together; None if unknown, and then there is no MFU.
    """

    clock: Clock
    earlier: Earlier = _NONE
    _: dataclasses.KW_ONLY
    tokens_per_step: int
    usd_per_hour: float
    flops_palm: float = 0.0
    flops_causal: float = 0.0
    peak_flops: float | None = None
    _mark: tuple[int, float] | None = None  # a step, and the seconds of training until then

    def now(self, step: int) -> dict[str, float]:
        """Returns the fields of every record, for all starts together; `goodput`: the time share of new steps and rollouts."""
        seconds = {name: round(spent, 3) for name, spent in self.clock.seconds().items()}
        wall = sum(seconds.values())
        cost = self.earlier.with_now(wall, self.usd_per_hour)
        return {
            "step": step,
            "tokens": step * self.tokens_per_step,
            "time": round(time.time(), 3),
            "wall_s": round(wall, 3),
            "cost_usd": round(cost, 6),
            "goodput": round((seconds[STEP] + seconds[ROLLOUT]) / wall, 4) if wall else 0.0,
        } | {f"time/{name}_s": spent for name, spent in seconds.items()}

    def measure(self, step: int, total: int) -> dict[str, float]:
        """Returns `now`, and the speed since the last call: tokens/s, MFU, seconds of steps left until step `total`.

        The speed counts steps and the waits for their batches. The first call, whose step may compile, returns no speed.
        """
        record, spent = self.now(step), self.clock.seconds()
        training = sum(spent[name] for name in _TRAINING)
        if self._mark and step > self._mark[0]:
            seconds = max(training - self._mark[1], 1e-9)
            speed = (step - self._mark[0]) * self.tokens_per_step / seconds
            record |= {"tokens_per_second": speed, "eta_s": (total - step) * self.tokens_per_step / speed}
            if self.peak_flops:
                record |= {
                    "mfu_palm": speed * self.flops_palm / self.peak_flops,
                    "mfu_causal": speed * self.flops_causal / self.peak_flops,
                }
        self._mark = (step, training)
        return record

    def of_flops(self, per_token: flops.FlopsPerToken, hardware: HardwareConfig) -> "Meter":
        """Returns a meter that measures MFU too, of all devices of this program."""
        peak = _peak_tflops(hardware)
        peak_flops = peak * 1e12 * jax.device_count() if peak else None
        return dataclasses.replace(
            self, flops_palm=per_token.palm, flops_causal=per_token.causal, peak_flops=peak_flops
        )


def recounted(folder: pathlib.Path, config: Config) -> str:
    """Returns a line if the previous start's MFU counted lookup tables, as older versions did; else ""."""
    starts, parameters = ledger.read(folder)["starts"], count_params(config.model)
    looked_up = parameters - flops.multiplied(config)
    if not starts or "flops_per_token" in starts[-1] or not looked_up or not _peak_tflops(config.hardware):
        return ""
    return (
        f"MFU steps down here, the speed does not: {looked_up:,} of {parameters:,} parameters are only looked up, and no "
        "longer count as matrix products"
    )


def _peak_tflops(hardware: HardwareConfig) -> float | None:
    return hardware.peak_tflops or flops.peak_tflops(jax.devices()[0].device_kind)
