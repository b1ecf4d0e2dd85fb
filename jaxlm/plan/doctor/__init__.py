"""The checks of `jaxlm doctor`: they find a run's problems on this machine before it starts.

versions, gpu, storage and findings import no JAX, so that they answer even if JAX can't start.
"""
