"""Fine-tuning on chats by QLoRA: as `sft_lora`, on layers that are held in 4 bits, for models that would not fit otherwise.

    jaxlm train sft_qlora --config.workdir=runs/sft-qlora --config.origin=RUN --config.data.path=chats.jsonl

The layers' kernels are in nf4 with blocks of 64 (arXiv:2305.14314), decoded layer by layer; embedding, head, norms and what is
trained keep their precision. Where memory suffices, `sft_lora` is faster and loses nothing to rounding.

On 1.04B parameters these 300 steps take under a minute and $0.02 on an A100 80GB, 4 minutes on an RTX 3090 (as `jaxlm plan`
has it; not measured on a GPU). On the 6.5M base of docs/finetuning.md, at 2e-3, 100 steps (6 minutes on a core): the held-out
answers' loss falls from 5.276 to 5.036 nats, and 86% of the answers end.
"""

from jaxlm.configs import base


def get_config():
    c = base.get_config()
    c.program = "sft"
    c.adapter.kind = "lora"
    c.adapter.quantize = "nf4"
    c.model.remat = "full"
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
