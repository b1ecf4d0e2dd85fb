"""This machine as JAX has it: the checks that need devices, in the terms of one config."""

import contextlib
import dataclasses
import functools
import pathlib
import tempfile

import jax
from jax.sharding import Mesh

from jaxlm.config import Config
from jaxlm.data.batches.open import open_order
from jaxlm.data.shards.shards import MANIFEST
from jaxlm.devices import processes
from jaxlm.host import files
from jaxlm.plan import accelerators, lower, settle
from jaxlm.plan.doctor import checkpoint, compute, devices, hosts
from jaxlm.plan.doctor.findings import OK, Finding
from jaxlm.plan.params import count_params
from jaxlm.plan.tune import bench, tune
from jaxlm.run import workdir


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

    @functools.cached_property
    def _need(self) -> devices.Need:
        return devices.need(self._config, self._mesh, self._asked.model.dtype)

    @property
    def who(self) -> str:
        """Returns what to put before the names of findings: the process's number where there are several."""
        return f"{jax.process_index()}: " if jax.process_count() > 1 else ""

    @property
    def checkpoint_bytes(self) -> int:
        return self._need.checkpoint

    def present(self, has_gpu: bool) -> Finding:
        return devices.present(has_gpu)

    def fits_the_run(self) -> Finding:
        """Returns a finding on what training would refuse: batch, mesh, offload, the data, another model in WORKDIR."""
        c = self._config
        with contextlib.ExitStack() as stack:
            folder = pathlib.Path(c.workdir or stack.enter_context(tempfile.TemporaryDirectory()))
            there = folder.exists()
            workdir.check(dataclasses.replace(c, workdir=str(folder)), self._mesh)
            accelerators.check_price(c, self._mesh.devices.flat[0].device_kind, self._mesh.size)
            if not there:
                folder.rmdir()
            elif (folder / ".lock").exists():
                files.lock(folder, "trains in", "workdir").close()
        if c.program == "pretrain" and c.data.dir and (pathlib.Path(c.data.dir) / MANIFEST).exists():
            open_order(c)
        said: list[str] = []
        self._fitted = tune.fit(c, self._mesh, said.append)
        shape = " x ".join(f"{axis} {size}" for axis, size in self._mesh.shape.items())
        m = self._fitted.model
        text = f"mesh {shape}; attention {m.attention}, {m.dtype}, remat {m.remat}"
        return Finding("config", OK, "; ".join([text, *said]), {"mesh": dict(self._mesh.shape)})

    def memory(self) -> list[Finding]:
        """Returns findings on the memory of devices and host against the plan."""
        free = lower.available_bytes()
        return [devices.device_memory(self._need, free), devices.host_memory(self._need, free)]

    def checkpoint(self) -> Finding:
        """Returns a finding on a tiny checkpoint in the run's folder."""
        return checkpoint.trial(self._config.workdir, self._mesh)

    def links(self) -> list[Finding]:
        """Returns findings on the links between devices and hosts."""
        return [hosts.links(self._mesh), *hosts.shared_memory()]

    def forward(self) -> Finding:
        """Returns a finding on equal forward passes."""
        free = lower.available_bytes() if jax.default_backend() == "cpu" else self._need.step
        return compute.twice(self._config, self._mesh, free)

    def speed(self) -> Finding:
        """Returns a finding on the speed of the step; of a matrix product alone where a step would take minutes."""
        if self._fitted is None:
            return Finding("speed", OK, "not timed: the config does not fit this machine")
        product = bench.product(self._config.model.dtype)
        if jax.default_backend() == "cpu" and count_params(self._config.model) > compute.CPU_PARAMS:
            text = f"a matrix product makes {product / 1e12:.3g} TFLOP/s; a step of this model takes minutes on a CPU: "
            return Finding("speed", OK, text + "not timed", {"product_flops": product})
        return compute.speed(self._fitted, self._mesh, product)

    def clock(self, began: tuple[float, float]) -> Finding:
        """Returns a finding on the clock since `began` (`hosts.now`)."""
        return hosts.clock(began, hosts.now(), hosts.clocks())
