"""Checks of what callers of the engine pass, before anything is computed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.api.engine_callbacks import EngineCallback
from meshwright.spec import RunSpec, UserError
from meshwright.spec.records import show
from meshwright.train.given_batch import GivenBatch, pieces_of


def checked_count(count: Any) -> float:
    """Return the `count` of a batch as a number. Raises `UserError` unless it is finite and at least 0."""
    found = _number(count)
    if found is None or not 0 <= found < math.inf:
        raise UserError(
            f"count: {show(count)} does not count tokens or samples; give a finite one of at least 0, such "
            "as len(rows), or leave it out for the number of labels"
        )
    return found


def check_micro_batch(micro_batch: Any) -> None:
    """Raise `UserError` unless `micro_batch` is None or a whole number of at least 1."""
    if micro_batch is None:
        return
    if isinstance(micro_batch, bool) or not isinstance(micro_batch, Integral) or micro_batch < 1:
        raise UserError(
            f"micro_batch: {show(micro_batch)} does not count samples; give a whole number of at least 1, "
            "or leave it out for the run's layout.micro_batch"
        )


def check_loss_fn(loss_fn: Any) -> None:
    """Raise `UserError` unless `loss_fn` is None or can be called."""
    if loss_fn is not None and not callable(loss_fn):
        raise UserError(
            f"loss_fn: {show(loss_fn)} cannot be called; give a function of log-probabilities and rows, and "
            "the count as count=..."
        )


def check_total(total: float, given: bool) -> None:
    """Raise `UserError` if the counts of all data ranks add up to 0, by which no loss can be divided.

    `given` says that the caller passed them, and did not leave them to the number of labels.
    """
    if total > 0:
        return
    if given:
        raise UserError(
            "count: adds up to 0 over all data ranks, and the loss is divided by it; give one of them more "
            "than 0"
        )
    raise UserError(
        "batch.labels: no token of any data rank is trained, as all labels are -100, padding, or a "
        "document's first token; leave such a batch out, or give a count"
    )


def check_rate(lr: Any) -> None:
    """Raise `UserError` unless `lr` is None or a finite number of at least 0."""
    found = _number(lr)
    if lr is not None and (found is None or not 0 <= found < math.inf):
        raise UserError(f"step: lr is {show(lr)}, which no step can take; give 0 or a positive number")


def checked_path(where: str, path: Any) -> Path:
    """Return the path of a file or folder. Raises `UserError` for what is none, `where` it was given."""
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str) or not name or "\0" in name:
        raise UserError(f"{where}: {show(path)} is not a path; give one as a string or a pathlib.Path")
    return Path(name)


def check_step(step: Any) -> None:
    """Raise `UserError` unless `step` is None or the number of a step."""
    if step is not None and (isinstance(step, bool) or not isinstance(step, Integral) or step < 0):
        raise UserError(
            f"load: step {show(step)} does not count steps; give that of a checkpoint, or leave it out for "
            "the newest"
        )


def check_dtype(where: str, dtype: Any) -> None:
    """Raise `UserError` unless `dtype` is None or a format of numbers with a fraction."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UserError(
            f"{where}: dtype {show(dtype)} is not a format of weights; give one of torch's, such as "
            "torch.bfloat16, or leave it out"
        )


def named_tensors(tensors: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) pairs. Raises `UserError` for what are none."""
    if isinstance(tensors, Mapping) or not isinstance(tensors, Iterable):
        raise UserError(
            f"load_hf_state: was given {type(tensors).__name__}; give (name, tensor) pairs, such as those of "
            "hf_state, or a dictionary's items()"
        )
    for pair in tensors:
        found = tuple(pair) if isinstance(pair, tuple | list) else ()
        if len(found) != 2 or not isinstance(found[0], str) or not isinstance(found[1], Tensor):
            raise UserError(
                f"load_hf_state: was given {type(pair).__name__} in the place of a (name, tensor) pair; give "
                "pairs, such as those of hf_state"
            )
        yield found[0], found[1]


def checked_callbacks(callbacks: Any) -> list[EngineCallback]:
    """Return the callbacks. Raises `UserError` for what is no sequence of them."""
    if not isinstance(callbacks, Sequence):
        raise UserError(f"callbacks: {type(callbacks).__name__} is not a sequence; give a list of them")
    for each in callbacks:
        names = [name for name in vars(EngineCallback) if name.startswith("on_")]
        if isinstance(each, type) or not all(callable(getattr(each, name, None)) for name in names):
            raise UserError(
                f"callbacks: {show(each)} has not the methods of an EngineCallback; give objects of a class "
                "that extends it"
            )
    return [*callbacks]


def check_group(group: Any) -> None:
    """Raise `UserError` unless `group` is None or a process group."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise UserError(
            f"group: {show(group)} is not a process group; give one of torch.distributed, or leave it out"
        )


def check_alike(rows: Sequence[Sequence[float]]) -> None:
    """Raise `UserError` where a rank could not read its batch, or has another than those that share it."""
    for rank, (failed, *_) in enumerate(rows):
        if failed:
            raise UserError(f"batch: rank {rank} was given what it cannot take; its own error says why")
    first: dict[float, tuple[int, Sequence[float]]] = {}
    for rank, (_, data_rank, *numbers) in enumerate(rows):
        other, wanted = first.setdefault(data_rank, (rank, numbers[:4]))
        if numbers[:4] != wanted:
            raise UserError(
                f"batch: ranks {other} and {rank} are both of data rank {int(data_rank)} and were given "
                "different samples or counts; give ranks of the tensor, context and pipeline axes the same, "
                "by engine.data_rank"
            )


def check_padding(spec: RunSpec, rows: Sequence[Sequence[float]], given: GivenBatch) -> None:
    """Raise `UserError` for no samples at all, and where a balance would count padding by the layout."""
    samples, moe = {int(row[2]) for row in rows}, spec.model.moe
    if samples == {0}:
        raise UserError("batch: no rank has any samples; give one of them some")
    if moe is None or not (moe.aux_loss or moe.z_loss or moe.bias or moe.capacity_factor is not None):
        return
    if len(samples) > 1 or given.length != given.batch.tokens.shape[1]:
        raise UserError(
            f"batch: the balance of experts counts all tokens, and rows of {given.length} tokens would be "
            f"padded for the layout; give each data rank equally many rows, whose length is a multiple of "
            f"{pieces_of(spec.layout)}, or balance by none of model.moe.aux_loss, z_loss, bias and "
            f"capacity_factor"
        )


def _number(value: Any) -> float | None:
    """Return a number, also that of a tensor with one element; None for what is none."""
    if isinstance(value, str):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
