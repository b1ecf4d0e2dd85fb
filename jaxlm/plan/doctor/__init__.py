"""The checks of `jaxlm doctor`: what a run will meet on this machine, found out before it starts.

A check is a small function that returns findings and may raise: `findings.examine` bounds its time and turns an error into
a finding. versions, gpu, storage and findings import no JAX, so that they answer even if JAX can't start.
"""
