"""Checkpoints by Orbax: asynchronous, rotated, verified. Any mesh restores what another one wrote.

`checkpoints/<step>/` holds `params` (the only item that sampling and export read), `train` (the optimizer's state and
the counters), `meta` (step, resolved config, fingerprint of the data, digest of every array) and `checksums.json`, which
says that the arrays were read back from the disk, and were what the devices held.

    store     the checkpoints of a run            saving    one save, in a thread, with the votes of several processes
    restore   one checkpoint, by all processes    verify    reads back; checksums of files
    meta      what a checkpoint is made of        digest    one number for an array
    keep      which to keep, and room for them    pace      how often to save
    damage    damage and errors of disks, in words
    mirror    copies verified checkpoints elsewhere; mirror_worker does it, remote reads and writes there
"""
