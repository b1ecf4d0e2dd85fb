"""The sections of the config as frozen dataclasses: each key's type, the values that it may have, its default, its comment.

A section's comment is the docstring of its class. `configs/base.py` makes a ConfigDict of the defaults; the help prints the
comments. Rules for several keys are in `checks.py`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from jaxlm.config import posttraining
from jaxlm.config.annotations import (
    LARGEST,
    BelowOne,
    Count,
    Fraction,
    Natural,
    NotNegative,
    Pattern,
    Positive,
    Rate,
    Share,
    Size,
    Steps,
    Tokens,
    at_least,
    key,
    within,
    written,
)
from jaxlm.config.corpora import DataConfig, PrepareConfig

CHAT_TOKENS = ("<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>")
Attention = Literal["xla", "blocked", "cudnn", "cudnn_packed", "tokamax", "pallas"]
Axis = Annotated[int, at_least(1, or_else={-1: "all remaining devices"}, most=LARGEST)]
Remat = Literal["none", "names", "dots", "full"]
Event = Literal["gate", "stall", "crash", "end", "budget"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """rotary positions (llama)"""

    theta: Annotated[float, at_least(1)] = key(10000.0, "base of the angles")
    scaling: Literal["none", "linear", "llama3"] = key("none", "how a longer context than the trained one is reached")
    factor: Annotated[float, at_least(1)] = key(1.0, "context is stretched by this (linear, llama3)")
    low_freq_factor: NotNegative = key(1.0, "llama3 only")
    high_freq_factor: NotNegative = key(4.0, "llama3 only")
    original_max_len: Natural = key(8192, "llama3 only: context before stretching")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """the network"""

    family: Literal["llama", "gpt2"] = key("llama", "architecture")
    n_layers: Annotated[int, at_least(1, most=10_000)] = key(8, "transformer blocks")
    d_model: Size = key(512, "width: size of the embeddings and of the residual stream")
    n_heads: Size = key(8, "query heads")
    n_kv_heads: Count = key(0, "key-value heads (GQA); 0 = n_heads")
    head_dim: Count = key(0, "0 = d_model / n_heads")
    d_ff: Size = key(1408, "inner size of the MLP")
    vocab_size: Count = key(0, "of the tokenizer, with chat tokens; 0 = the data's, or chosen by the amount of text")
    max_seq_len: Count = key(0, "learned positions of gpt2, longest context written to exports; 0 = train.seq_len")
    tie_embeddings: bool = key(True, "one matrix for input embedding and output head")
    bias: bool = key(False, "biases in projections (llama: attention and MLP; gpt2 has them always as published)")
    qkv_bias: bool = key(False, "biases on queries, keys and values alone, as in Qwen2 (llama)")
    qk_norm: bool = key(False, "RMSNorm on queries and keys per head")
    norm_eps: Positive = key(1e-5, "added to the variance in each norm")
    rope: RopeConfig = RopeConfig()
    dropout: BelowOne = key(0.0, "on embeddings and on each residual branch")
    init_std: NotNegative = key(0.02, "of normal initial weights; output projections divided by sqrt(2 n_layers)")
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto", "of computation; auto: float32 on CPU, else bfloat16; parameters and loss are always float32"
    )
    attention: Literal["auto", Attention] = key("auto", "xla: all; blocked: CPU; pallas: GPU, TPU; others: GPU")
    remat: Literal["auto", Remat] = key("none", "what backward recomputes, by memory saved; auto = the least that fits")
    scan_layers: bool = key(False, "compile one layer, scan it (deep models, TPU); False = unroll (fastest on one GPU)")
    fuse_projections: bool = key(True, "q, k, v in one product and gate, up in one; the parameters stay apart")
    fp8: bool = key(False, "products of the MLP in float8 (e4m3, gradients e5m2; scaled by tensor): Hopper, Ada, newer")
    offload: bool = key(False, "what `remat=names` keeps waits for the backward pass in host memory")

    @property
    def padded_vocab_size(self) -> int:
        """Returns the rows of the embedding table: `vocab_size` rounded up to a multiple of 128 (added rows are masked)."""
        return -(-self.vocab_size // 128) * 128


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """steps, batch, row length"""

    steps: Annotated[int, at_least(1, most=10**12)] = key(1000, "optimizer steps; raise it to continue a finished run")
    batch_size: Size = key(64, "sequences per optimizer step, over all devices")
    seq_len: Size = key(512, "tokens per sequence")
    microbatch_size: Annotated[int, at_least(-1, most=LARGEST)] = key(
        0, "sequences in memory at a time (accumulation); 0 = batch_size, -1 = auto, the most that fit"
    )
    eval_every_steps: Steps = key(250, "held-out loss; 0 = at the end only")
    max_nonfinite_steps: Steps = key(20, "this many skipped steps in a row stop the run (exit code 3)")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """the cross-entropy"""

    z_loss: NotNegative = key(0.0, "weight of log(Z)^2")
    tile_tokens: Count = key(2048, "tokens per tile of the cross-entropy, so that all logits never exist; 0 = plain")


# What a rule says where it is 0 -> its key of `optim`. The matrices' ratio is in the line of MATRICES.
BY_RULE = {"lr": "lr", "matrix_lr_ratio": "rates", "b2": "b2"}
# Keys of `model`: what `jaxlm grow` changes.
GROWS = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab_size")
MATRICES, ROWS = "layers_.*/kernel", "rows"  # patterns of `optim.rates` with a meaning of their own


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """optimizer and learning rate"""

    name: Literal["adamw", "adamw8bit", "adafactor", "muon"] = key("adamw", "muon: AdamW for all but layers' matrices")
    mu_dtype: Literal["float32", "bfloat16"] = key("float32", "of the first moment (adamw, muon)")
    ns_steps: Literal[3, 5] = key(5, "muon: iterations for a matrix; 3: 40% fewer operations, for small models on CPUs")
    full_precision: tuple[Pattern, ...] = key(
        (r".*norm.*", r".*embed.*", r".*/bias"), "adamw8bit: whose moments are float32"
    )
    offload: bool = key(False, "the optimizer's state lives in host memory and visits the device at each update")
    lr: NotNegative = key(1e-3, "peak learning rate; 0 = by rule, from parameters, tokens and batch (pretraining)")
    rates: tuple[Rate, ...] = key((), '"PATTERN TIMES": multiples of lr, by path (full match, the first counts)')
    grown_from: tuple[Count, ...] = key(
        (), "by jaxlm grow: the older layers, width, heads, kv heads, d_ff, ids; what is new is new/... in `rates`"
    )
    schedule: Literal["cosine", "wsd", "linear", "constant"] = key(
        "cosine", "of the learning rate after its linear warm-up; wsd = warm-up, stable, decay"
    )
    warmup_steps: Steps = key(100, "steps in which the rate rises from 0 to its peak")
    decay_fraction: Fraction = key(0.2, "wsd: the last part of the steps, in which the rate falls")
    final_lr_ratio: Share = key(0.1, "rate of the last step over the peak; with 0 that step changes nothing")
    schedule_steps: Steps = key(0, "the steps that the schedule is made for; 0 = train.steps")
    decay_at_step: Steps = key(0, "after this step the rate falls linearly to 0 at the end; 0 = as the schedule says")
    b1: BelowOne = key(0.9, "decay rate of the first moment")
    b2: BelowOne = key(0.95, "decay rate of the second moment; 0 = by rule, from the tokens of a step (pretraining)")
    eps: NotNegative = key(1e-8, "added to the square root of the second moment")
    weight_decay: NotNegative = key(0.1, "decoupled from the gradient")
    decay_follows_rate: bool = key(False, "True: times rate over peak, so that what decays falls as the rate's square")
    decay: tuple[Pattern, ...] = key((r".*/kernel", r".*/lora_[ab]"), "parameters that decay (full match of the path)")
    no_decay: tuple[Pattern, ...] = key(
        (r".*norm.*", r".*embed.*", r".*/bias", r".*/rows"), "those that do not; each must be in exactly one list"
    )
    clip_norm: NotNegative = key(1.0, "of the global gradient norm; 0 = off")

    @property
    def times(self) -> dict[str, str]:
        """Returns pattern -> multiplier of the lines of `rates`: "0.5", or by layer "0.9^"."""
        return {pattern: times for pattern, _, times in (line.rpartition(" ") for line in self.rates)}

    @property
    def matrix_lr_ratio(self) -> float:
        """Returns the multiplier of the layers' matrices; 0 = by rule, 1 if `rates` has no line of MATRICES."""
        return float(self.times.get(MATRICES, 1))

    def with_matrices(self, ratio: float) -> tuple[str, ...]:
        """Returns `rates` with another multiplier in the line of MATRICES; unchanged if there is no such line."""
        return tuple(f"{MATRICES} {ratio!r}" if line.startswith(f"{MATRICES} ") else line for line in self.rates)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """when to save and what to keep"""

    every_steps: Steps = key(1000, "0 = by time, and at the end")
    every_minutes: Annotated[float, at_least(0, or_else={-1: "auto"})] = key(
        -1.0, "also when this much work is unsaved; -1 = auto (Young/Daly); 0 = by steps alone"
    )
    keep_last: Size = key(2, "the latest checkpoints that stay")
    keep_every: Steps = key(0, "also keep each checkpoint whose step is a multiple of this, for good")
    keep_best: Count = key(1, "also keep this many of the best by `best_metric`")
    best_metric: str = key("val/loss", "by which the best are chosen: any name in metrics.jsonl")
    best_is: Literal["lowest", "highest"] = key("lowest", "or highest, as for an accuracy")
    average: Annotated[float, within(0, 0.5)] = key(
        0.0, "keeps a moving average of the weights, by this share of the steps so far behind; 0 = none, 0.1 is usual"
    )
    reserve_mb: NotNegative = key(64.0, "real blocks held back on the disk, so that a full one still takes logs")
    max_unprotected_minutes: NotNegative = key(120.0, "more unsaved work ends the run while saving fails; 0 = never")
    max_unprotected_usd: NotNegative = key(0.0, "the same in dollars; 0 = never")
    mirror: str = key("", "folder or URL (s3://, gs://, hf://): a copy of each verified checkpoint and the logs")
    mirror_keep_last: Size = key(2, "the latest checkpoints that stay there, beside milestones")
    mirror_timeout_s: Positive = key(3600.0, "a copy that takes longer is abandoned and begun again")


