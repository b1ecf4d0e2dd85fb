"""A reward model: pairs of answers, of which one was preferred; the model learns a score that is higher for the preferred one.

    jaxlm train reward --config.workdir=runs/reward --config.origin=SFT_RUN --config.data.path=pairs.jsonl

SFT_RUN is a run of `sft`, or the folder of a Hugging Face chat model; pairs.jsonl has a pair a line: `prompt`, `chosen` and
`rejected`, perhaps `margin`, or Anthropic's HH. One pass is usual.

The loss begins at ln 2 = 0.693. Watch `val/accuracy`, the share of held-out pairs that are ranked as labelled; 0.5 is chance.

On the 6.5M model of docs/finetuning.md, from pairs with a planted preference of which a fifth is swapped, 100 steps of 8 x 512
at 3e-4 rank 94% of clean held-out pairs right. Hours and dollars: not yet measured on a GPU.
"""

from jaxlm.configs import base


def get_config():
    c = base.get_config()
    c.program = "reward"
    c.data.val_fraction = 0.05
    c.train.steps = 200
    c.train.batch_size = 16
    c.train.seq_len = 512
    c.train.eval_every_steps = 50
    c.eval.at_start = True
    c.eval.batch_size = 8
    c.eval.max_mb = 0.5  # of the text that its base was trained on
    c.optim.lr = 1e-5
    c.optim.warmup_steps = 20
    c.checkpoint.every_steps = 100
    c.sample.prompts = ()
    return c
