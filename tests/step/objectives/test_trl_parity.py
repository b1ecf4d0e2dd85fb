"""Losses and gradients of TRL 1.16 on 64 real pairs and conversations of unequal length, in float32.

TRL pads each text to a row of its own; ours are packed. All differences are at most 1e-5 of the largest value.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
import tiny_pairs
from tiny_trl import MODEL, OURS, check, mean, ours, theirs, trainer, value_and_grads

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.data.batches import pack_examples
from jaxlm.step.objectives import dpo, lm, reward

pytestmark = [
    pytest.mark.parity,
    pytest.mark.shared,
    pytest.mark.skipif(not tiny_pairs.HH.is_file(), reason="no shared data"),
]
COUNT, LONGEST, T, ROWS = 64, 100, 256, 48


def settings(*keys: str) -> config.Config:
    made = config.resolve(config_files.load("base", ["data.path=x", f"train.seq_len={T}", *keys]))
    return dataclasses.replace(made, model=MODEL)


@pytest.fixture(scope="module")
def pairs():
    found = tiny_pairs.hh_ids(COUNT, LONGEST, MODEL.vocab_size)
    assert len(found) == COUNT
    assert len({len(side) for pair in found for side in pair[1:]}) > COUNT // 4  # of unequal length
    return found


@pytest.fixture(scope="module")
def against_reference(pairs, tmp_path_factory):
    """(TRL's trainer of DPO, its policy, the inputs; our variables, our batch with the reference's log-probabilities)."""
    policy, reference = theirs(seed=0), theirs(seed=1)
    variables, frozen = (ours(model.state_dict().items()) for model in (policy, reference))
    folder = tmp_path_factory.mktemp("dpo")
    made = trainer("DPO", folder, policy, {"ref_model": reference}, beta=0.1, max_length=None)
    inputs = made.data_collator([{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for p, c, r in pairs])
    batch = tiny_pairs.batch(pairs, T, ROWS)
    logp = tiny.jit(lambda v, b: dpo.answer_logp(OURS, v, b, 0))(frozen, batch)
    return made, policy, inputs, variables, batch | {"reference": logp}


@pytest.mark.parametrize("nll_weight", [0.0, 0.5])
@pytest.mark.parametrize("name", ["sigmoid", "ipo", "robust"])
def test_dpo(against_reference, name, nll_weight):
    made, policy, inputs, variables, batch = against_reference
    made.label_smoothing = 0.2 if name == "robust" else 0.0
    made.loss_types, made.loss_weights = ([name, "sft"], [1.0, nll_weight]) if nll_weight else ([name], [1.0])
    want = value_and_grads(made, policy, dict(inputs))
    keys = [f"dpo.loss={name}", f"dpo.nll_weight={nll_weight}", f"dpo.label_smoothing={made.label_smoothing}"]
    check(mean(dpo.make(OURS, settings(*keys)), variables, batch), want)


def padded(texts: list[list[int]], masked: list[int] | None = None):
    """(ids, attention mask, labels) as TRL's older trainers take them; `masked`: how many labels of each do not count."""
    import torch

    longest = max(map(len, texts))
    ids, seen, labels = (torch.full((len(texts), longest), fill) for fill in (1, 0, -100))
    for row, text in enumerate(texts):
        ids[row, : len(text)], seen[row, : len(text)] = torch.tensor(text), 1
        first = masked[row] if masked else 0
        labels[row, first : len(text)] = torch.tensor(text[first:])
    return {"input_ids": ids, "attention_mask": seen, "labels": labels}


def in_two(pairs) -> dict:
    """Pairs as ORPOTrainer and CPOTrainer take them."""
    sides = {"chosen": [(p, c) for p, c, _ in pairs], "rejected": [(p, r) for p, _, r in pairs]}
    found = {side: padded([p + a for p, a in texts], [len(p) for p, _ in texts]) for side, texts in sides.items()}
    return {f"{side}_{name}": x for side, tensors in found.items() for name, x in tensors.items()}


def test_orpo(tmp_path, pairs):
    # TRL's cross-entropy is that of the prompt too. With a prompt of one token there is no such thing.
    asked = [([0], [*p[1:], *c], r) for p, c, r in pairs]
    policy = theirs()
    variables = ours(policy.state_dict().items())
    made = trainer("ORPO", tmp_path, policy, beta=0.3)
    want = value_and_grads(made, policy, in_two(asked))
    objective = dpo.make(OURS, settings("dpo.loss=orpo", "dpo.beta=0.3"))
    check(mean(objective, variables, tiny_pairs.batch(asked, T, ROWS, room=16)), want)


def test_simpo(tmp_path, pairs):
    policy = theirs()
    variables = ours(policy.state_dict().items())
    made = trainer("CPO", tmp_path, policy, loss_type="simpo", beta=2.0, simpo_gamma=0.7, cpo_alpha=0.0)
    want = value_and_grads(made, policy, in_two(pairs))
    objective = dpo.make(OURS, settings("dpo.loss=simpo", "dpo.beta=2", "dpo.margin=0.7"))
    check(mean(objective, variables, tiny_pairs.batch(pairs, T, ROWS)), want)


def test_reward(tmp_path, pairs):
    model = theirs("LlamaForSequenceClassification")
    variables = ours(model.state_dict().items())
    margins = np.random.default_rng(0).uniform(0, 1, COUNT).tolist()
    made = trainer("Reward", tmp_path, model, max_length=None)
    examples = [
        {"chosen_ids": p + c, "rejected_ids": p + r, "margin": m} for (p, c, r), m in zip(pairs, margins, strict=True)
    ]
    want = value_and_grads(made, model, made.data_collator(examples))
    batch = tiny_pairs.batch(pairs, T, ROWS, margins, closed=True)
    check(mean(reward.make(OURS, settings()), variables, batch), want)


def conversations(pairs) -> list[pack_examples.Segment]:
    """The prompts with the chosen answers, of which all that follows every third word counts."""
    found = []
    for prompt, chosen, _ in pairs:
        ids = [*prompt, *chosen]
        found.append(pack_examples.Segment(ids, [float(at % 3 != 1) for at in range(1, len(ids))]))
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_sft(tmp_path, pairs, packed):
    model = theirs()
    variables = ours(model.state_dict().items())
    texts = conversations(pairs)
    made = trainer("SFT", tmp_path, model, max_length=None, padding_free=packed)
    examples = [
        {"input_ids": s.ids, "labels": [-100, *(i if w else -100 for i, w in zip(s.ids[1:], s.weights, strict=True))]}
        for s in texts
    ]
    want = value_and_grads(made, model, made.data_collator(examples))
    batch, placed = tiny_pairs.pack([[text] for text in texts], T, ROWS if packed else COUNT)
    if not packed:
        batch = pack_examples.pack([[text] for text in texts], T)
    assert len(placed) == COUNT
    check(mean(lm.make(OURS, settings()), variables, {name: jnp.asarray(x) for name, x in batch.items()}), want)
