"""Checkpoints by Orbax: asynchronous, rotated, verified. Any mesh restores what another one wrote.

`checkpoints/<step>/` holds `params` (the only item that sampling and export read), `train` (the optimizer's state and
the counters) and `meta` (step, resolved config, fingerprint of the data, digest of every array).

    store    saves and restores                 layout   turns a state into a checkpoint's items, and back
    digest   one number for an array            keep     chooses which checkpoints to delete
    damage   tells damage from other errors
    mirror   copies verified checkpoints elsewhere; mirror_worker does it, mirror_process is how the run sees that process,
             mirror_layout says what lies where, remote reads and writes there
"""
