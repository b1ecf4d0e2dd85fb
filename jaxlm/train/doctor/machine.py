"""This machine as JAX has it: the checks that need devices, in the terms of one config."""

import contextlib
import dataclasses
import functools
import pathlib
import tempfile

import jax
from jax.sharding import Mesh

from jaxlm import files, processes
from jaxlm.config import Config
from jaxlm.plan import bench, machines, room, settle, tune
from jaxlm.plan.params import count_params
from jaxlm.train import workdir
from jaxlm.train.doctor import checkpoint, compute, devices, hosts, loader
from jaxlm.train.doctor.findings import OK, Finding


def start(config: Config) -> "Machine":
    """Starts JAX as training does. Raises ConfigError if this machine can't have the config's mesh, flags or model."""
    mesh = processes.start(config.hardware, config.distributed, config.mesh, config.model.dtype)
    settled = settle.on_platform(settle.sized(config, processes.say), jax.devices()[0].platform)
    return Machine(settled.asked, settled.runs, mesh)


class Machine:
    """The checks of one config on this machine's devices. Each returns findings, may raise, and is to be bounded in time.

    Args:
      asked: the config as it was given.
      config: the same with `model.attention` and `model.dtype` chosen.
      mesh: the devices.
    """

    def __init__(self, asked: Config, config: Config, mesh: Mesh):
        self._asked, self._config, self._mesh = asked, config, mesh
        self._fitted: Config | None = None  # with all that is chosen at a start
        self._measured: float | None = None  # tokens per second of the step

    @functools.cached_property
    def _need(self) -> devices.Need:
        return devices.need(self._config, self._mesh, self._asked.model.dtype)

    @functools.cached_property
    def _product(self) -> float:
        return bench.product(self._config.model.dtype)

    @property
    def who(self) -> str:
        """Returns what to put before the names of findings: the process's number where there are several."""
        return f"{jax.process_index()}: " if jax.process_count() > 1 else ""

    @property
    def checkpoint_bytes(self) -> int:
        """Returns the bytes of one checkpoint."""
        return self._need.checkpoint

    def present(self, has_gpu: bool) -> Finding:
        """Returns a finding on the devices themselves."""
        return devices.present(has_gpu)

    def fits_the_run(self) -> Finding:
        """Returns a finding on what training would refuse at its start: batch, mesh, offload, another model in WORKDIR."""
        with contextlib.ExitStack() as stack:
            folder = self._config.workdir or stack.enter_context(tempfile.TemporaryDirectory())
            there = pathlib.Path(folder).exists()
            workdir.check(dataclasses.replace(self._config, workdir=folder), self._mesh)
            if not there:
                pathlib.Path(folder).rmdir()
            elif (pathlib.Path(folder) / ".lock").exists():
                files.lock(pathlib.Path(folder), "trains in", "workdir").close()
        said: list[str] = []
        self._fitted = tune.fit(self._config, self._mesh, said.append)
        shape = " x ".join(f"{axis} {size}" for axis, size in self._mesh.shape.items())
        m = self._fitted.model
        text = f"mesh {shape}; attention {m.attention}, {m.dtype}, remat {m.remat}"
        return Finding("config", OK, "; ".join([text, *said]), {"mesh": dict(self._mesh.shape)})

    def memory(self) -> list[Finding]:
        """Returns findings on the memory of devices and host against the plan."""
        return [devices.device_memory(self._need), devices.host_memory(self._need)]

    def checkpoint(self) -> Finding:
        """Returns a finding on a tiny checkpoint in the run's folder."""
        return checkpoint.trial(self._config.workdir, self._mesh)

    def links(self) -> list[Finding]:
        """Returns findings on the links between devices and hosts."""
        return [hosts.links(self._mesh), *filter(None, [hosts.shared_memory()])]

    def forward(self) -> Finding:
        """Returns a finding on equal forward passes."""
        free = room.available_bytes() if jax.default_backend() == "cpu" else self._need.step
        return compute.twice(self._config, self._mesh, free)

    def speed(self) -> Finding:
        """Returns a finding on the speed of the step; of a matrix product alone where a step would take minutes."""
        if self._fitted is None:
            return Finding("speed", OK, "not timed: the config does not fit this machine")
        if jax.default_backend() == "cpu" and count_params(self._config.model) > compute.CPU_PARAMS:
            text = f"a matrix product makes {self._product / 1e12:.3g} TFLOP/s; a step of this model takes minutes on a CPU: "
            return Finding("speed", OK, text + "not timed", {"product_flops": self._product})
        finding = compute.speed(self._fitted, self._mesh, self._product)
        self._measured = finding.figures["tokens_per_second"]
        return finding

    def loader(self) -> Finding:
        """Returns a finding on the loader against the step: as measured now, as known of such devices, or at most."""
        known = None
        if self._fitted is not None:
            setting = machines.key(self._fitted, self._mesh.shape)
            known = machines.known(jax.devices()[0].device_kind, self._mesh.size, setting)
        needed = self._measured or (known and known.tokens_per_second)
        bound = compute.most_tokens_per_second(self._config, self._mesh, self._product)
        return loader.check(self._config, self._mesh, needed or bound, certain=bool(needed))

    def clock(self, began: tuple[float, float]) -> Finding:
        """Returns a finding on the clock since `began` (`hosts.now`)."""
        return hosts.clock(began, hosts.now(), hosts.clocks())
