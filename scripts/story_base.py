"""The config of the small base model that `scripts/story.sh` trains: three phases, on documents that were prepared before.

    jaxlm prepare DIR --out=data/mine
    jaxlm train scripts/story_base.py --config.workdir=runs/mine --config.data.dir=data/mine

3 layers of d 256, a vocabulary sized by the amount of text, and the chat tokens that SFT needs. The first phase is a smoke test
of 50 steps: a run that has not begun to learn by then stops at its gate, and costs next to nothing.
"""

from jaxlm.configs import base


def get_config():
    c = base.get_config()
    c.model.n_layers = 3
    c.model.d_model = 256
    c.model.n_heads = 4
    c.model.n_kv_heads = 2
    c.model.d_ff = 704
    c.data.chat_tokens = True
    c.data.val_fraction = 0.03
    c.train.steps = 800
    c.train.batch_size = 8
    c.train.seq_len = 256
    c.train.eval_every_steps = 200
    c.eval.at_start = True
    c.eval.batch_size = 8
    c.eval.max_mb = 0.03
    c.optim.lr = 3e-3
    c.optim.warmup_steps = 20
    c.checkpoint.every_steps = 200
    c.phases.plan.smoke = base.phase(steps=50, max_val_loss=7.5, max_nonfinite_steps=0)
    c.phases.plan.main = base.phase(steps=600)
    c.phases.plan.finish = base.phase(steps=800)
    return c
