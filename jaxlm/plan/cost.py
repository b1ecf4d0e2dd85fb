"""Estimates tokens per second, hours and dollars of a run, on demand and on spot machines. What was paid: `run/spent.py`.

The speed is a measured MFU (that of the prices file is for 1.04B parameters, d 2048), lowered for smaller models and for
remat. A layer's matrix products grow with d^2, the activations that it reads and writes with d. So products take a share
d / (d + d0) of a token's time, where d0 is 3 times the FLOPs that the device computes per byte read: the 3 is a fit (it
gives GPT-2 124M 49% of an A100, as PyTorch does). A step is never shorter than its kernel launches. A kernel with a LoRA
has twice the launches; a quantised one is decoded in both passes; these two were not measured. The optimizer, the loader
and links between devices are not counted.
"""

import math

from jaxlm.config import Config, ModelConfig, milestones
from jaxlm.plan import flops
from jaxlm.plan.accelerators import Accelerator
from jaxlm.plan.flops import adapter_params, count_params, kernels, multiplied_params, targets
from jaxlm.run.checkpoints import pace

# Assumptions on checkpoints, for the interval of a run that chooses it itself.
STATE_BYTES = 12  # per parameter: AdamW in float32
TO_HOST = 10e9  # bytes a second from a device, while the loop waits
READ_BACK = 1e9  # bytes a second from a host's disk, to verify
BYTES_PER_TOKEN = 4.0  # assumed for text before there is data
START_HOURS = 5 / 60  # assumed for a start: the time to the first step, and to compile what runs between steps


def tokens(config: Config) -> int:
    return config.train.steps * config.train.batch_size * config.train.seq_len


def cost(config: Config, accelerator: Accelerator, devices: int, hosts: int) -> dict[str, float]:
    """Returns the time and the price of a run on `hosts` machines, any of which may be preempted. No key may be auto.

    `hours`: without interruptions, of which `judging_hours` are those in which DPO's reference scores the data before step 0;
    `spot_hours`: with preemptions and lost work, inf if the run would never end; `save_hours`: between two checkpoints;
    `spot_pays_hours`: spot is cheaper if checkpoints are at most this far apart; 0 if it never is, inf if always.
    """
    tokens_per_second = speed(config, accelerator, devices)
    training = tokens(config) / tokens_per_second / 3600
    judging = training * judging_share(config)
    hours = training + judging
    every = save_hours(config, hours, devices, hosts)
    spot_hours = hours * slow_down(config, every, hosts)
    return {
        "tokens_per_second": tokens_per_second,
        "hours": hours,
        "judging_hours": judging,
        "usd": hours * devices * accelerator.usd,
        "spot_hours": spot_hours,
        "usd_spot": spot_hours * devices * accelerator.usd_spot,
        "usd_per_billion": devices * accelerator.usd / 3600 * 1e9 / tokens_per_second,
        "save_hours": every,
        "spot_pays_hours": spot_pays_hours(config, accelerator, hours, hosts),
    }


def judging_share(config: Config) -> float:
    """Returns the time of the reference's one pass over the data, as a share of the training time; 0 without that pass."""
    return forward_share(config) if flops.reference(config) == "once" else 0.0


def forward_share(config: Config) -> float:
    return flops.judging(config).palm / (flops.of(config).palm * remat_factor(config))


