"""Checkpoints by Orbax: asynchronous, rotated, verified. Any mesh restores what another one wrote.

`checkpoints/<step>/` holds `params` (the only item that sampling and export read), `train` (the optimizer's state and
the counters), `meta` (step, resolved config, fingerprint of the data, digest of every array) and `checksums.json`, which
says that the arrays were read back from the disk, and were what the devices held.

    store     the checkpoints of a run            saving    one save, in a thread; votes: of several processes
    restore   one checkpoint, by all processes    verify    reads back; checksums of files
    meta      what stands beside the arrays       digest    one number for an array
    layout    turns a state into items, and back  keep      chooses which checkpoints to delete
    interval  how often to save                   room      on the disk: reserve, warning
    damage    tells damage from other errors      disk      errors of disks, in words
    mirror    copies verified checkpoints elsewhere; mirror_worker does it, mirror_process is how the run sees that process,
              mirror_layout says what lies where, remote reads and writes there
"""
