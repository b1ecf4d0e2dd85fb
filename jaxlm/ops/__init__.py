"""The math, as functions of arrays; no Flax."""
