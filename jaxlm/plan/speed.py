"""Estimates tokens per second on an accelerator: a measured speed, made less by what a smaller model and remat cost.

The MFU in the prices file is of one shape: 1.04B parameters, d 2048. Smaller models reach less, for two reasons:

- A layer's products grow with d^2, the activations that it reads and writes with d. So of the time that a token takes,
  products have the share d / (d + d0), where d0 grows with the FLOPs that the device makes while it reads a byte. Three
  widths for each FLOP a byte is a fit: it gives GPT-2 124M (d 768) 49% of an A100, as PyTorch does. (Published are 29% to
  60% for that model, from nanoGPT to llm.c, and 64% for 1.04B.) Wider models are not thought to reach more. (3.12B on an
  H100 reached 50%, 1.04B 57%: no part of this says so.)
- Each kernel has to be launched. A step is never shorter than its launches.

Remat recomputes part of the forward pass, so a step takes longer by those FLOPs. What the optimizer, the loader, evaluation
and links between devices take is not in here.

A frozen model saves a third of the products. Against that, each kernel with a LoRA has as many launches again as it has by
itself, and a quantised one is decoded in both passes, which is bound by the device's memory. These two were not measured.
"""

from jaxlm.config import Config, ModelConfig
from jaxlm.plan import flops
from jaxlm.plan.accelerators import Accelerator
from jaxlm.plan.params import kernels, multiplied_params, targets

MEASURED_WIDTH = 2048  # d_model of the model whose MFU is in the prices file
WIDTH_PER_INTENSITY = 3.0  # d0, for each FLOP that a device makes while it reads a byte
LAUNCH_S = 0.2e-3  # of a layer's kernels, forward and backward: about 40 of them, 5 us each
LAYERS_OF_REST = 2  # launches of the loss, the head and the update, as so many layers
LORA_LAUNCHES = 1.0  # of a layer all of whose kernels have a LoRA, as so many layers
DECODED_BYTES = 2.5  # a quantised weight is read at half a byte, and written in bfloat16


def tokens_per_second(config: Config, accelerator: Accelerator, devices: int) -> float:
    """Returns the speed of all devices together.

    Args:
      config: the config as it runs: `model.remat` is not auto, and `train.microbatch_size` is set.
      accelerator: the kind of device.
      devices: how many there are.
    """
    per_token = flops.of(config).palm * remat_factor(config)
    tokens = config.train.microbatch_size * config.train.seq_len
    products_s = tokens * per_token / (devices * accelerator.tflops * 1e12 * mfu(config.model, accelerator))
    trained_s = max(products_s + _decoding_s(config, accelerator), _launches_s(config))
    return tokens / (trained_s + _drawing_s(config, accelerator))


def _launches_s(config: Config) -> float:
    """The seconds of a microbatch's launches on a device: a reference's forward pass has a third of a layer's."""
    m, each = config.model, 1.0
    each += LORA_LAUNCHES * len(targets(m, config.adapter)) / len(kernels(m))
    each += (flops.reference(config) == "each step") / 3
    return LAUNCH_S * (m.n_layers * each + LAYERS_OF_REST)


def _decoding_s(config: Config, accelerator: Accelerator) -> float:
    """The seconds in which a device decodes its quantised kernels for a microbatch: once for each pass through them."""
    m = config.model
    if not quantized(config):
        return 0.0
    passes = 2 + (m.remat == "full") + (flops.reference(config) == "each step")
    weights = m.n_layers * sum(inputs * outputs for inputs, outputs in kernels(m).values())
    return passes * weights * DECODED_BYTES / (accelerator.bandwidth_gb * 1e9)


def _drawing_s(config: Config, accelerator: Accelerator) -> float:
    """The seconds in which a device draws a microbatch's share of a step's answers; 0 where nothing is drawn.

    Each new token reads once what it is multiplied by, for all answers that are drawn at once: that is bound by the device's
    memory. Caches and prompts are left out; it was not measured.
    """
    if not flops.draws(config):
        return 0.0
    r, t = config.rollout, config.train
    waves = -(-r.prompts * r.answers // (r.rows or r.prompts * r.answers))
    bytes_read = multiplied_params(config.model) * (4 if config.model.dtype == "float32" else 2)
    a_step = waves * r.max_new_tokens * bytes_read / (accelerator.bandwidth_gb * 1e9)
    return a_step * t.microbatch_size / t.batch_size


def quantized(config: Config) -> bool:
    """True if the layers of a frozen model are quantised."""
    return config.adapter.kind != "none" and config.adapter.quantize != "none"


def mfu(model: ModelConfig, accelerator: Accelerator) -> float:
    """Returns the share of the peak that a model of this width reaches without remat: at most the accelerator's `mfu`."""
    half = WIDTH_PER_INTENSITY * accelerator.tflops * 1e3 / accelerator.bandwidth_gb
    width = min(model.d_model, MEASURED_WIDTH)
    return accelerator.mfu * (width / (width + half)) / (MEASURED_WIDTH / (MEASURED_WIDTH + half))


def remat_factor(config: Config, remat: str = "") -> float:
    """Returns how many times as long a step takes by its FLOPs as without remat: 1 for none.

    `full` repeats a layer's forward pass but for its last product, whose result the backward pass does not need. `dots`
    repeats attention's. `names` repeats only what is no product.

    Args:
      remat: the policy; "" for the config's own.
    """
    m, remat = config.model, remat or config.model.remat
    attention = 4.0 * m.n_layers * m.n_heads * m.head_dim * config.train.seq_len  # its forward pass, all pairs
    ups = 1 if m.family == "gpt2" else 2
    weights = m.d_model * ((2 * m.n_heads + 2 * m.n_kv_heads) * m.head_dim + ups * m.d_ff)  # but the down projection
    again = {"none": 0.0, "names": 0.0, "dots": attention, "full": attention + 2.0 * m.n_layers * weights}[remat]
    return 1 + again / flops.of(config).palm
