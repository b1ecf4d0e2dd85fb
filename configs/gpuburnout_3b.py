"""The 3.12B model that the first story (docs/stories.md) grew to: 3,122,969,600 parameters.

    jaxlm train gpuburnout_3b --config.workdir=runs/3b --config.data.dir=DATA

32 layers, d 2560, 40 query / 10 key-value heads of 64, SwiGLU 10240, 32,005-token BPE with the ChatML tokens, tied. One GPU
of 80 GB: with 8-bit AdamW and remat=names a step takes 73.5 GB by `jaxlm plan`. With float32 moments it takes 92 GB: one GPU
of 141 GB, or two of 80 GB by `mesh.fsdp`.

It can be grown from a run of `gpuburnout_2b` (docs/growth.md).

At the 23,736 tokens/s measured on one H100 (8 rows a step: dev/LEADERBOARD.md) the 62.9B tokens take 30.7
days, $1,988 at $2.70 an hour. It took 64.6 GB, 3.6 more than `jaxlm plan` says of 8 rows: the plan counts attention `cudnn`, on
Hopper it is `cudnn_packed`. 256 rows a step were not tried: `model.attention=cudnn` if they do not fit. Final loss: not yet
measured.
"""

from jaxlm.configs import base


def get_config():
    c = base.get_config()
    c.model.n_layers = 32
    c.model.d_model = 2560
    c.model.n_heads = 40
    c.model.n_kv_heads = 10
    c.model.d_ff = 10_240
    c.model.vocab_size = 32005
    c.model.rope.theta = 500_000.0
    c.model.remat = "names"
    c.data.chat_tokens = True
    c.data.dir = "data/1b"
    c.data.sources.fineweb_edu = dict(path="", weight=87.0)
    c.data.sources.finemath = dict(path="", weight=10.0)
    c.data.sources.python_edu = dict(path="", weight=3.0)
    c.train.steps = 120_000
    c.train.batch_size = 256
    c.train.seq_len = 2048
    c.train.microbatch_size = 8
    c.train.eval_every_steps = 1000
    c.eval.max_mb = 2.0
    c.optim.name = "adamw8bit"
    c.optim.lr = 2e-4
    c.optim.warmup_steps = 2000
    c.checkpoint.every_steps = 1000
    c.checkpoint.keep_every = 20_000
    c.mesh.data = 1
    c.mesh.fsdp = -1
    return c
