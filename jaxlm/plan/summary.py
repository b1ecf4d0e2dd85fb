"""Makes a plan as plain values, which `jaxlm plan --json` prints and `plan.text` turns into text."""

import dataclasses
import math
from collections.abc import Sequence

from jaxlm.config import Config, MeshConfig, with_keys
from jaxlm.plan import accelerators, fit, flops, lower, rules
from jaxlm.plan.accelerators import Accelerator
from jaxlm.plan.cost import by_phase, cost, remat_factor, tokens
from jaxlm.plan.memory import Memory, abstract_mesh
from jaxlm.step import optim


def summarise(config: Config) -> dict:
    """Returns the plan of a config on `plan.mesh`, or on one device of each accelerator. Dtype and attention can't be auto."""
    prices = accelerators.load(config.plan.prices)
    chosen = (prices.named(config.plan.accelerator),) if config.plan.accelerator else prices.accelerators
    mesh = fit.parse_mesh(config.plan.mesh) if config.plan.mesh else fit.ONE_DEVICE
    fit.check_mesh(config, mesh)
    planner, made = fit.Planner(config), lower.parts_of(config, abstract_mesh(mesh, fit.devices_of(mesh)))
    microbatch = fit.own_microbatch(config, mesh)
    memory = planner.memory(mesh, microbatch=microbatch)
    rows = [_row(config, planner, mesh, memory, device) for device in chosen]
    c, by_remat = config.checkpoint, {}
    for remat in fit.REMATS:
        total = planner.memory(mesh, remat=remat, microbatch=microbatch).total
        by_remat[remat] = {"total": total, "time": remat_factor(config, remat)}  # relative to no remat
    held = fit.Planner(with_keys(config, optim={"offload": False})).memory(fit.ONE_DEVICE, microbatch=1)
    return {
        "model": _model(config),
        "training": _training(config),
        "run": _run(config),
        "recipe": rules.compare(config),
        "rates": optim.table(config.optim, made.abstract.params),
        "mesh": {"axes": dataclasses.asdict(mesh), "devices": fit.devices_of(mesh), "hosts": hosts(config, mesh)},
        "memory": {
            "microbatch": microbatch,
            "remat": config.model.remat,
            "optimizer": config.optim.name,
            "bytes": dataclasses.asdict(memory),
            "total": memory.total,
            "by_remat": by_remat,
        },
        "methods": fit.by_method(config, prices.accelerators) if config.program != "pretrain" else [],
        "accelerators": rows,
        "phases": phases(config, rows),
        "prices_as_of": prices.as_of,
        "preemptions_per_day": config.plan.preemptions_per_day,
        "restart_minutes": config.plan.restart_minutes,
        "checkpoint": {
            "every_steps": c.every_steps or config.train.steps,
            "every_minutes": c.every_minutes,
            "bytes": held.parameters + held.optimizer + held.average,
        },
    }


def phases(config: Config, rows: Sequence[dict]) -> dict | None:
    """Returns each phase's cost on an accelerator at the run's price (within 10%), else on the cheapest; None if none fits."""
    price, stop, steps = config.hardware.usd_per_hour, config.stop, config.train.steps
    fitting = [row for row in rows if row["fits"]] or [row for row in rows if row["devices"]]
    if not fitting:
        return None
    priced = [row for row in fitting if math.isclose(row["usd_per_hour"], price, rel_tol=0.1)]
    row = min(priced or fitting, key=lambda row: row["usd"])
    usd_per_hour = price or row["usd_per_hour"]
    parts = by_phase(config, row["tokens_per_second"], row["devices"], config.plan.hosts)
    limits = {f"phases.plan.{part['name']}.usd": (part["limit_usd"], part["hours"] * usd_per_hour) for part in parts}
    hours = sum(part["hours"] for part in parts)
    limits |= {"stop.usd": (stop.usd, hours * usd_per_hour), "stop.hours": (stop.hours, hours)}
    if len(parts) == 1 and not parts[0]["name"]:
        parts = []  # only the total
    parts.append({"name": "all", "last_step": steps, "steps": steps, "hours": hours, "limit_usd": stop.usd})
    return {
        "accelerator": row["name"],
        "devices": row["devices"],
        "usd_per_hour": usd_per_hour,
        "price_given": bool(price),
        "price_known": bool(priced),
        "rows": [part | {"usd": part["hours"] * usd_per_hour} for part in parts],
        "below": [{"key": key, "limit": a, "planned": b} for key, (a, b) in limits.items() if 0 < a * 1.001 < b],
    }


