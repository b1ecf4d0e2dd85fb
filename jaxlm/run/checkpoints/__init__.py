"""Checkpoints by Orbax: asynchronous, rotated, verified. Any mesh can restore a checkpoint that another mesh wrote.

`checkpoints/<step>/` holds `params` (the only item that sampling and export read), `train` (the optimizer's state, the
counters, a moving average if there is one), `meta` (step, resolved config, fingerprint of the data, digest of every
array) and `checksums.json`, which is written once the arrays, read back from the disk, equal the arrays on the devices.

    store     the checkpoints of a run            saving    one save, in a thread; several processes vote on its success
    restore   one checkpoint, by all processes    verify    reads arrays back; writes checksums of files
    meta      the items and metadata              digest    one number for an array
    keep      which to keep; room on the disk     pace      how often to save
    damage    tells damage from errors of the disk; puts errors into words
    mirror    starts copies of verified checkpoints elsewhere; mirror_worker copies, by the file operations in remote
"""
