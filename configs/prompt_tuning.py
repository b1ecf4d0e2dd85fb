"""Prompt tuning: the model stays as it is, and 20 vectors that stand in front of each text are trained.

    jaxlm train prompt_tuning --config.workdir=runs/prompt --config.origin=RUN --config.data.path=chats.jsonl

The least that can be trained (arXiv:2104.08691): kilobytes for each task, and one model for all. It learns less than LoRA does,
by far less in a small model. `adapter.prompt_text` begins the vectors with a description of the task.

On 1.04B parameters these 300 steps take under a minute and $0.01 on an A100 80GB, 3 minutes on an RTX 3090 (as `jaxlm plan`
has it; not measured on a GPU). What it learns is not yet measured.
"""

from jaxlm.configs import base


def get_config():
    c = base.get_config()
    c.program = "sft"
    c.adapter.kind = "prompt"
    c.data.val_fraction = 0.05
    c.train.steps = 300
    c.train.batch_size = 8
    c.train.seq_len = 512
    c.train.eval_every_steps = 50
    c.eval.at_start = True
    c.eval.batch_size = 8
    c.eval.max_mb = 0.25  # of the text that its base was trained on
    c.optim.lr = 1e-2
    c.optim.warmup_steps = 20
    c.optim.weight_decay = 0.0
    c.checkpoint.every_steps = 100
    c.sample.prompts = ("What is a neural network?", "Name three colours.", "How do I boil an egg?", "Who are you?")
    c.sample.chat_template = True
    c.sample.max_new_tokens = 256
    c.sample.at_steps = (0,)
    return c
