"""A 7B model for a domain: the second story's size (docs/stories.md), over the GPUs of one host or more.

    jaxlm train domain_7b --config.workdir=runs/7b --config.data.dir=DATA

32 layers, d 4096, 32 query / 8 key-value heads of 128, SwiGLU 14336, 32,005-token BPE with the ChatML tokens, untied:
7,241,773,056 parameters. Eight GPUs of 80 GB or more (`mesh.fsdp`): a step takes 72 GB on each by `jaxlm plan`. Train
pilot_400m on the same data first.

Hours, dollars and final loss: not yet measured.
"""

from jaxlm.configs import base


def get_config():
    c = base.get_config()
    c.model.n_layers = 32
    c.model.d_model = 4096
    c.model.n_heads = 32
    c.model.n_kv_heads = 8
    c.model.d_ff = 14_336
    c.model.vocab_size = 32005
    c.model.tie_embeddings = False
    c.model.rope.theta = 500_000.0
    c.model.remat = "names"
    c.model.scan_layers = True
    c.data.chat_tokens = True
    c.data.dir = "data/domain"
    c.train.steps = 70_000
    c.train.batch_size = 512
    c.train.seq_len = 4096
    c.train.microbatch_size = 32
    c.train.eval_every_steps = 1000
    c.eval.max_mb = 16.0
    c.optim.lr = 3e-4
    c.optim.warmup_steps = 2000
    c.checkpoint.every_steps = 1000
    c.checkpoint.keep_every = 10_000
    c.mesh.data = 1
    c.mesh.fsdp = -1
    return c