@dataclasses.dataclass(frozen=True)
class RedteamConfig:
    """the task redteam: what a model writes after prompts that lead astray"""

    scorers: tuple[str, ...] = key((), "MODULE:FUNCTION, ...: (prompts, texts) -> a score from 0 to 1 of each text")
    toxicity: bool = key(True, 'toxicity scores and the category toxic (pip install -e ".[toxicity]"); False = neither')
    search_tokens: Tokens = key(1_000_000_000, "of the training data searched for what the model wrote; 0 = all")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """held-out loss and benchmarks"""

    at_start: bool = key(False, "also before the first step")
    batch_size: Count = key(0, "sequences in memory at a time, which changes no result; 0 = microbatch_size")
    max_mb: Annotated[float, at_least(0, most=1e12)] = key(4.0, "megabytes of each source's held-out text; 0 = all")
    max_examples: Count = key(400, "the first held-out chats, pairs or prompts; 0 = all")
    older_batches: tuple[Count, ...] = key((), "(batches, rows) of a run begun with eval.max_batches; () = as above")
    tasks: tuple[str, ...] = key((), "benchmarks in training, and by default of `jaxlm eval`: arc_easy, piqa, ...")
    tasks_every_steps: Steps = key(0, "in training; 0 = at the end only")
    max_items: Count = key(200, "of each task in training, always the same; 0 = all")
    fewshot: Annotated[int, at_least(0, or_else={-1: "as each task says"}, most=1000)] = key(
        -1, "worked examples before each question; -1 = as each task says"
    )
    chat_template: bool = key(False, "True: ask in the model's chat template, worked examples as turns")
    data_dir: str = key("", 'folder of benchmark files; "" = from the hub (https://huggingface.co)')
    run_code: bool = key(False, "True: run a model's programs: HumanEval without network, scorers in this process")
    run_code_with_network: bool = key(False, "True: also where the network can't be cut off")
    code_seconds: Positive = key(10.0, "for each program, on a core; four times as many by the clock")
    code_memory_mb: Annotated[float, at_least(64)] = key(1024.0, "for each program")
    redteam: RedteamConfig = RedteamConfig()

    @property
    def max_prompts(self) -> int:
        """Returns how many held-out prompts are asked at most; 0 = all."""
        return math.prod(self.older_batches) if self.older_batches else self.max_examples


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """texts that the run writes"""

    prompts: tuple[str, ...] = key((), "texts to continue; () = no samples")
    every_steps: Steps = key(0, "0 = at `at_steps` and at the end only")
    at_steps: tuple[Natural, ...] = key((), "after these steps too")
    max_new_tokens: Annotated[int, at_least(0, most=2**20)] = key(96, "of each continuation, at most")
    temperature: NotNegative = key(0.8, "0 = greedy")
    also_greedy: bool = key(False, "True: each prompt is continued greedily too")
    chat_template: bool = key(False, "True: each prompt is what a user says, in the model's chat template")
    top_k: Count = key(50, "draw from this many likeliest tokens; 0 = off")
    top_p: Fraction = key(0.95, "draw from the likeliest tokens that have this probability together; 1 = off")
    weights: Literal["float", "int8"] = key("float", "of sample, chat, serve; int8: faster, less memory")


