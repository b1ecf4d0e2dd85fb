"""gpuburnout_1b with 16 query / 4 key-value heads of 128: the same size, meant for Hopper.

    jaxlm train gpuburnout_1b_h128 --config.workdir=runs/1b_h128 --config.data.dir=DATA

1,038,692,352 parameters. Data, hardware and steps as gpuburnout_1b.

Hours, dollars and final loss with jaxlm: not yet measured.
"""

from jaxlm.configs import base


def get_config():
    c = base.get_config()
    c.model.n_layers = 16
    c.model.d_model = 2048
    c.model.n_heads = 16
    c.model.n_kv_heads = 4
    c.model.d_ff = 8192
    c.model.vocab_size = 32005
    c.model.rope.theta = 500_000.0
    c.data.chat_tokens = True
    c.data.dir = "data/1b"
    c.data.sources.fineweb_edu = dict(path="", weight=87.0)
    c.data.sources.finemath = dict(path="", weight=10.0)
    c.data.sources.python_edu = dict(path="", weight=3.0)
    c.train.steps = 90_000
    c.train.batch_size = 64
    c.train.seq_len = 2048
    c.train.microbatch_size = 16
    c.train.eval_every_steps = 1000
    c.optim.lr = 3e-4
    c.optim.warmup_steps = 1000
    c.checkpoint.every_steps = 1000
    c.checkpoint.keep_every = 10_000
    return c
