"""GRPO: the policy answers each prompt several times, and learns from which answers earned more than the others.

    pip install -e ".[rl]"
    jaxlm train grpo --config.workdir=runs/grpo --config.origin=SFT_RUN --config.reward.tasks=reasoning_gym:chain_sum

SFT_RUN is a run of `sft`, or the folder of a Hugging Face chat model. Rewards: tasks with known answers (reward.tasks), a
function of yours (`--config.reward.function=MODULE:FUNCTION --config.data.path=prompts.jsonl`), a reward model
(`--config.reward.model=RUN`), or their sum. It learns only where some answers are right and some wrong: a model that never
succeeds needs SFT or easier tasks first. All parameters are trained; for LoRA: `--config.adapter.kind=lora
--config.optim.lr=2e-5`.

As it is set: advantages are rewards less their group's mean, not divided by its standard deviation (Dr. GRPO); the loss is a
mean over tokens, and clips higher than lower (DAPO); answers that did not end do not count; no KL penalty. GSPO:
`--config.policy.ratio=answer --config.policy.average=answer --config.policy.clip_low=3e-4 --config.policy.clip_high=4e-4`.

What a small model gained in 20 minutes of a CPU: docs/rl.md. Hours and dollars on a GPU: not yet measured.
"""

from jaxlm.configs import base


def get_config():
    c = base.get_config()
    c.program = "grpo"
    c.train.steps = 200
    c.train.batch_size = 64
    c.train.seq_len = 512
    c.train.eval_every_steps = 50
    c.eval.at_start = True
    c.eval.max_examples = 128
    c.optim.lr = 1e-6
    c.optim.b2 = 0.99
    c.optim.warmup_steps = 5
    c.optim.weight_decay = 0.0
    c.optim.final_lr_ratio = 1.0
    c.checkpoint.every_steps = 50
    c.checkpoint.best_metric = "val/reward"
    c.checkpoint.best_is = "highest"
    c.log.every_steps = 1
    c.stability.spike_z = 0.0  # the loss lies about 0, and says little; train.policies watches the reward
    c.stability.overfit_evals = 0
    c.sample.prompts = ()
    c.sample.chat_template = True
    return c