@dataclasses.dataclass(frozen=True)
class PhaseConfig:
    """A phase of `phases.plan`: `phase(steps=200, usd=5.0, max_val_loss=7.0)`."""

    steps: Steps = key(0, "the phase ends after this step of the run; 0 = by tokens")
    tokens: Tokens = key(0, "or after this many tokens of the run")
    usd: NotNegative = key(0.0, "budget of this phase alone; 0 = none")
    max_val_loss: NotNegative = key(0.0, "gate: held-out loss at its end; 0 = none")
    min_tokens_per_second: NotNegative = key(0.0, "gate: speed at its end; 0 = none")
    max_nonfinite_steps: Annotated[int, at_least(0, or_else={-1: "no gate"})] = key(-1, "gate: skipped steps in it")


@dataclasses.dataclass(frozen=True)
class PhasesConfig:
    """milestones; each ends with an evaluation, samples, a bill and a gate"""

    plan: dict[str, PhaseConfig] = key({}, "NAME -> base.phase(steps, usd, ...)")
    accept: str = key("", "go on although this phase failed its gate or spent its budget")
    shrink: Literal["", "cpu"] = key("", "cpu: all small: 2 layers of d 128, 8 rows of 128, steps and dollars over 500")


@dataclasses.dataclass(frozen=True)
class StopConfig:
    """when to stop; by what the run took, by the forecast of the loss"""

    usd: NotNegative = key(0.0, "what the whole run may cost: all starts, and pauses that were paid for; 0 = no limit")
    hours: NotNegative = key(0.0, "the same in hours; raise them to go on")
    usd_per_centinat: NotNegative = key(0.0, "stop when the rest of the plan costs more for 0.01 nats; 0 = never")
    steps: Steps = key(0, "stop after this step, on the way to train.steps; 0 = no limit")


