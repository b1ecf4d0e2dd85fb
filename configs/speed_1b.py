"""The first story's 1.04B model (docs/stories.md), faster: 1,038,696,448 parameters, 6.5B tokens where it took 11.8B.

    jaxlm train speed_1b --config.workdir=runs/speed_1b

Data (made as its file says), depth and width of gpuburnout_1b, with 16 query / 4 key-value heads of 128 and QK-norm: it
exports as Qwen3. Muon for the layers' matrices, rates and b2 by rule (6e-4 for them, 7.64e-4 for the rest, .99497), linear to
0, 262,144 tokens a step. By published sweeps that comes to the reference's loss with about half of its tokens
(docs/recipe.md). One A100, H100 or H200 of 80 GB or more.

Planned by `jaxlm plan`, not measured: 22.5 hours on one H100, $61 at $2.70 an hour; 63.6 hours on one A100, $102 at $1.60.
Muon's own time, evaluation and checkpoints are not in that (the two make it $61.7). Final loss: not yet measured.

If you do not know when you will stop: `--config.optim.schedule=wsd --config.optim.decay_fraction=.5`, and finish from any
checkpoint by `jaxlm train RUN --branch=decay --steps=N`. `--config.workdir=runs/shrunk --config.phases.shrink=cpu` tries the
whole plan in a minute or two on a CPU, small.
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
    c.model.qk_norm = True
    c.data.chat_tokens = True
    c.data.dir = "data/1b"
    c.data.sources.fineweb_edu = dict(path="", weight=87.0)
    c.data.sources.finemath = dict(path="", weight=10.0)
    c.data.sources.python_edu = dict(path="", weight=3.0)
    c.train.steps = 24_800
    c.train.batch_size = 128
    c.train.seq_len = 2048
    c.train.microbatch_size = 16
    c.train.eval_every_steps = 500
    c.eval.at_start = True
    # The recipe (docs/recipe.md)
    c.optim.name = "muon"
    c.optim.lr = 0.0
    c.optim.rates = ("layers_.*/kernel 0",)
    c.optim.decay_follows_rate = True
    c.optim.b2 = 0.0
    c.optim.schedule = "linear"
    c.optim.final_lr_ratio = 0.0
    c.optim.warmup_steps = 500
    c.checkpoint.every_steps = 500
    c.checkpoint.keep_every = 5000
    c.sample.prompts = (
        "The capital of France is",  # a fact
        "Photosynthesis is the process by which",  # a definition
        "If a train travels 60 miles in 1.5 hours, its average speed is",  # arithmetic
        'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',  # code
    )
    c.sample.temperature = 0.7
    c.sample.also_greedy = True
    c.phases.plan.smoke = base.phase(steps=100, usd=3.0, max_nonfinite_steps=0)
    c.phases.plan.main = base.phase(steps=24_800, usd=100.0)
    c.hardware.usd_per_hour = 2.70  # an H100 in configs/prices.toml; put what you pay
    return c
