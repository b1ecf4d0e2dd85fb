"""35M parameters on a local GPU or CPU, as in the third story (docs/stories.md): data choices are cheap to try.

    jaxlm train local_35m --config.workdir=runs/35m --config.data.path=FOLDER_OF_TEXT

8 layers, d 512, 8 query / 4 key-value heads, SwiGLU 1408, 20,480-token BPE, tied: 34,087,424 parameters. Hours on
one consumer GPU; 655M tokens in all. Without `data.path` it trains on the quickstart's embedded corpus, which is small:
good for a first look.

Hours, dollars and final loss: not yet measured.
"""

from jaxlm.configs import base


def get_config():
    c = base.get_config()
    c.model.n_layers = 8
    c.model.d_model = 512
    c.model.n_heads = 8
    c.model.n_kv_heads = 4
    c.model.d_ff = 1408
    c.model.vocab_size = 20480
    c.data.sources.prose = dict(path="embedded:prose", weight=87.0)
    c.data.sources.math = dict(path="embedded:math", weight=10.0)
    c.data.sources.code = dict(path="embedded:code", weight=3.0)
    c.train.steps = 80_000
    c.train.batch_size = 16
    c.train.seq_len = 512
    c.train.eval_every_steps = 500
    c.eval.max_mb = 1.0
    c.optim.lr = 1e-3
    c.optim.warmup_steps = 500
    c.checkpoint.every_steps = 500
    c.sample.prompts = ("The", "In order to", "def ")
    c.sample.every_steps = 500
    return c
