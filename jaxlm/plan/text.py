"""Writes the text of `jaxlm plan`."""

import datetime
import sys
import textwrap

from jaxlm.data.batches.document_rows import MOST_PASSES
from jaxlm.host import screen
from jaxlm.host.console import dollars, gigabytes, hours, human, size, table

WIDTH = 100  # columns
# A ladder's law is a guess beyond this multiple of its largest run: twice the width is 3 to 8 times the parameters.
FAR = {"parameters": 10, "tokens": 2}
BUSY = 0.5  # load per core above which a measurement on a CPU says little


def render(plan: dict) -> str:
    parts = {"model": _model, "run": _tokens, "recipe": _recipe, "rates": _rates, "memory": _memory}
    parts |= {"methods": _methods, "disk": _disk, "compiled": _compiled, "accelerators": _table}
    parts |= {"phases": _phases, "prices_as_of": _notes}
    return "\n\n".join(part(plan) for key, part in parts.items() if plan.get(key))


def _model(plan: dict) -> str:
    m, s = plan["model"], plan["model"]["shape"]
    parts = ", ".join(f"{name} {human(n)}" for name, n in m["by_component"].items() if n)
    shape = (
        f"{m['family']}, {s['n_layers']} layers, d {s['d_model']:,}, {s['n_heads']}/{s['n_kv_heads']} heads of "
        f"{s['head_dim']}, feed-forward {s['d_ff']:,}, vocabulary {s['vocab_size']:,} "
        f"({'tied' if s['tie_embeddings'] else 'untied'})"
    )
    return block(f"MODEL  {m['parameters']:,} parameters ({parts})") + "\n" + wrapped(shape)


def _tokens(plan: dict) -> str:
    run = plan["run"]
    text = f"TOKENS  {human(run['tokens'])} = {run['steps']:,} steps x {run['batch_size']} rows x {run['seq_len']:,}"
    if run["scaling"]:
        lines = [text, _chinchilla(plan), _flops(plan), _loss(run["scaling"]), _ladder(plan), _data(plan)]
    else:
        lines = [_training(plan["training"]), text, _flops(plan)]
    return "\n".join(filter(None, lines))


def _chinchilla(plan: dict) -> str:
    law = plan["run"]["scaling"]
    ratio = law["tokens_per_param"] / (law["optimal_tokens"] / plan["model"]["parameters"])
    stand = "about Chinchilla's optimum" if 0.8 < ratio < 1.25 else f"{ratio:.2g} x Chinchilla's optimum"
    fits = ", ".join(human(n) for n in law["optimal_by_law"].values())
    return wrapped(
        f"{law['tokens_per_param']:.3g} a parameter: {stand} (20 a parameter: {human(law['optimal_tokens'])}; "
        f"by two laws: {fits})"
    )


def _flops(plan: dict) -> str:
    run, parameters = plan["run"], plan["model"]["parameters"]
    looked_up = parameters - run["multiplied"]
    what = f"\n  N leaves out {human(looked_up)} of {human(parameters)} parameters, which are only looked up"
    per, total, (products, attention) = run["flops_per_token"], run["flops"], run["formula"]
    return (
        f"FLOPS  {per['palm'] / 1e9:.3g} GFLOP a token by {products} + {attention} ({per['products'] / 1e9:.3g} by "
        f"{products}, {per['causal'] / 1e9:.3g} causal); {total['palm']:.2e} in all{what * bool(looked_up)}"
    )


def _training(t: dict) -> str:
    """Returns the trained and the frozen parameters in words, and how the reference runs."""
    kinds = {
        "none": "all parameters",
        "lora": f"LoRA of rank {t['rank']} for {', '.join(t['targets'])}",
        "prompt": f"a prompt of {t['prompt_tokens']} vectors",
    }
    form = {"none": "in the compute type", "nf4": "layers in nf4", "int8": "layers in int8"}[t["quantize"]]
    frozen = f"; {human(t['frozen'])} frozen, {form}" if t["frozen"] else ""
    lines = [f"TRAINED ({t['program']})  {kinds[t['adapter']]}: {human(t['trained'])}{frozen}"]
    how = {
        "once": "judged once before step 0 and kept; its time is counted for one pass over the run's tokens",
        "each step": "the frozen model alone, a second forward pass in each step",
        "each batch": "judges each batch before its updates; with all parameters trained it is a second model in memory",
    }
    lines += [f"REFERENCE  {how[t['reference']]}"] if t["reference"] else []
    return "\n".join(block(line) for line in lines)


