"""The checks of `jaxlm doctor`: what a run will meet on this machine, found out before it starts.

versions, gpu, storage and findings import no JAX, so that they answer even if JAX can't start.
"""