@dataclasses.dataclass(frozen=True)
class StabilityConfig:
    """non-finite steps, loss spikes; what to do about them"""

    roll_back: bool = key(True, "to the last good checkpoint, past the batches that spoiled it; else stop (code 3)")
    spike_z: NotNegative = key(8.0, "robust z-score of a step's loss from which it is a spike; 0 = off")
    spike_steps: Steps = key(20, "this many spikes in a row call for a rollback; 0 = only log them")
    skip: tuple[Annotated[str, written(r"[0-9]{1,18}:[0-9]{1,18}", "the first and the last batch as A:B")], ...] = key(
        (), 'batches to pass over, by hand: "A:B" from batch A to batch B of the order'
    )
    overfit_evals: Natural = key(3, "say so when validation rose this many times in a row while training fell; 0 = off")

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """Returns the first and the last batch of each entry of `skip`."""
        return tuple((int(first), int(last)) for first, _, last in (window.partition(":") for window in self.skip))


@dataclasses.dataclass(frozen=True)
class OnExitConfig:
    """a shell command by cause, run last, when all is mirrored: "runpodctl stop pod $ID\""""

    done: str = key("", "all steps are done")
    gate: str = key("", "a gate, a budget or the forecast stopped it, or non-finite steps (exit code 3)")
    failed: str = key("", "crash that no restart mended, or bad input (exit codes 1 and 2)")
    stopped: str = key("", "interrupted with its state saved (exit code 4)")


