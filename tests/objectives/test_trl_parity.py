"""Losses and gradients of TRL 1.16 on 64 real pairs and conversations of unequal length, in float32.

TRL pads each text to a row of its own; ours are packed. All differences are at most 1e-5 of the largest value.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hf
import tiny_models as tiny
import tiny_pairs

from jaxlm import config, config_files, models
from jaxlm.data import rows
from jaxlm.interop import hf
from jaxlm.objectives import dpo, lm, reward

pytestmark = [
    pytest.mark.parity,
    pytest.mark.shared,
    pytest.mark.skipif(not tiny_pairs.HH.is_file(), reason="no shared data"),
]
MODEL = tiny.model_config(vocab_size=512, max_seq_len=256, tie_embeddings=True)
COUNT, LONGEST, T, ROWS = 64, 100, 256, 48
TOLERANCE = 1e-5


def theirs(kind: str = "LlamaForCausalLM", seed: int = 0):
    """A random model made by transformers."""
    import torch
    import transformers

    torch.manual_seed(seed)
    torch.set_num_threads(2)
    fields = {k: v for k, v in hf.hf_config(MODEL).items() if k != "architectures"} | {"initializer_range": 0.3}
    settings = transformers.AutoConfig.for_model(**fields, num_labels=1, pad_token_id=1)
    settings._attn_implementation = "eager"
    return getattr(transformers, kind)(settings)


def ours(tensors) -> dict:
    """Our parameters of the tensors by name; the score head beside them, if there is one."""
    state = {name: np.asarray(x.detach().numpy()) for name, x in tensors if name != "lm_head.weight"}
    head = state.pop("score.weight", None)
    found = {"params": hf.params_from_hf(state, MODEL)}
    return found if head is None else found | {"score": {"score_head": {"kernel": jnp.asarray(head[0])}}}


def trainer(kind: str, folder, model, **settings):
    """A trainer of TRL that never trains: its data is one row, its losses are asked with other inputs."""
    import datasets
    import transformers
    import trl
    from trl.experimental import cpo, orpo

    homes = {"ORPO": orpo, "CPO": cpo}
    tiny_hf.byte_level(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, pad_token="<|endoftext|>")
    one = {"prompt": "a", "completion": "b"} if kind == "SFT" else {"prompt": "a", "chosen": " b", "rejected": " c"}
    one = {"chosen": "a b", "rejected": "a c"} if kind == "Reward" else one
    home = homes.get(kind, trl)
    common = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": []}
    args = getattr(home, f"{kind}Config")(**common, gradient_checkpointing=False, **settings)
    return functools.partial(
        getattr(home, f"{kind}Trainer"),
        args=args,
        model=model,
        train_dataset=datasets.Dataset.from_list([one]),
        processing_class=tokenizer,
    )


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


def settings(*keys: str) -> config.Config:
    made = config.resolve(config_files.load("base", ["data.path=x", f"train.seq_len={T}", *keys]))
    return dataclasses.replace(made, model=MODEL)


@pytest.fixture(scope="module")
def pairs():
    found = tiny_pairs.hh_ids(COUNT, LONGEST, MODEL.vocab_size)
    assert len(found) == COUNT
    assert len({len(side) for pair in found for side in pair[1:]}) > COUNT // 2  # of unequal length
    return found


def collated(pairs) -> list[dict]:
    return [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for p, c, r in pairs]


NAMES = ("sigmoid", "ipo", "hinge", "robust", "sigmoid_norm", "apo_zero")


@pytest.mark.parametrize("nll_weight", [0.0, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_dpo(tmp_path, pairs, name, nll_weight):
    policy, reference = theirs(seed=0), theirs(seed=1)
    variables, frozen = (ours(model.state_dict().items()) for model in (policy, reference))
    smoothing = 0.2 if name == "robust" else 0.0
    sft = ["sft"] if nll_weight else []
    weights = [1.0, *[nll_weight] * len(sft)]
    asked = {"loss_type": [name, *sft], "loss_weights": weights, "label_smoothing": smoothing, "beta": 0.1}
    made = trainer("DPO", tmp_path, policy, **asked, max_length=None)(ref_model=reference)
    want = value_and_grads(made, policy, made.data_collator(collated(pairs)))

    keys = [f"dpo.loss={name}", f"dpo.nll_weight={nll_weight}", f"dpo.label_smoothing={smoothing}"]
    objective = dpo.make(models.build(MODEL, "xla"), settings(*keys))
    batch = tiny_pairs.batch(pairs, T, ROWS)
    logp = tiny.jit(lambda v, b: dpo.answer_logp(models.build(MODEL, "xla"), v, b, 0))
    check(mean(objective, variables, batch | {"reference": logp(frozen, batch)}), want)
