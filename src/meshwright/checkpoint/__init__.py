"""Checkpoints: any layout in and out, published by one rename, every piece hashed, nothing pickled."""

from meshwright.checkpoint.errors import BadCheckpointError, CheckpointError, SaveError
from meshwright.checkpoint.lease import Lease
from meshwright.checkpoint.store import CheckpointStore

__all__ = ["BadCheckpointError", "CheckpointError", "CheckpointStore", "Lease", "SaveError"]
