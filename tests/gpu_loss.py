"""Dry runs on a CPU whose loss and masks are those of a GPU, to which plans for GPUs can be compared."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch

from meshwright.dryrun.rank_step import Rehearsal, rehearse
from meshwright.kernels import cross_entropy
from meshwright.model import attention
from meshwright.planner.rank_view import takes_flash
from meshwright.spec import RunSpec
from meshwright.spec.tiling import Tiling, tiled


def rehearsed(spec: RunSpec, rank: int = 0) -> Rehearsal:
    """A dry run whose loss is taken as on a GPU, in chunks as large, and without masks where flash kernels of
    a GPU need none."""
    usual = Tiling()
    one_each = attention._one_document_each
    with (
        patch.object(cross_entropy, "takes_triton", lambda _device: True),
        patch.object(attention, "_one_document_each", lambda each: takes_flash(spec) or one_each(each)),
        tiled(replace(usual, logits_cpu=usual.logits, loss_logits_cpu=usual.loss_logits)),
    ):
        return rehearse(spec, rank, torch.device("cpu"))
