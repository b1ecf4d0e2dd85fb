"""The 1.92B model between the first story's 1.04B and its 3.12B (docs/stories.md): 1,921,181,184 parameters, grown from 1B.

    jaxlm train gpuburnout_2b --config.workdir=runs/2b

24 layers, d 2304, 36 query / 9 key-value heads of 64, SwiGLU 9216, 32,005-token BPE with the ChatML tokens, tied: 8 layers
and an eighth of the width more than `gpuburnout_1b`. The command trains it from new weights. docs/growth.md says how to grow
it from a run of `gpuburnout_1b`, at whose loss it then begins; with `optim.rates` of 'embed/.* 0.17', 'new/.* 1', '.* 0.033'
what is new learns at 3e-4, the embedding at 5e-5, what was trained at 1e-5: the story's three rates, after one rate for all
had cost .35 nats. One GPU of 80 GB: a step takes 58.9 GB by `jaxlm plan` and by XLA's compiler.

The 11.8B tokens take 75 hours, $202 on an H100 by `jaxlm plan`. Final loss: not yet measured.
"""

from jaxlm.configs import base


def get_config():
    c = base.get_config()
    c.model.n_layers = 24
    c.model.d_model = 2304
    c.model.n_heads = 36
    c.model.n_kv_heads = 9
    c.model.head_dim = 64
    c.model.d_ff = 9216
    c.model.vocab_size = 32005
    c.model.rope.theta = 500_000.0
    c.model.remat = "names"
    c.data.chat_tokens = True
    c.data.dir = "data/1b"
    c.data.sources.fineweb_edu = dict(path="", weight=87.0)
    c.data.sources.finemath = dict(path="", weight=10.0)
    c.data.sources.python_edu = dict(path="", weight=3.0)
    c.train.steps = 90_000
    c.train.batch_size = 64
    c.train.seq_len = 2048
    c.train.microbatch_size = 8
    c.train.eval_every_steps = 1000
    c.eval.at_start = True
    c.optim.lr = 3e-4
    c.optim.warmup_steps = 1000
    c.checkpoint.every_steps = 1000
    c.checkpoint.keep_every = 10_000
    return c
