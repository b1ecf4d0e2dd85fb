"""The models, behind one interface to a plain dict of parameters. Modules in this folder never import this package."""

from jaxlm.models.families import build
from jaxlm.models.params import abstract_params, create_params, init_params, logical_axes
from jaxlm.models.transformer import head_kernel, head_rows
