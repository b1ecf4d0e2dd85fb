"""A 400M pilot: train it before you spend on 1B to 7B with the same data.

    jaxlm train pilot_400m --config.workdir=runs/pilot --config.data.path=FOLDER_OF_TEXT

24 layers, d 1024, 16 query / 8 key-value heads of 64, SwiGLU 4096, 32,005-token BPE, tied: 410,310,656 parameters. 8.2B
tokens (20 a parameter) in batches of 524,288 tokens, on one 80 GB GPU.

Hours, dollars and final loss: not yet measured.
"""

from jaxlm.configs import base


def get_config():
    c = base.get_config()
    c.model.n_layers = 24
    c.model.d_model = 1024
    c.model.n_heads = 16
    c.model.n_kv_heads = 8
    c.model.d_ff = 4096
    c.model.vocab_size = 32005
    c.model.rope.theta = 500_000.0
    c.data.chat_tokens = True
    c.data.dir = "data/pilot"
    c.train.steps = 15_650
    c.train.batch_size = 256
    c.train.seq_len = 2048
    c.train.microbatch_size = 16
    c.train.eval_every_steps = 500
    c.optim.lr = 6e-4
    c.optim.warmup_steps = 500
    c.checkpoint.every_steps = 500
    c.checkpoint.keep_every = 5000
    return c
