"""The formats of weights from elsewhere, for `train.origin.open`."""

from jaxlm.interop import hf_weights, peft

READERS = (peft.read, hf_weights.read)
SCORERS = (hf_weights.read_scores,)  # of reward models