def _loss(law: dict) -> str:
    if law["loss"] is None:
        return "LOSS  no forecast: this run is far outside of what the published laws were fitted on"
    losses = ", ".join(f"{n:.2f}" for n in law["loss_by_law"].values())
    names = " and ".join(name.partition("(")[2].rstrip(")") for name in law["loss_by_law"])
    return block(
        f"LOSS  {law['loss']:.2f} nats a token at the end, in {law['low']:.2f} to {law['high']:.2f} "
        f"({losses} by {names}), of another tokenizer on other text: compare plans by it, not with a measured loss"
    )


def _ladder(plan: dict) -> str:
    """Returns the loss that the ladder predicts; "" if there is no ladder."""
    if not (ladder := plan.get("ladder")):
        return ""
    far = [f"{times:.2g} times their {what}" for what, times in ladder["beyond"].items() if times > FAR[what]]
    guess = f"; a guess, since it has {', '.join(far)}" if far else ""
    return block(
        f"LADDER  {ladder['loss']:.3f} held-out nats a token at the end, 80% in {ladder['low']:.3f} to "
        f"{ladder['high']:.3f}, by the runs in {ladder['dir']}{guess}"
    )


def _data(plan: dict) -> str:
    """How many times the run reads its data; "" if there is no data yet."""
    if not (data := plan.get("data")):
        return ""
    epochs = ", ".join(f"{name} {n:.2g}" for name, n in data["epochs"].items())
    tokens = f"DATA  {human(sum(data['tokens'].values()))} tokens in {data['dir']}; times through: {epochs}"
    lines = [block(tokens)]
    if data.get("mixture"):
        lines.append(wrapped(f"Mixture: {data['mixture']}."))
    if max(data["epochs"].values(), default=0) > MOST_PASSES:
        beyond = "Beyond about four times a repeated token teaches less than a new one (arXiv:2305.16264)"
        lines.append(wrapped(f"{beyond}: get more, or take fewer steps."))
    return "\n".join(lines)


def _recipe(plan: dict) -> str:
    """Returns the values of the published rules, and the config's departures from them."""
    recipe = plan["recipe"]
    phrases = {"lr": "rate {}", "matrix_lr_ratio": "of the matrices {} times that", "b2": "b2 {}"}
    phrases |= {"batch_tokens": "batch of {} tokens", "warmup_steps": "warm-up of {} steps"}
    words = []
    for name, rule in recipe["rules"].items():
        number, low, high = (_number(name, rule[key]) for key in ("value", "low", "high"))
        words.append(phrases[name].format(number) + f" ({low} to {high})" * (low != high))
    lines = [block(f"RECIPE  by published rules: {', '.join(words)}; linear to 0")]
    for d in recipe["departures"]:
        lines.append(wrapped(f"{d['key']} {d['value']:.6g}: {d['why']}. Cost: {d['cost']} ({d['source']})"))
    return "\n".join(lines if recipe["departures"] else [*lines, "  this config departs from none by more than half"])


def _rates(plan: dict) -> str:
    return table(plan["rates"], right=[1])


def _number(rule: str, number: float) -> str:
    if rule in ("batch_tokens", "warmup_steps"):
        return human(round(number))
    return f"{number:.5g}" if rule == "b2" else f"{number:.3g}"


