"""Fine-tuning on chats by LoRA: the model stays as it is, and factors of a few per cent of its size are trained.

    jaxlm train sft_lora --config.workdir=runs/sft-lora --config.origin=RUN --config.data.path=chats.jsonl

As `sft`, with rank 16 on all layers' kernels and ChatML's five rows; the rate is 10 times that of full fine-tuning. The run's
checkpoints hold the factors alone and need the origin; `jaxlm export` writes the model with them, or an adapter for PEFT.

On 1.04B parameters these 300 steps take under a minute and $0.01 on an A100 80GB, 3 minutes on an RTX 3090 (as `jaxlm plan`
has it; not measured on a GPU). On the 6.5M base of docs/finetuning.md, at 2e-3, 100 steps (5 minutes on a core): the held-out
answers' loss falls from 5.276 to 5.033 nats, and 87% of the answers end.
"""

from jaxlm.configs import base


def get_config():
    c = base.get_config()
    c.program = "sft"
    c.adapter.kind = "lora"
    c.data.val_fraction = 0.05
    c.train.steps = 300
    c.train.batch_size = 8
    c.train.seq_len = 512
    c.train.eval_every_steps = 50
    c.eval.at_start = True
    c.eval.batch_size = 8
    c.eval.max_mb = 0.25  # of the text that its base was trained on
    c.optim.lr = 3e-3
    c.optim.warmup_steps = 20
    c.optim.weight_decay = 0.0
    c.checkpoint.every_steps = 100
    c.sample.prompts = ("What is a neural network?", "Name three colours.", "How do I boil an egg?", "Who are you?")
    c.sample.chat_template = True
    c.sample.max_new_tokens = 256
    c.sample.at_steps = (0,)
    return c
