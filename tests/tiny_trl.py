"""Models and trainers of TRL for tests of parity: a tiny model of transformers and ours with the same parameters.

TRL pads each text to a row of its own; ours are packed. All differences are at most 1e-5 of the largest value.
"""

import jax
import jax.numpy as jnp
import numpy as np
import tiny_hf
import tiny_models as tiny

from jaxlm import models
from jaxlm.interop import hf_config

MODEL = tiny.model_config(vocab_size=512, max_seq_len=256, tie_embeddings=True)
OURS = models.build(MODEL, "xla")
TOLERANCE = 1e-5


def theirs(kind: str = "LlamaForCausalLM", seed: int = 0):
    """A random model made by transformers."""
    import torch
    import transformers

    torch.manual_seed(seed)
    torch.set_num_threads(2)
    fields = {k: v for k, v in hf_config.content(MODEL).items() if k != "architectures"} | {"initializer_range": 0.3}
    settings = transformers.AutoConfig.for_model(**fields, num_labels=1, pad_token_id=1)
    settings._attn_implementation = "eager"
    return getattr(transformers, kind)(settings)


def ours(tensors) -> dict:
    """Our parameters of the tensors by name; the score head beside them, if there is one."""
    state = {name: np.asarray(x.detach().numpy()) for name, x in tensors if name != "lm_head.weight"}
    head = state.pop("score.weight", None)
    found = {"params": tiny_hf.params_of(state, MODEL)}
    return found if head is None else found | {"score": {"score_head": {"kernel": jnp.asarray(head[0])}}}


def trainer(kind: str, folder, model, given=(), **settings):
    """A trainer of TRL that never trains: its data is one row, its losses are asked of other inputs."""
    import datasets
    import transformers
    import trl
    import trl.experimental.cpo
    import trl.experimental.orpo

    tiny_hf.byte_level(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, pad_token="<|endoftext|>")
    row = {"prompt": "a", "chosen": " b", "rejected": " c"}
    own = {"SFT": {"text": "a b"}, "Reward": {"chosen": "a b", "rejected": "a c"}, "GRPO": {"prompt": "a"}}
    row = own.get(kind, row)
    home = {"ORPO": trl.experimental.orpo, "CPO": trl.experimental.cpo}.get(kind, trl)
    common = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": []}
    args = getattr(home, f"{kind}Config")(**common, gradient_checkpointing=False, **settings)
    data = datasets.Dataset.from_list([row])
    made = getattr(home, f"{kind}Trainer")
    return made(args=args, model=model, train_dataset=data, processing_class=tokenizer, **dict(given))


def value_and_grads(made, model, inputs) -> tuple[float, dict]:
    loss = made.compute_loss(model, inputs)
    model.zero_grad()
    loss.backward()
    return float(loss.detach()), ours((name, p.grad) for name, p in model.named_parameters())


def mean(objective, variables, batch) -> tuple[float, dict]:
    """Our loss of a batch, and the gradients."""

    def loss(variables, batch):
        found = objective.sums(variables, objective.prepare(batch), None)
        return found.loss / found.weight

    return tiny.jit(jax.value_and_grad(loss))(variables, batch)


def check(got: tuple, want: tuple) -> None:
    assert abs(got[0] - want[0]) <= TOLERANCE * abs(want[0]), (float(got[0]), want[0])
    assert tiny.difference(got[1], want[1]) <= TOLERANCE
