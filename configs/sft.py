"""Fine-tuning all parameters on chats: a base model becomes an assistant.

    jaxlm train sft --config.workdir=runs/sft --config.origin=RUN --config.data.path=chats.jsonl

RUN is a run, or the folder of a Hugging Face model; chats.jsonl has a chat a line: `messages`, prompt and response, ShareGPT,
Alpaca, Anthropic's HH. About 3 passes are usual: the first lines say how many `train.steps` make.

On 1.04B parameters these 300 steps take under a minute and $0.02 on an A100 80GB, 5 minutes on an RTX 3090 (as `jaxlm plan`
has it; not measured on a GPU). On the 6.5M base of docs/finetuning.md, at 2e-4, 100 steps (5 minutes on a core): the held-out
answers' loss falls from 5.276 to 4.999 nats, and 83% of the answers end.
"""

from jaxlm.configs import base


def get_config():
    c = base.get_config()
    c.program = "sft"
    c.data.val_fraction = 0.05
    c.train.steps = 300
    c.train.batch_size = 8
    c.train.seq_len = 512
    c.train.eval_every_steps = 50
    c.eval.at_start = True
    c.eval.batch_size = 8
    c.eval.max_mb = 0.25  # of the text that its base was trained on
    c.optim.lr = 3e-4
    c.optim.rates = ("rows 10",)
    c.optim.warmup_steps = 20
    c.checkpoint.every_steps = 100
    c.sample.prompts = ("What is a neural network?", "Name three colours.", "How do I boil an egg?", "Who are you?")
    c.sample.chat_template = True
    c.sample.max_new_tokens = 256
    c.sample.at_steps = (0,)
    return c
