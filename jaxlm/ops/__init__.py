"""Floor 1: the mathematics as functions of arrays; no Flax."""