def _memory(plan: dict) -> str:
    memory, mesh = plan["memory"], plan["mesh"]
    named = ", ".join(f"{axis} {size}" for axis, size in mesh["axes"].items() if size > 1)
    devices = f"each of {mesh['devices']} devices ({named})" if named else "one device"
    rows = {name: n for name, n in memory["bytes"].items() if n or name not in ("frozen", "rollouts", "average")}
    notes = {
        "parameters": "trained, float32",
        "optimizer": memory["optimizer"],
        "gradients": "summed over microbatches",
        "copies": f"of parameters, in {plan['model']['dtype']}",
        "activations": f"remat {memory['remat']}",
        "workspace": "a layer's backward pass, the loss or the update",
        "rollouts": "what draws answers, and the reference",
        "average": "of the weights, float32",
    }
    shown = {name: gigabytes(n) for name, n in (rows | {"total": memory["total"]}).items()}
    lines = table([[f"  {name}", n, notes.get(name, "") * (n != "0.00")] for name, n in shown.items()], right=[1])
    by, own = memory["by_remat"], memory["remat"]
    remats = [
        f"{name} {gigabytes(of['total'])} GB" + f" and {of['time'] / by[own]['time']:.2f} x the time" * (name != own)
        for name, of in by.items()
    ]
    head = (
        f"MEMORY of {devices}, GB: microbatch {memory['microbatch']} of {plan['run']['batch_size']} rows, "
        f"{plan['model']['dtype']}, attention {plan['model']['attention']}"
    )
    return "\n".join([head, lines, wrapped(f"model.remat: {'; '.join(remats)}")])


def _methods(plan: dict) -> str:
    """Returns the ways to fine-tune the model, side by side."""
    remats = list(plan["methods"][0]["bytes"])
    head = ["METHODS, GB with one row", *(f"remat {remat}" for remat in remats), "smallest card"]
    rows = [
        [f"  {row['method']}", *(gigabytes(row["bytes"][remat]) for remat in remats), row["card"] or "none"]
        for row in plan["methods"]
    ]
    return table([head, *rows], right=range(1, len(remats) + 1))


def _disk(plan: dict) -> str:
    disk = plan["disk"]
    total, each = size(disk["checkpoint"] * disk["checkpoints"]), size(disk["checkpoint"])
    text = f"DISK  {total} for {disk['checkpoints']} checkpoints of {each} ({disk['why']}, one on its way)"
    if plan["training"]["program"] == "pretrain":
        text += f"; {size(disk['bytes_per_token'] * 1e9)} of shards for each billion tokens"
    return block(text)


def _compiled(plan: dict) -> str:
    """Returns the memory and collectives of the compiled step."""
    c = plan["compiled"]
    note, whole = f" ({c['memory_note']})" if c["memory_note"] else "", c["largest_replicated"]
    largest = whole and f"the largest {whole['name']} with {human(whole['elements'])} numbers"
    replicated = f"{c['replicated']} of them, {largest}" if whole else "none"
    lines = [
        f"COMPILED for {c['target']} in {c['seconds']:.0f} s: {gigabytes(c['memory'])} GB on each{note}",
        f"  parameters: {gigabytes(4 * c['parameters_per_device'])} GB of float32 on each device; left whole on all: "
        + replicated,
    ]
    sent = [f"  {row['kind']:<20}{row['times']:>7,} a step{gigabytes(row['bytes']):>9} GB" for row in c["collectives"]]
    return "\n".join([*lines, *(sent or ["  no collectives between devices"])])


def _table(plan: dict) -> str:
    sources = list(dict.fromkeys(row["mfu_from"] for row in plan["accelerators"] if row["mfu_from"]))
    rows = [["ACCELERATORS", "GB", "as is", "devices", "rows", "tokens/s", "time", "on demand", "spot", "MFU"]]
    if "kind" in plan["here"]:
        rows.append(_here(plan["here"]))
    for row in plan["accelerators"]:
        cells = [row["name"], gigabytes(row["memory"], 0), "yes" if row["fits"] else "no"]
        if row["devices"] is None:
            rows.append(cells + ["-"] * 7)
            continue
        cells += [str(row["devices"]), str(row["microbatch"]), human(row["tokens_per_second"]), hours(row["hours"])]
        origin = f"[{sources.index(row['mfu_from']) + 1}]" if row["mfu_from"] else "assumed"
        spot = dollars(row["usd_spot"]) if _spot_pays(row) else "more"
        rows.append([*cells, dollars(row["usd"]), spot, f"{row['mfu']:.0%} {origin}"])
    notes = [f"  [{i}] {source}" for i, source in enumerate(sources, 1)]
    return "\n".join([table(rows, right=range(1, 9)), *notes])