def hosts(config: Config, mesh: MeshConfig) -> int:
    """Returns the number of machines that the mesh spans: `plan.hosts`, or if that is 0, one for every eight devices."""
    return config.plan.hosts or -(-fit.devices_of(mesh) // 8)


def _model(config: Config) -> dict:
    m = config.model
    shape = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size", "tie_embeddings")
    return {
        "family": m.family,
        "parameters": flops.count_params(m),
        "by_component": flops.params_by_component(m),
        "shape": {key: getattr(m, key) for key in shape},
        "dtype": m.dtype,
        "attention": m.attention,
    }


def _training(config: Config) -> dict:
    """Returns the numbers of trained and frozen parameters, and the kind of training."""
    a, m = config.adapter, config.model
    added = flops.adapter_params(m, a)
    return {
        "program": config.program,
        "adapter": a.kind,
        "rank": a.rank if a.kind == "lora" else None,
        "targets": list(flops.targets(m, a)),
        "prompt_tokens": a.prompt_tokens if a.kind == "prompt" else None,
        "trained": added or flops.count_params(m),
        "frozen": flops.count_params(m) if added else 0,
        "quantize": a.quantize if added else "none",
        "reference": flops.reference(config),
    }


def _run(config: Config) -> dict:
    t, total, per_token = config.train, tokens(config), flops.of(config)._asdict()
    law = rules.stand(flops.count_params(config.model), total, config.model.vocab_size)
    return {
        "steps": t.steps,
        "batch_size": t.batch_size,
        "seq_len": t.seq_len,
        "tokens_per_step": t.batch_size * t.seq_len,
        "tokens": total,
        "flops_per_token": per_token,
        "flops": {name: value * total for name, value in per_token.items()},
        "formula": flops.formula(config),
        "multiplied": flops.multiplied(config),
        "scaling": law if config.program == "pretrain" else None,
    }


def _row(config: Config, planner: fit.Planner, mesh: MeshConfig, memory: Memory, device: Accelerator) -> dict:
    """Returns the row of one accelerator: for `plan.mesh`, or without it for as few devices as the model needs."""
    on_mesh = bool(config.plan.mesh)
    fitting = planner.largest(mesh, device.memory) if on_mesh else planner.fewest(device.memory)
    devices = fitting.devices if fitting else fit.devices_of(mesh)
    as_planned = bool(fitting) and devices == fit.devices_of(mesh)
    costs = _cost(config, device, fitting, hosts(config, mesh) if on_mesh else -(-devices // 8), devices)
    change = planner.faster(mesh, device.memory) if as_planned else planner.remedy(mesh, device.memory)
    changed = change and {key: getattr(change, key) for key in ("devices", "optimizer", "remat", "microbatch")}
    if change:  # its cost on the mesh
        then = _cost(config, device, change, hosts(config, mesh), change.devices)
        changed |= {key: then[key] for key in ("tokens_per_second", "hours", "usd")}
    return {
        "name": device.name,
        "memory": device.memory,
        "fits": as_planned and memory.total <= device.memory,
        "devices": devices if fitting else None,
        "usd_per_hour": devices * device.usd,
        "microbatch": fitting and fitting.microbatch,
        "memory_needed": fitting and fitting.memory.total,
        "mfu": costs["tokens_per_second"] * flops.of(config).palm / (devices * device.tflops * 1e12),
        "mfu_from": device.mfu_from,
        **costs,
        "remedy": None if as_planned else changed,
        "faster": changed if as_planned else None,
    }


def _cost(config: Config, device: Accelerator, fitting: fit.Fit | None, machines: int, devices: int) -> dict:
    """Returns hours and dollars with `fitting`; without it, of the config itself, with a row a device if microbatch is auto."""
    if fitting:
        config = fit.with_changes(config, fitting.optimizer, fitting.remat, fitting.microbatch)
    elif config.train.microbatch_size < 1:
        config = fit.with_changes(config, microbatch=devices)
    return cost(config, device, devices, machines)