def by_phase(config: Config, tokens_per_second: float, devices: int, hosts: int = 0) -> list[dict]:
    """Returns a row for each phase of a run: name, last step, steps, hours, limit in dollars.

    Steps after the last phase are a phase named "". The hours include evaluations and saves, and in the first phase the start
    and the reference's pass, but no samples and benchmarks. `hosts` = 0: one host for every eight devices.
    """
    t, rows = config.train, []
    step = t.batch_size * t.seq_len / tokens_per_second / 3600
    evaluation = held_out_tokens(config) * forward_share(config) / tokens_per_second / 3600
    saves_every = save_hours(config, t.steps * step, devices, hosts or -(-devices // 8))
    save, evaluates_every = save_seconds(config, devices) / 3600, t.eval_every_steps or t.steps
    ends = {p.name: min(p.last, t.steps) for p in milestones.planned(config.phases, t) if p.first <= t.steps}
    done, hours = 0, START_HOURS + config.eval.at_start * evaluation + t.steps * step * judging_share(config)
    for name, end in (ends if t.steps in ends.values() else ends | {"": t.steps}).items():
        evaluations = end // evaluates_every - done // evaluates_every + (end % evaluates_every > 0)
        hours += (end - done) * step + evaluations * evaluation + (1 + (end - done) * step / saves_every) * save
        limit = config.phases.plan[name].usd if name else 0.0
        rows.append({"name": name, "last_step": end, "steps": end - done, "hours": hours, "limit_usd": limit})
        done, hours = end, 0.0
    return rows


def held_out_tokens(config: Config) -> int:
    """Returns the most tokens that an evaluation reads: 250,000 for a megabyte of text, a row of tokens for an example."""
    e, seq_len = config.eval, config.train.seq_len
    if config.program != "pretrain":
        most = e.max_prompts * seq_len
    else:
        sources = sum(source.weight > 0 for source in config.data.sources.values()) or 1
        most = sources * (math.prod(e.older_batches) * seq_len if e.older_batches else e.max_mb * 1e6 / BYTES_PER_TOKEN)
    return round(most or config.data.val_fraction * tokens(config))


def save_hours(config: Config, hours: float, devices: int, hosts: int) -> float:
    """Returns the hours between two checkpoints of a run of `hours`, as training saves: by steps, minutes, or both."""
    c, steps = config.checkpoint, config.train.steps
    by_steps = hours * min(c.every_steps or steps, steps) / steps
    minutes = c.every_minutes or math.inf
    if minutes == pace.AUTO:
        waits, verifies = save_seconds(config, devices), save_seconds(config, hosts) * TO_HOST / READ_BACK
        minutes = pace.minutes(waits, verifies, config.plan.preemptions_per_day)
    return min(by_steps, minutes / 60)


def save_seconds(config: Config, devices: int) -> float:
    """Returns the seconds for which the training loop waits while `devices` devices save a checkpoint."""
    state = STATE_BYTES * (adapter_params(config.model, config.adapter) or count_params(config.model))
    return state / devices / TO_HOST


def slow_down(config: Config, every: float, hosts: int) -> float:
    """Returns the expected factor by which preemptions prolong a run on spot machines; inf if it is 100 or more.

    A preemption costs the work since the last checkpoint and R hours. At r preemptions an hour, h = `every` hours of work take
    (1/r + R)(exp(rh) - 1) hours (Daly 2006, doi:10.1016/j.future.2004.11.016, if saving takes no time).
    """
    rate = config.plan.preemptions_per_day * hosts / 24
    if not rate * every:
        return 1.0
    factor = (1 / rate + config.plan.restart_minutes / 60) * math.expm1(min(rate * every, 100)) / every
    return factor if factor < 100 else math.inf


def spot_pays_hours(config: Config, accelerator: Accelerator, hours: float, hosts: int) -> float:
    """Returns the longest hours between checkpoints at which spot costs no more; 0 if it never pays, inf if always."""
    most = accelerator.usd / accelerator.usd_spot
    low, high = pace.LEAST / 60, hours
    if slow_down(config, high, hosts) <= most:
        return math.inf
    if low >= high or slow_down(config, low, hosts) > most:
        return 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if slow_down(config, middle, hosts) <= most else (low, middle)
    return low


MEASURED_WIDTH = 2048  # d_model of the model whose MFU is in the prices file
WIDTH_PER_INTENSITY = 3.0  # d0 per FLOP that a device computes per byte read
LAUNCH_S = 0.2e-3  # of a layer's kernels, forward and backward: about 40 of them, 5 us each
LAYERS_OF_REST = 2  # launches of the loss, the head and the update, in layers
LORA_LAUNCHES = 1.0  # added launches of a layer all of whose kernels have a LoRA, in layers
DECODED_BYTES = 2.5  # a quantised weight is read at half a byte, and written in bfloat16


def speed(config: Config, accelerator: Accelerator, devices: int) -> float:
    """Returns the tokens a second of all devices. `model.remat` and `train.microbatch_size` must not be auto."""
    per_token = flops.of(config).palm * remat_factor(config)
    tokens = config.train.microbatch_size * config.train.seq_len
    products_s = tokens * per_token / (devices * accelerator.tflops * 1e12 * mfu(config.model, accelerator))
    trained_s = max(products_s + _decoding_s(config, accelerator), _launches_s(config))
    return tokens / (trained_s + _drawing_s(config, accelerator))


def _launches_s(config: Config) -> float:
    """Returns the seconds of a microbatch's launches on a device; a reference's forward pass adds a third to each layer's."""
    m, each = config.model, 1.0
    each += LORA_LAUNCHES * len(targets(m, config.adapter)) / len(kernels(m))
    each += (flops.reference(config) == "each step") / 3
    return LAUNCH_S * (m.n_layers * each + LAYERS_OF_REST)


def _decoding_s(config: Config, accelerator: Accelerator) -> float:
    """Returns the seconds in which a device decodes its quantised kernels for a microbatch: once per pass."""
    m = config.model
    if "none" in (config.adapter.kind, config.adapter.quantize):
        return 0.0
    passes = 2 + (m.remat == "full") + (flops.reference(config) == "each step")
    weights = m.n_layers * sum(inputs * outputs for inputs, outputs in kernels(m).values())
    return passes * weights * DECODED_BYTES / (accelerator.bandwidth_gb * 1e9)


def _drawing_s(config: Config, accelerator: Accelerator) -> float:
    """Returns the seconds in which a device draws a microbatch's share of a step's answers; 0 where nothing is drawn."""
    if not flops.draws(config):
        return 0.0
    r, t = config.rollout, config.train
    waves = -(-r.prompts * r.answers // (r.rows or r.prompts * r.answers))
    bytes_read = multiplied_params(config.model) * (4 if config.model.dtype == "float32" else 2)
    a_step = waves * r.max_new_tokens * bytes_read / (accelerator.bandwidth_gb * 1e9)
    return a_step * t.microbatch_size / t.batch_size


def mfu(model: ModelConfig, accelerator: Accelerator) -> float:
    """Returns the share of the peak that a model of this width reaches without remat: at most the accelerator's `mfu`."""
    half = WIDTH_PER_INTENSITY * accelerator.tflops * 1e3 / accelerator.bandwidth_gb
    width = min(model.d_model, MEASURED_WIDTH)
    return accelerator.mfu * (width / (width + half)) / (MEASURED_WIDTH / (MEASURED_WIDTH + half))


def remat_factor(config: Config, remat: str = "") -> float:
    """Returns a step's FLOPs with a remat policy, as a multiple of those without remat; "" = the config's own policy."""
    m, remat = config.model, remat or config.model.remat
    attention = 4.0 * m.n_layers * m.n_heads * m.head_dim * config.train.seq_len  # its forward pass, all pairs
    ups = 1 if m.family == "gpt2" else 2
    weights = m.d_model * ((2 * m.n_heads + 2 * m.n_kv_heads) * m.head_dim + ups * m.d_ff)  # no down projection
    again = {"none": 0.0, "names": 0.0, "dots": attention, "full": attention + 2.0 * m.n_layers * weights}[remat]
    return 1 + again / flops.of(config).palm
