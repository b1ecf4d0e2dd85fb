"""The second story's model (docs/stories.md) in small: 35M parameters on technical documentation that jaxlm cleans.

    python scripts/make_techdocs_corpus.py --out=corpora/techdocs
    jaxlm prepare configs/data/techdocs.py
    jaxlm tokenize configs/data/techdocs.py
    jaxlm train techdocs_35m --config.workdir=runs/techdocs

8 layers, d 512, 8 query / 4 key-value heads, SwiGLU 1408, 20,480-token BPE, tied: 34,087,424 parameters. 10,000 steps
of 16 x 512 tokens, 82M in all: a few passes over the corpus. One consumer GPU or a patient CPU.

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
    c.data.dir = "data/techdocs"
    c.data.sources.python = dict(path="", weight=20.0)
    c.data.sources.postgresql = dict(path="", weight=10.0)
    c.data.sources.linux = dict(path="", weight=35.0)
    c.data.sources.handbook = dict(path="", weight=3.0)
    c.data.sources.debian = dict(path="", weight=3.0)
    c.data.sources.clang = dict(path="", weight=3.0)
    c.data.sources.apache = dict(path="", weight=3.0)
    c.data.sources.git = dict(path="", weight=4.0)
    c.data.sources.sqlite = dict(path="", weight=7.0)
    c.data.sources.django = dict(path="", weight=7.0)
    c.data.sources.older = dict(path="", weight=5.0)
    c.train.steps = 10_000
    c.train.batch_size = 16
    c.train.seq_len = 512
    c.train.eval_every_steps = 500
    c.eval.max_mb = 1.0
    c.optim.lr = 1e-3
    c.optim.warmup_steps = 200
    c.checkpoint.every_steps = 500
    c.sample.prompts = ("To create an index,", "The kernel", "This module provides")
    c.sample.every_steps = 500
    return c
