"""Floor 1: the math, as functions of arrays; no Flax."""
