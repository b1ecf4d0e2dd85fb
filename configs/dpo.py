"""DPO: pairs of answers, of which one was preferred; an assistant learns to give the preferred kind.

    jaxlm train dpo --config.workdir=runs/dpo --config.origin=SFT_RUN --config.data.path=pairs.jsonl

SFT_RUN is a run of `sft`, or the folder of a Hugging Face chat model; pairs.jsonl has a pair a line: `prompt`, `chosen` and
`rejected`, or Anthropic's HH. One pass is usual. `--config.dpo.loss=robust --config.dpo.label_smoothing=0.2` if a fifth of
the labels is wrong. All parameters are trained; for LoRA: `--config.adapter.kind=lora --config.optim.lr=1e-5`.

The loss begins at ln 2 = 0.693 and all margins at 0. Watch `val/accuracy`, the share of held-out pairs that are ranked as
labelled; 0.5 is chance.

On the 6.5M model of docs/finetuning.md, from pairs with a planted preference of which a fifth is swapped, 100 steps of 8 x 512
at 1e-4 rank 95 to 96% of clean held-out pairs right. Hours and dollars: not yet measured on a GPU.
"""

from jaxlm.configs import base


def get_config():
    c = base.get_config()
    c.program = "dpo"
    c.data.val_fraction = 0.05
    c.train.steps = 200
    c.train.batch_size = 16
    c.train.seq_len = 512
    c.train.eval_every_steps = 50
    c.eval.at_start = True
    c.eval.batch_size = 8
    c.eval.max_mb = 0.5  # of the text that its base was trained on
    c.optim.lr = 1e-6
    c.optim.warmup_steps = 20
    c.optim.weight_decay = 0.0
    c.checkpoint.every_steps = 100
    c.sample.prompts = ("What is a neural network?", "Name three colours.", "How do I boil an egg?", "Who are you?")
    c.sample.chat_template = True
    c.sample.max_new_tokens = 256
    c.sample.at_steps = (0,)
    return c
