"""Checkpoints: any layout in and out, published by one rename, every piece hashed, nothing pickled.

`store` saves and loads. A save: `save_plan` says which `rectangles` a rank writes, `replicas` share the
work, `staging` copies them to the host, from a GPU by `side_copies` beside training, `digests` hashes pieces,
`manifest` lists them, `writer` writes a directory, and `disk` makes every system call. `frozen` are tensors
that no step changes, once for all checkpoints.
A load: `directory` lists steps, `reader` checks and reads one, `weights` takes parameters alone,
`gather_full` whole tensors, and `identity` tells which weights it holds.
One writer: `lease` is a lock with a heartbeat, which `claim` takes for all ranks.
A second tier: `second_tier` is a store behind the directory, and `no_second_tier` none; `remote_checkpoints`
are those in it, `uploads` the thread that sends them, and `fetch` gets one back.
Which and when: `retention` removes old ones, `interval` computes the steps between saves.
Snapshots: `snapshots` in memory outlive the ranks in `slots`, which are `pinned_memory` where there is a GPU,
`peer_snapshots` keeps copies on the next host, and `no_snapshots` none.
`background` is the thread that writes both behind training; `inspect` lists and checks without a model;
`errors` are the exceptions.
"""

from meshwright.checkpoint.errors import BadCheckpointError, CheckpointError, SaveError
from meshwright.checkpoint.lease import Lease
from meshwright.checkpoint.store import CheckpointStore

__all__ = ["BadCheckpointError", "CheckpointError", "CheckpointStore", "Lease", "SaveError"]