@dataclasses.dataclass(frozen=True)
class RunsConfig:
    """supervisor, hangs, the end"""

    supervise: Literal["auto", "on", "off"] = key(
        "auto", "restart training after a crash or a hang; auto: unless Slurm, SkyPilot or Kubernetes does"
    )
    backoff_s: NotNegative = key(5.0, "before the first restart; doubles with each without progress, up to 5 minutes")
    hang_s: NotNegative = key(0.0, "no sign of life for this long is a hang; 0 = learned from the run's own times")
    notices: tuple[Literal["gce", "aws"], ...] = key((), "preemption notices to ask for: gce, aws")
    on_exit: OnExitConfig = OnExitConfig()
    on_exit_unmirrored: bool = key(False, "True: run it although no mirror holds the last checkpoint")


@dataclasses.dataclass(frozen=True)
class NotifyConfig:
    """messages to you"""

    urls: tuple[str, ...] = key((), 'https:// = webhook (JSON); others need pip install -e ".[notify]" (apprise)')
    events: tuple[Event, ...] = key(get_args(Event), "what is told")
    heartbeat_url: str = key("", "asked every heartbeat_minutes while steps go on; its silence is the alarm")
    heartbeat_minutes: Positive = key(5.0, "between two of them")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """devices on each axis; -1 = all that remain"""

    data: Axis = key(-1, "copies of the model, each on its part of the batch")
    fsdp: Axis = key(1, "the batch and the parameters split over these")
    tensor: Axis = key(1, "heads, feed-forward and vocabulary split over these")
    context: Axis = key(1, "the tokens of each row split over these (long rows)")


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """what is logged, and how often"""

    every_steps: Annotated[int, at_least(1, most=10**12)] = key(10, "a line of metrics.jsonl and of the terminal")
    parameters: bool = key(False, "True: show the table of all parameters and their shapes at the start")
    tensorboard: bool = key(True, "write WORKDIR/tensorboard")
    wandb: Literal["", "offline", "online"] = key("", 'Weights & Biases (pip install -e ".[wandb]"); "" = off')


@dataclasses.dataclass(frozen=True)
class HardwareConfig:
    """price, peak, compile cache"""

    usd_per_hour: NotNegative = key(0.0, "what the machine costs, for the dollars in the progress line")
    peak_tflops: NotNegative = key(0.0, "of one device, for MFU; 0 = by the device's name")
    compile_cache: str = key("~/.cache/jaxlm/xla", 'persistent compile cache; "" = off')
    xla_flags: tuple[str, ...] = key((), "added to those that jaxlm sets (docs/performance.md); the later one counts")


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """a trace of some steps"""

    steps: Annotated[
        str, written(r"([0-9]{1,18}:[0-9]{1,18})?", "the first and the last step to trace as A:B, such as 20:25")
    ] = key("", "trace steps A to B of A:B for TensorBoard and Perfetto, and print what took the time")

    @property
    def window(self) -> tuple[int, int] | None:
        """Returns the first and the last step to trace; None if no step is traced."""
        first, _, last = self.steps.partition(":")
        return (int(first), int(last)) if self.steps else None


_MESH = written(
    r"(?!.*\b(\w+):.*\b\1:)((data|fsdp|tensor|context):[1-9]\d{0,5}(, *|$))*",  # no axis twice
    "axes (data, fsdp, tensor, context), each with its number of devices, such as fsdp:64 or data:4,fsdp:8",
)


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """what `jaxlm plan` assumes"""

    mesh: Annotated[str, _MESH] = key("", 'plan for a mesh that is not there; "" = one device of each kind')
    hosts: Natural = key(0, "over how many hosts that mesh goes; 0 = eight devices to a host")
    prices: str = key("", 'your own copy of configs/prices.toml; "" = the shipped one')
    accelerator: str = key("", 'only this one of the prices file; "" = all')
    compile: bool = key(True, "compile the real step for the mesh, from shapes alone; False = arithmetic only")
    measure: Literal["auto", "never", "again"] = key(
        "auto", "this machine's speed: auto = once, in a minute or less, then kept; never; again = anew"
    )
    preemptions_per_day: NotNegative = key(2.0, "of a spot machine")
    restart_minutes: NotNegative = key(10.0, "from a preemption to the next step: a new machine, data, compile")


