"""Losses and gradients of TRL 1.16 for GRPO, DAPO, Dr. GRPO and GSPO, on prompts and answers of unequal length, in float32.

TRL pads prompts on the left and answers on the right; ours are packed, three a row. All differences are at most 1e-5 of the
largest value. One answer is masked, as truncated ones are. PPO: see `test_policy.py`, `scripts/record_trl_ppo.py`.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_answers
import tiny_models as tiny
import tiny_trl

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.step.objectives import base, policy

pytestmark = pytest.mark.parity
PROMPTS, ANSWERS, ROWS, T, LONGEST, MASKED = 6, 4, 8, 160, 25, 5
CAP = 1.1
TEXTS = tiny_answers.random_texts(PROMPTS, ANSWERS, tiny_trl.MODEL.vocab_size, LONGEST)
ADVANTAGES = np.random.default_rng(2).normal(size=len(TEXTS)).astype(np.float32)


def settings(*keys: str) -> config.Config:
    sizes = (
        f"train.batch_size={ROWS}",
        f"train.seq_len={T}",
        f"rollout.prompts={PROMPTS}",
        f"rollout.answers={ANSWERS}",
    )
    more = ("program=grpo", "data.path=x", f"rollout.max_new_tokens={LONGEST}", "reward.function=a:b")
    made = config.resolve(config_files.load("base", [*sizes, *more, *keys]))
    return dataclasses.replace(made, model=tiny_trl.MODEL)


def padded(values: list[np.ndarray], left: bool = False, fill: float = 0, dtype=np.float32):
    """[texts, longest] in PyTorch."""
    import torch

    longest = max(map(len, values))
    found = np.full((len(values), longest), fill, dtype)
    for row, x in enumerate(values):
        found[row, longest - len(x) if left else 0 : None if left else len(x)] = x
    return torch.from_numpy(found)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(TRL's trainer, its policy, its inputs; our variables, our batch): a policy that has moved away from its rollouts."""
    model = tiny_trl.theirs(seed=0)
    variables, other = (tiny_trl.ours(m.state_dict().items()) for m in (model, tiny_trl.theirs(seed=1)))
    # The KL divergence as in the paper of GRPO. By default TRL 1.16 multiplies it by the ratio (arXiv:2512.02556).
    given = {"reward_funcs": lambda **_: None}
    made = tiny_trl.trainer("GRPO", tmp_path_factory.mktemp("grpo"), model, given, use_bias_correction_kl=False)
    given, rng = tiny_answers.batch(TEXTS, T, ROWS), np.random.default_rng(3)
    logp = tiny.jit(lambda v, b: base.token_logp(tiny_trl.OURS, v, b))
    now, reference = (tiny_answers.by_answer(given, logp(v, given)) for v in (variables, other))
    old = [x + rng.normal(0, 0.3, x.shape).astype(np.float32) for x in now]
    sampler = [x + rng.normal(0, 0.2, x.shape).astype(np.float32) for x in old]
    reference = [a + 0.2 * (b - a) for a, b in zip(now, reference, strict=True)]  # nearer: else k3 is all of the loss
    spread = [np.full(len(a), x, np.float32) for (_, a), x in zip(TEXTS, ADVANTAGES, strict=True)]
    batch = dict(given, figures=jnp.zeros((ROWS, len(policy.FIGURES))))
    for name, x in {"old": old, "sampler": sampler, "reference": reference, "advantages": spread}.items():
        batch[name] = tiny_answers.by_token(given, x, elsewhere=300.0)
    kept = [np.full(len(a), float(i != MASKED)) for i, (_, a) in enumerate(TEXTS)]
    batch["weights"] = tiny_answers.by_token(given, kept)
    prompts, answers = ([np.asarray(text[side]) for text in TEXTS] for side in (0, 1))
    mask = padded([np.full(len(a), i != MASKED) for i, a in enumerate(answers)], dtype=np.int64)
    inputs = {
        "prompt_ids": padded(prompts, left=True, fill=1, dtype=np.int64),
        "prompt_mask": padded([np.ones(len(p)) for p in prompts], left=True, dtype=np.int64),
        "completion_ids": padded(answers, fill=1, dtype=np.int64),
        "completion_mask": mask,
        "advantages": padded([[x] for x in ADVANTAGES])[:, 0],
        "old_per_token_logps": padded(old),
        "ref_per_token_logps": padded(reference),
        "importance_sampling_ratio": (padded(old) - padded(sampler)).exp().clamp(max=CAP),
        "num_items_in_batch": mask.sum(),
    }
    return made, model, inputs, variables, batch


# name -> (TRL's loss_type, its importance_sampling_level, what ours has besides)
CASES = {
    "grpo": ("grpo", "token", ["policy.average=answer", "policy.beta=0.1"]),
    "dapo": ("dapo", "token", ["policy.average=token", "policy.clip_high=0.28"]),
    "dr_grpo": ("dr_grpo", "token", ["policy.average=length", "policy.clip_low=0.1"]),
    "gspo": ("grpo", "sequence", ["policy.average=answer", "policy.ratio=answer", "policy.beta=0.05"]),
    "gspo_by_token": ("dapo", "sequence", ["policy.average=token", "policy.ratio=answer"]),
    "capped": ("dapo", "token", ["policy.average=token", "policy.beta=0.1", f"rollout.importance_cap={CAP}"]),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients(both, name):
    made, model, inputs, variables, batch = both
    made.loss_type, made.importance_sampling_level, keys = CASES[name]
    c = settings(*keys)
    made.epsilon_low, made.epsilon_high, made.beta = c.policy.clip_low, c.policy.clip_high, c.policy.beta
    made.max_completion_length, made.current_gradient_accumulation_steps = LONGEST, 1  # the second is set by `train`
    made.use_vllm = made.vllm_importance_sampling_correction = bool(c.rollout.importance_cap)
    want = tiny_trl.value_and_grads(made, model, dict(inputs))
    got = tiny_trl.mean(policy.make(tiny_trl.OURS, c), variables, batch)
    tiny_trl.check(got, want)
    assert want[0] != 0


def test_some_tokens_are_clipped_on_either_side(both):
    """So that the comparison is one of the clipping too."""
    *_, variables, batch = both
    objective = policy.make(tiny_trl.OURS, settings())
    found = tiny.jit(lambda v, b: objective.sums(v, objective.prepare(b), None))(variables, batch)
    assert 0.05 < float(found.metrics["clip_share"]) / ROWS < 0.5
    assert float(found.weight) == ROWS
