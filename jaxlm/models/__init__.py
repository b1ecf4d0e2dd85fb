"""Floor 2: the models, behind one interface on a plain dict of parameters.

`build` makes a config's model (families). `init_params`, `create_params`, `abstract_params` and `logical_axes` make and
describe its parameters (params). `head_kernel` and `logits` apply its output head (head). Modules in this folder import
each other, never this package.
"""

from jaxlm.models.families import build
from jaxlm.models.params import abstract_params, create_params, init_params, logical_axes
from jaxlm.models.transformer import head_kernel, head_rows, logits