@dataclasses.dataclass(frozen=True)
class TuneConfig:
    """what `jaxlm tune` tries; it varies one setting after the other from the best so far"""

    exhaustive: bool = key(False, "True: every combination")
    microbatch_sizes: tuple[Size, ...] = key((), "() = halves of train.batch_size, down to the mesh's own")
    remat: tuple[Remat, ...] = key(get_args(Remat), "of model.remat")
    attention: tuple[Attention, ...] = key((), "of model.attention; () = every backend that this device runs")
    scan_layers: tuple[bool, ...] = key((False, True), "of model.scan_layers")
    tile_tokens: tuple[Natural, ...] = key((0, 2048), "of loss.tile_tokens")
    steps: Annotated[int, at_least(1)] = key(10, "timed for each at most")
    max_seconds: NotNegative = key(1800.0, "begin no further candidate after this")
    memory_gb: NotNegative = key(0.0, "of a device; 0 = what it says it has")


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """several processes; found by themselves under Slurm and Open MPI"""

    auto: bool = key(False, "True: JAX looks for a cluster that it knows (GKE, GCE TPU pods, Kubernetes)")
    coordinator: str = key("", "host:port of process 0")
    num_processes: Natural = key(0, "with a coordinator: how many processes there are")
    process_id: Annotated[int, at_least(-1)] = key(-1, "with a coordinator: which of them this is, from 0")
    start_timeout_s: Annotated[float, at_least(1)] = key(300.0, "a process that has not come by then ends the start")
    heartbeat_s: Annotated[float, at_least(1)] = key(100.0, "a process that is silent for this long ends the run")


@dataclasses.dataclass(frozen=True)
class Config:
    program: Literal["pretrain", "sft", "reward", "dpo", "ppo", "grpo"] = key(
        "pretrain", "the program that `jaxlm train` and `python -m jaxlm.main` run"
    )
    workdir: str = key("", "folder of this run: checkpoints, metrics, samples; required to train")
    seed: Annotated[int, within(0, 2**32 - 1)] = key(0, "of initial weights, order of rows, dropout and samples")
    origin: str = key("", 'the folder of a run whose weights this one begins with; "" = new weights')
    origin_checkpoint: Annotated[str, written("latest|best|[0-9]{1,18}", "latest, best or a step")] = key(
        "latest", "of the origin: latest, best or a step"
    )
    origin_state: bool = key(False, "True: with the origin's optimizer state, step and order of batches too (a branch)")
    origin_merge: bool = key(True, "False: an origin that is a LoRA is not merged, and the same adapter is trained on")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    adapter: posttraining.AdapterConfig = posttraining.AdapterConfig()
    examples: posttraining.ExamplesConfig = posttraining.ExamplesConfig()
    replay: posttraining.ReplayConfig = posttraining.ReplayConfig()
    dpo: posttraining.DpoConfig = posttraining.DpoConfig()
    rollout: posttraining.RolloutConfig = posttraining.RolloutConfig()
    policy: posttraining.PolicyConfig = posttraining.PolicyConfig()
    reward: posttraining.RewardConfig = posttraining.RewardConfig()
    train: TrainConfig = TrainConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    sample: SampleConfig = SampleConfig()
    phases: PhasesConfig = PhasesConfig()
    stop: StopConfig = StopConfig()
    stability: StabilityConfig = StabilityConfig()
    runs: RunsConfig = RunsConfig()
    notify: NotifyConfig = NotifyConfig()
    mesh: MeshConfig = MeshConfig()
    log: LogConfig = LogConfig()
    hardware: HardwareConfig = HardwareConfig()
    profile: ProfileConfig = ProfileConfig()
    distributed: DistributedConfig = DistributedConfig()
    plan: PlanConfig = PlanConfig()
    tune: TuneConfig = TuneConfig()
    engine: Literal["local", "ray", "slurm"] = key("local", "what runs the tasks of `jaxlm prepare`")
    prepare: PrepareConfig = PrepareConfig()


def with_keys(config: Config, **sections: Mapping) -> Config:
    """Returns the config with some values changed: `with_keys(config, train={"steps": 5}, model={"remat": "none"})`."""
    changed = {name: dataclasses.replace(getattr(config, name), **keys) for name, keys in sections.items()}
    return dataclasses.replace(config, **changed)
