"""Writes the text of `jaxlm plan`."""

import math
import typing

from jaxlm.console import dollars, gigabytes, hours, human, table
from jaxlm.data import passes

_REMEDY = {"optimizer": "optim.name", "remat": "model.remat", "microbatch": "train.microbatch_size"}


def render(plan: dict[str, typing.Any]) -> str:
    """Returns a plan as text.

    Args:
      plan: the dict that `summary.summarise` returns. If the step was compiled, its key `compiled` has the dict that
        `compiled.compile_step` returns.
    """
    parts = [_model(plan), _tokens(plan), _memory(plan), _table(plan), _notes(plan)]
    if "compiled" in plan:
        parts.insert(3, _compiled(plan["compiled"]))
    return "\n\n".join(part for part in parts if part)


def _model(plan: dict) -> str:
    m, s = plan["model"], plan["model"]["shape"]
    parts = ", ".join(f"{name} {human(n)}" for name, n in m["by_component"].items() if n)
    tied = "tied" if s["tie_embeddings"] else "untied"
    return (
        f"MODEL  {m['parameters']:,} parameters ({parts})\n"
        f"  {m['family']}, {s['n_layers']} layers, d {s['d_model']:,}, {s['n_heads']}/{s['n_kv_heads']} heads of "
        f"{s['head_dim']}, feed-forward {s['d_ff']:,}, vocabulary {s['vocab_size']:,} ({tied})"
    )


def _tokens(plan: dict) -> str:
    run, law = plan["run"], plan["run"]["scaling"]
    ratio = law["tokens_per_param"] / (law["optimal_tokens"] / plan["model"]["parameters"])
    stand = "about Chinchilla's optimum" if 0.8 < ratio < 1.25 else f"{ratio:.2g} x Chinchilla's optimum"
    fits = ", ".join(human(n) for n in law["optimal_by_law"].values())
    losses = ", ".join(f"{n:.2f}" for n in law["loss_by_law"].values())
    names = " and ".join(name.partition("(")[2].rstrip(")") for name in law["loss_by_law"])
    per, total = run["flops_per_token"], run["flops"]
    beyond = law["loss"] > math.log(plan["model"]["shape"]["vocab_size"])
    return (
        f"TOKENS  {human(run['tokens'])} = {run['steps']:,} steps x {run['batch_size']} rows x {run['seq_len']:,}\n"
        f"  {law['tokens_per_param']:.3g} a parameter: {stand} (20 a parameter: {human(law['optimal_tokens'])}; "
        f"by the two laws below: {fits})\n"
        f"FLOPS  {per['palm'] / 1e9:.3g} GFLOP a token by 6N + 12LdT ({per['six_n'] / 1e9:.3g} by 6N, "
        f"{per['causal'] / 1e9:.3g} causal); {total['palm']:.2e} in all\n"
        f"LOSS  {law['loss']:.2f} nats a token at the end, in {law['low']:.2f} to {law['high']:.2f} ({losses} by {names})\n"
        "  Those laws were fitted with another tokenizer on other text: compare plans by it, not with a loss that you see."
        + ("\n  More than guessing among the vocabulary: far outside of what they were fitted on." if beyond else "")
        + _data(plan)
    )


def _data(plan: dict) -> str:
    """How many times the run reads its data; "" if there is no data yet."""
    if not (found := plan.get("data")):
        return ""
    epochs = ", ".join(f"{name} {n:.2g}" for name, n in found["epochs"].items())
    text = f"\nDATA  {human(sum(found['tokens'].values()))} tokens in {found['dir']}; times through: {epochs}"
    if max(found["epochs"].values(), default=0) > passes.MOST:
        text += "\n  Beyond about four times a token teaches less than a new one (arXiv:2305.16264): "
        text += "get more, or take fewer steps."
    return text


def _memory(plan: dict) -> str:
    memory, mesh = plan["memory"], plan["mesh"]
    named = ", ".join(f"{axis} {size}" for axis, size in mesh["axes"].items() if size > 1)
    devices = f"each of {mesh['devices']} devices ({named})" if named else "one device"
    rows = [[name, gigabytes(size)] for name, size in memory["bytes"].items()]
    rows.append(["total", gigabytes(memory["total"])])
    notes = {
        "optimizer": memory["optimizer"],
        "gradients": "summed over microbatches",
        "copies": f"of parameters, in {plan['model']['dtype']}",
        "activations": f"remat {memory['remat']}",
        "workspace": "a layer's backward pass, the loss or the update",
    }
    lines = table(
        [[f"  {name}", size, notes.get(name, "") if size != "0.00" else ""] for name, size in rows], right=[1]
    )
    return (
        f"MEMORY of {devices}, GB: microbatch {memory['microbatch']} of {plan['run']['batch_size']} rows, "
        f"{plan['model']['dtype']}, attention {plan['model']['attention']}\n{lines}"
    )


