"""jaxlm: from raw text to a language model that others can run, in JAX."""

__version__ = "0.1.0"