def _phases(plan: dict) -> str:
    """Returns the cost of each phase, and the limits that the planned cost exceeds."""
    phases = plan["phases"]
    card = f"{phases['devices']} x {phases['accelerator']}"
    if len(plan["accelerators"]) > 1:
        card += ", by its price," if phases["price_known"] else ", the cheapest that fits,"
    origin = "hardware.usd_per_hour" if phases["price_given"] else "its price above: hardware.usd_per_hour is 0"
    title = f"PHASES  on {card} at ${phases['usd_per_hour']:.2f} an hour ({origin}); start, evaluation and checkpoints counted"
    cells = [["  phase", "last step", "steps", "time", "dollars", "limit"]]
    for row in phases["rows"]:
        limit = dollars(row["limit_usd"]) if row["limit_usd"] else "-"
        steps = [f"  {row['name'] or 'the rest'}", f"{row['last_step']:,}", f"{row['steps']:,}"]
        cells.append([*steps, hours(row["hours"]), dollars(row["usd"]), limit])
    below = "config.{key}={limit:g} is below the {planned:.4g} of the plan: the run would stop there"
    lines = [block(title), table(cells, right=range(1, 6))]
    return "\n".join([*lines, *(wrapped(below.format(**row)) for row in phases["below"])])


def _here(row: dict) -> list[str]:
    """Returns the cells of this machine's row."""
    speed, fits = row["tokens_per_second"], {True: "yes", False: "no", None: "?"}[row["fits"]]
    cells = ["this machine", gigabytes(row["memory"], 0), fits, str(row["count"]), str(row["microbatch"])]
    cells += [human(speed), hours(row["hours"])] if speed else ["-", "-"]
    cells += ["-" if row["usd"] is None else dollars(row["usd"]), "-"]
    return [*cells, f"{row['mfu']:.0%} measured" if row["mfu"] else "measured" if speed else "-"]


def _spot_pays(row: dict) -> bool:
    return row["usd_spot"] is not None and row["usd_spot"] <= row["usd"]


def _notes(plan: dict) -> str:
    memory, alone = plan["memory"], plan["mesh"]["devices"] == 1
    notes = [
        f"as is: with microbatch {memory['microbatch']}, {gigabytes(memory['total'])} GB a device. rows: the largest "
        f"microbatch that fits with remat {memory['remat']} and {memory['optimizer']}."
    ]
    if alone:
        notes.append("devices: the fewest that hold the model by mesh.fsdp; --config.plan.mesh=fsdp:8 plans for eight.")
    notes += [*_of_here(plan["here"]), *_changes(plan), *_spot(plan)]
    notes += [
        f"Prices of {plan['prices_as_of']}, from no live offer: put yours into a copy and give it as config.plan.prices.",
        "MFU and tokens/s: jaxlm's own are this machine's, and those whose source is jaxlm. Sources measured a 1.04B model "
        "on one device; a smaller model is assumed to reach less (docs/planning.md). Links between devices are not counted.",
        "model.remat: time by FLOPs. On an A100, measured, full made 28.3k tokens/s 24.0k: 1.18 x.",
    ]
    return "\n".join(["NOTES", *map(wrapped, notes)])


def _of_here(row: dict) -> list[str]:
    """Returns a note on the origin of this machine's row, or on why it has none; [] if no row was asked for."""
    if "kind" not in row:
        return [f"this machine has no row: {row['why']}."] if row["why"] else []
    device = f"this machine: {row['count']} x {row['kind']}"
    day = datetime.datetime.fromtimestamp(row["time"]).date()
    if not row["tokens_per_second"]:
        room = "half of its free memory" if row["kind"] == "cpu" else "its memory"
        return [f"{device}; on {day} a short measurement did not fit into {room}. To repeat it: plan.measure=again."]
    what = f", from {row['what']}, scaled by FLOPs" if row["what"] else ""
    room = gigabytes(row["memory"])
    need = f"; its step takes {gigabytes(row['needed'])} GB there, and {room} are free" if row["needed"] else ""
    busy = " while other programs kept it busy" if row["kind"] == "cpu" and row["load"] > BUSY else ""
    return [f"{device}, measured by {row['by']} on {day}{busy}{what}{need}. To repeat it: plan.measure=again."]