def _compiled(c: dict) -> str:
    lines = [
        f"COMPILED for {c['target']} in {c['seconds']:.0f} s: {gigabytes(c['memory'])} GB on each"
        + (f" ({c['memory_note']})" if c["memory_note"] else "")
    ]
    whole = c["largest_replicated"]
    lines.append(
        f"  parameters: {gigabytes(4 * c['parameters_per_device'])} GB of float32 on each device; left whole on all: "
        + (
            f"{c['replicated']} of them, the largest {whole['name']} with {human(whole['elements'])} numbers"
            if whole
            else "none"
        )
    )
    for row in c["collectives"]:
        lines.append(f"  {row['kind']:<20}{row['times']:>7,} a step{gigabytes(row['bytes']):>9} GB")
    if not c["collectives"]:
        lines.append("  devices send each other nothing")
    return "\n".join(lines)


def _table(plan: dict) -> str:
    sources = list(dict.fromkeys(row["mfu_from"] for row in plan["accelerators"] if row["mfu_from"]))
    head = [
        "ACCELERATORS",
        "GB",
        "as is",
        "devices",
        "microbatch",
        "tokens/s",
        "time",
        "on demand",
        "spot",
        "1B tokens",
        "MFU",
    ]
    rows = [head]
    for row in plan["accelerators"]:
        origin = f"published [{sources.index(row['mfu_from']) + 1}]" if row["mfu_from"] else "assumed"
        cells = [row["name"], gigabytes(row["memory"], 0), "yes" if row["fits"] else "no"]
        if row["devices"] is None:
            cells += ["-"] * 7
        else:
            cells += [str(row["devices"]), str(row["microbatch"]), human(row["tokens_per_second"]), hours(row["hours"])]
            cells += [dollars(row["usd"]), dollars(row["usd_spot"]), dollars(row["usd_per_billion"])]
        rows.append([*cells, f"{row['mfu']:.0%} {origin}"])
    notes = [f"  [{i}] {source}" for i, source in enumerate(sources, 1)]
    return "\n".join([table(rows, right=range(1, len(head) - 1)), *notes])


def _notes(plan: dict) -> str:
    memory, alone = plan["memory"], plan["mesh"]["devices"] == 1
    rows = plan["accelerators"]
    lines = [
        "NOTES",
        f"  as is: with microbatch {memory['microbatch']}, {gigabytes(memory['total'])} GB a device. microbatch: the largest "
        f"that fits with remat {memory['remat']} and {memory['optimizer']}.",
    ]
    if alone:
        lines.append(
            "  devices: the fewest that hold the model by mesh.fsdp; --config.plan.mesh=fsdp:8 plans for eight."
        )
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row["devices"] != plan["mesh"]["devices"]:
            groups.setdefault(_advice(row, plan), []).append(row["name"])
    for advice, names in groups.items():
        who = "all" if len(names) == len(rows) else ", ".join(names)
        lines.append(f"  {who}: {advice}")
    lines.append(
        f"  spot: {plan['preemptions_per_day']:g} preemptions a day and host, each losing {plan['restart_minutes']:g} minutes "
        f"and half of {plan['checkpoint_every']:,} steps."
    )
    if any(row["usd_spot"] is None or row["usd_spot"] > row["usd"] for row in rows if row["devices"]):
        lines.append("  Where spot costs more than on demand, save more often (checkpoint.every_steps).")
    lines += [
        f"  Prices of {plan['prices_as_of']}, from no live offer: put yours into a copy and give it as config.plan.prices.",
        "  MFU: none is jaxlm's own. Published figures are of a 1.04B model on one device; smaller models and links between",
        "  devices make it less.",
    ]
    return "\n".join(lines)


def _advice(row: dict, plan: dict) -> str:
    devices = f"{plan['mesh']['devices']} devices" if plan["mesh"]["devices"] > 1 else "one device"
    if not row["remedy"]:
        return f"{devices} can't hold it with any remat policy or 8-bit AdamW."
    own = {"optimizer": plan["memory"]["optimizer"], "remat": plan["memory"]["remat"]}
    changes = [f"{_REMEDY[key]}={row['remedy'][key]}" for key in own if row["remedy"][key] != own[key]]
    changes.append(f"{_REMEDY['microbatch']}={row['remedy']['microbatch']}")
    return f"{devices} would do with {', '.join(changes)}."
