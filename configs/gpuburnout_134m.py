"""The GPT-2 shape of the first story (docs/stories.md): 134,994,432 parameters.

    jaxlm train gpuburnout_134m --config.workdir=runs/134m --config.data.path=FOLDER_OF_TEXT

12 layers, d 768, 12 heads, GELU 3072, learned positions, LayerNorm, biases, dropout 0.1, 32,000-token BPE, untied head,
1,024 context. 2.7B tokens (20 a parameter) in batches of 262,144 tokens, on one 24 GB GPU or larger.

Hours, dollars and final loss: not yet measured.
"""

from jaxlm.configs import base


def get_config():
    c = base.get_config()
    c.model.family = "gpt2"
    c.model.n_layers = 12
    c.model.d_model = 768
    c.model.n_heads = 12
    c.model.d_ff = 3072
    c.model.vocab_size = 32000
    c.model.max_seq_len = 1024
    c.model.tie_embeddings = False
    c.model.bias = True
    c.model.dropout = 0.1
    c.data.dir = "data/134m"
    c.train.steps = 10_300
    c.train.batch_size = 256
    c.train.seq_len = 1024
    c.train.microbatch_size = 16
    c.train.eval_every_steps = 500
    c.eval.max_mb = 2.0
    c.optim.lr = 6e-4
    c.optim.warmup_steps = 500
    c.checkpoint.every_steps = 500
    return c
