"""local_35m in a faster recipe: 34,089,472 parameters, 360M tokens where local_35m takes 655M.

    jaxlm train speed_35m --config.workdir=runs/speed_35m --config.data.path=FOLDER_OF_TEXT

Depth and width of local_35m, with 4 query / 2 key-value heads of 128 and QK-norm: it exports as Qwen3. Muon for the layers'
matrices, rates and b2 by rule (2.34e-3 for them, 3.6e-3 for the rest, .99773), linear to 0, 32,768 tokens a step
(docs/recipe.md). One consumer GPU or a patient CPU. Without `data.path` it trains on the quickstart's embedded corpus, which
is small: good for a first look.

Planned by `jaxlm plan`, not measured: 33 minutes on one RTX 4090, $0.22 at $0.40 an hour; 4.7 minutes on one H100. Muon's own
time, evaluation and checkpoints are not in that. Final loss: not yet measured.
"""

from jaxlm.configs import base


def get_config():
    c = base.get_config()
    c.model.n_layers = 8
    c.model.d_model = 512
    c.model.n_heads = 4
    c.model.n_kv_heads = 2
    c.model.d_ff = 1408
    c.model.vocab_size = 20480
    c.model.qk_norm = True
    c.data.sources.prose = dict(path="embedded:prose", weight=87.0)
    c.data.sources.math = dict(path="embedded:math", weight=10.0)
    c.data.sources.code = dict(path="embedded:code", weight=3.0)
    c.train.steps = 11_000
    c.train.batch_size = 64
    c.train.seq_len = 512
    c.train.microbatch_size = 16
    c.train.eval_every_steps = 250
    c.eval.max_mb = 1.0
    # The recipe (docs/recipe.md)
    c.optim.name = "muon"
    c.optim.lr = 0.0
    c.optim.rates = ("layers_.*/kernel 0",)
    c.optim.decay_follows_rate = True
    c.optim.b2 = 0.0
    c.optim.schedule = "linear"
    c.optim.final_lr_ratio = 0.0
    c.optim.warmup_steps = 250
    c.checkpoint.every_steps = 250
    c.sample.prompts = ("The", "In order to", "def ")
    c.sample.every_steps = 250
    return c
