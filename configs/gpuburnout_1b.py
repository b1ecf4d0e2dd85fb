"""The 1.04B LLaMA-style model of the first story (docs/stories.md): 1,038,692,352 parameters.

    jaxlm prepare configs/data/gpuburnout.py
    jaxlm tokenize configs/data/gpuburnout.py
    jaxlm train gpuburnout_1b --config.workdir=runs/1b

16 layers, d 2048, 32 query / 8 key-value heads of 64, SwiGLU 8192, RoPE theta 500,000, 2,048 context, 32,005-token BPE
with the ChatML tokens, tied. FineWeb-Edu 87 / FineMath 10 / Python-Edu 3, which the first two commands make. One A100,
H100 or H200 of 80 GB or more: a step takes 62 GB by `jaxlm plan`.

The story took 90,000 steps of 131,072 tokens (11.8B) for $175 on an A100, in four phases: to step 200, 10,000, 60,000 and
90,000, with losses of 6.41, 2.907, 2.573 and 2.494. Each phase has a budget; the run stops when it is spent. At the 28.4k
tokens/s of `jaxlm plan` and $1.60 an hour they take $0.58, $20, $104 and $62. The whole plan in a minute or two on a
CPU, small:

    jaxlm train gpuburnout_1b --config.workdir=runs/shrunk --config.phases.shrink=cpu

At the 80,165 tokens/s measured on one H100 (16 rows a step: dev/LEADERBOARD.md) the 11.8B tokens take 40.9
hours, $110 at $2.70 an hour, without evaluation and checkpoints. Final loss with jaxlm: not yet measured.
"""

from jaxlm.configs import base


def get_config():
    c = base.get_config()
    c.model.n_layers = 16
    c.model.d_model = 2048
    c.model.n_heads = 32
    c.model.n_kv_heads = 8
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
    c.eval.at_start = True
    c.optim.lr = 3e-4
    c.optim.warmup_steps = 1000
    c.checkpoint.every_steps = 1000
    c.checkpoint.keep_every = 10_000
    c.sample.prompts = (
        "The capital of France is",  # a fact
        "The planets of the solar system, in order from the Sun, are",  # a list
        "Photosynthesis is the process by which",  # a definition
        "If a train travels 60 miles in 1.5 hours, its average speed is",  # arithmetic
        'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',  # code
        '"Where were you last night?" she asked.\n\n"',  # dialogue
        "Once upon a time, in a village at the foot of a mountain, there lived",  # a story
        "How to change a flat tire:\n\n1.",  # a how-to
    )
    c.sample.temperature = 0.7
    c.sample.also_greedy = True
    c.phases.plan.smoke = base.phase(steps=200, usd=5.0, max_nonfinite_steps=0)
    c.phases.plan.pilot = base.phase(steps=10_000, usd=25.0)
    c.phases.plan.main = base.phase(steps=60_000, usd=110.0)
    c.phases.plan.finish = base.phase(steps=90_000, usd=65.0)
    c.hardware.usd_per_hour = 1.60  # an A100 80GB in configs/prices.toml; put what you pay
    return c
