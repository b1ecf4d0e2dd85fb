"""Checkpoints: Orbax, asynchronous, rotated, verified, independent of the mesh that wrote them.

`checkpoints/<step>/` holds `params` (so that sampling and export read nothing else), `train` (optimizer state and
counters) and `meta` (step, resolved config, fingerprint of the data, and a digest of every array).

    store    saves and restores          layout   which array of the state is which item of a checkpoint
    digest   one number for an array     keep     which checkpoints stay
    damage   what a damaged one looks like
"""