def _changes(plan: dict) -> list[str]:
    """Returns notes on settings that make the model fit on the planned mesh, or that recompute less."""
    memory, devices = plan["memory"], plan["mesh"]["devices"]
    by, own = memory["by_remat"], memory["by_remat"][memory["remat"]]["time"]
    where = f"{devices} devices" if devices > 1 else "one device"
    lines, never, faster = [], [], {}
    for row in plan["accelerators"]:
        if change := row["remedy"]:
            took = by[change["remat"]]["time"] / own
            again = f", recomputing counted ({took:.2f} x the time)" if took > 1 else ""
            keys = [f"optim.name={change['optimizer']}"] if change["optimizer"] != memory["optimizer"] else []
            keys += [f"model.remat={change['remat']}"] if change["remat"] != memory["remat"] else []
            keys.append(f"train.microbatch_size={change['microbatch']}")
            lines.append(
                f"{row['name']}: {where} would do with {', '.join(keys)}: {human(change['tokens_per_second'])} tokens/s, "
                f"{hours(change['hours'])}{again}."
            )
        elif row["faster"]:
            faster.setdefault(row["faster"]["remat"], []).append(row)
        elif row["devices"] != devices:
            never.append(row["name"])
    for remat, rows in faster.items():
        first = rows[0]
        lines.append(
            f"{', '.join(row['name'] for row in rows)}: model.remat={remat} fits too, and takes "
            f"{by[remat]['time'] / own:.2f} x the time of {memory['remat']}: {human(first['faster']['tokens_per_second'])} "
            f"tokens/s in place of {human(first['tokens_per_second'])} on {first['name']}, with "
            f"train.microbatch_size={first['faster']['microbatch']}."
        )
    if never:
        who = "all" if len(never) == len(plan["accelerators"]) else ", ".join(never)
        lines.append(f"{who}: {where} can't hold the model with any remat policy or 8-bit AdamW.")
    return lines


def _spot(plan: dict) -> list[str]:
    """Returns notes on spot machines: the assumptions, and the accelerators on which spot costs more, with a remedy."""
    rows = [row for row in plan["accelerators"] if row["devices"]]
    if not rows:
        return []
    every = sorted(row["save_hours"] for row in rows)
    span = " to ".join(dict.fromkeys([hours(every[0]), hours(every[-1])]))
    lines = [
        f"spot: {plan['preemptions_per_day']:g} preemptions a day and host, each losing {plan['restart_minutes']:g} minutes "
        f"and half of what lies between two checkpoints, {span}."
    ]
    dear = [row for row in rows if not _spot_pays(row)]
    if curable := [row for row in dear if row["spot_pays_hours"]]:
        least = hours(min(row["spot_pays_hours"] for row in curable))
        names = ", ".join(row["name"] for row in curable)
        lines.append(
            f"{names}: spot costs more than on demand: too much work is lost. It pays with a checkpoint at least every "
            f"{least}: checkpoint.every_minutes=-1 chooses the interval."
        )
    if never := [row["name"] for row in dear if not row["spot_pays_hours"]]:
        lines.append(f"{', '.join(never)}: spot can't pay with so many preemptions, at any checkpoint interval.")
    return lines


def block(text: str) -> str:
    """Returns the text in lines of at most WIDTH columns, or of the terminal's, all but the first indented."""
    return wrapped(text, "")


def wrapped(text: str, indent: str = "  ") -> str:
    width = min(WIDTH, screen.columns(sys.stdout)) if screen.is_terminal(sys.stdout) else WIDTH
    words = textwrap.TextWrapper(width, indent, f"{indent}  ", break_on_hyphens=False, break_long_words=False)
    return words.fill(text)
