"""PPO: the policy answers prompts; a value head says what to expect of each answer on the way, and it learns from the rest.

    jaxlm train ppo --config.workdir=runs/ppo --config.origin=SFT_RUN --config.data.path=prompts.jsonl \\
        --config.reward.model=RM_RUN

SFT_RUN is a run of `sft`, or the folder of a Hugging Face chat model; RM_RUN a run of `reward`, or a Hugging Face model with
one label; prompts.jsonl has a `prompt` a line (Anthropic's HH and other chats will do, without their answers). Rewards may also
be tasks with known answers, or a function of yours: see `grpo`, which needs no value head.

As it is set: 4 epochs of 4 updates over the answers of a step, a KL penalty to the model that it began with (policy.beta),
advantages by GAE, whitened. `--config.policy.kl_target=0.05` adapts beta. The value head stands on the policy's own layers and
begins at 0; `--config.policy.value_from=reward` begins it as the reward model's.

What a small model gained in 20 minutes of a CPU: docs/rl.md. Hours and dollars on a GPU: not yet measured.
"""

from jaxlm.configs import base


def get_config():
    c = base.get_config()
    c.program = "ppo"
    c.train.steps = 200
    c.rollout.prompts = 64
    c.rollout.answers = 1
    c.policy.epochs = 4
    c.policy.minibatches = 4
    c.policy.beta = 0.05
    c.policy.clip_high = 0.2
    c.policy.mask_truncated = False
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
