"""Minutes on a laptop: a small model on the documentation that every installation has.

    jaxlm train quickstart --config.workdir=runs/quickstart

The corpus is made from the Python standard library's and installed packages' documentation (87), NumPy's, SciPy's and
JAX's mathematical docstrings (10) and Python sources (3), so nothing is downloaded.

2.8M parameters in the recipe of docs/recipe.md: Muon, QK-norm, heads of 128, linear to 0. No GPU, no cost; held-out loss
8.36 -> 4.54 nats (1.87 bits per byte of prose) in 2.5 minutes on 2 idle cores (dev/LEADERBOARD.md).
"""

from jaxlm.configs import base


def get_config():
    c = base.get_config()
    c.model.n_layers = 3
    c.model.d_model = 256
    c.model.n_heads = 2
    c.model.n_kv_heads = 1
    c.model.d_ff = 512
    c.model.vocab_size = 4096
    c.model.qk_norm = True
    stages = ("unicode", "pii", "junk", "exact", "near")
    c.prepare.sources.prose = base.source("embedded:prose", stages, weight=87.0)
    c.prepare.sources.math = base.source("embedded:math", stages, weight=10.0)
    c.prepare.sources.code = base.source("embedded:code", ("code", "pii", "exact", "near"), weight=3.0)
    c.train.steps = 460
    c.train.batch_size = 4
    c.train.seq_len = 256
    c.train.eval_every_steps = 230
    c.eval.at_start = True
    c.eval.batch_size = 8
    c.eval.max_mb = 0.0
    # The recipe (docs/recipe.md)
    c.optim.name = "muon"
    c.optim.ns_steps = 3
    c.optim.lr = 1e-2
    c.optim.b2 = 0.994
    c.optim.schedule = "linear"
    c.optim.final_lr_ratio = 0.0
    c.optim.warmup_steps = 40
    c.checkpoint.every_steps = 230
    c.sample.prompts = ("Return a new list of", "This function")
    c.sample.temperature = 0.6
    c.sample.every_steps = 230
    return c
