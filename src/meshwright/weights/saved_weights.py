"""The weights of one checkpoint of a run, whatever its layout, read piece by piece."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from meshwright.checkpoint.directory import candidates
from meshwright.checkpoint.disk import Disk, parse_step_name
from meshwright.checkpoint.errors import BadCheckpointError, CheckpointError
from meshwright.checkpoint.manifest import DTYPES
from meshwright.checkpoint.reader import (
    match_tensors,
    overlapping,
    parse_manifest,
    read_manifest_text,
    stored_parts,
)
from meshwright.checkpoint.weights import ReadBytes, Wanted, WeightPart, fill, whole
from meshwright.exchange.stored_weights import tensor_shapes
from meshwright.spec import UserError, load
from meshwright.spec.parameter_groups import adapters_beside
from meshwright.weights.adapters import adapter_shapes, merged_parts, rectangle_read
from meshwright.weights.checks import average_names, check_finite, check_state

T = TypeVar("T")


class SavedWeights:
    """The weights of a checkpoint: of `step`, or of the newest, its adapters merged into them (`Weights`).

    `run` is the folder of a run, `spec` its spec, and `shapes` has the shape of each parameter and of each
    router's bias by name. `average` reads the moving average of the weights (`train.ema`) in their place.
    Raises `UserError` as `weights.checks.check_state` does, and where there is no such checkpoint.
    """

    def __init__(self, run: Path, step: int | None = None, average: bool = False) -> None:
        self.run, self.spec = run, load(run)
        folder = self.spec.checkpoint.folder(run)
        if not folder.is_dir():
            raise UserError(f"{run}: has no checkpoint yet ({folder} is not there); train it first")
        self._path, self._disk = candidates(folder, step)[0], Disk()
        self._manifest = parse_manifest(self._path, read_manifest_text(self._path, self._disk))
        check_state(run, self.spec, self._manifest.state, average)
        self.shapes = tensor_shapes(self.spec.model)
        self._averages = average_names(self.spec) if average else {}
        self._adapters, self._adapted = adapter_shapes(self.spec), adapters_beside(self.spec)
        held = {self._key(name): self._stored(name) for name in (*self.shapes, *self._adapters)}
        match_tensors(self._manifest, held, self._path)

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self._manifest.step

    @property
    def exact(self) -> bool:
        """True for weights in float64."""
        return self.spec.precision.base == "fp64"

    @property
    def dtype(self) -> torch.dtype:
        """The format of the embedding in the checkpoint."""
        return self._empty("embed.weight").dtype

    def read(self, name: str) -> Tensor:
        """Return a parameter, also of an adapter, or a router's bias, in the format that it is stored in.

        Every byte is checked against its hash. Raises `UserError` for damage and for values that are not
        finite.
        """
        value = torch.empty_like(self._empty(name), device="cpu")
        fill({name: value}, self)
        return value

    def __getitem__(self, name: str, /) -> Tensor:
        """Return what `read` does."""
        return self.read(name)

    def parts(self, wanted: Wanted) -> Iterator[WeightPart]:
        """Yield the stored pieces that overlap wanted rectangles of parameters and routers' biases; of
        weights with adapters those rectangles, merged.

        Errors are those of `read`.
        """
        return merged_parts(self.spec, self.stored_parts, wanted)

    def stored_parts(self, wanted: Wanted) -> Iterator[WeightPart]:
        """Yield the stored pieces that overlap wanted rectangles, also of adapters. Errors are those of
        `read`."""
        names = {self._key(name): name for name in wanted}
        stored = {key: wanted[name] for key, name in names.items()}
        for key, rectangle, value in stored_parts(self._path, self._manifest, stored, self._disk):
            check_finite(self.run, self._manifest.state, names[key], value)
            yield WeightPart(names[key], rectangle, value)

    def reading(self, wanted: Wanted) -> ReadBytes:
        """Return what `parts` of these would take, without reading them: whole pieces, one at a time."""
        stored = {
            self._key(name): [rectangle_read(self._adapted.get(name, ()), each) for each in listed]
            for name, listed in wanted.items()
        }
        beside = (each for name in wanted for each in self._adapted.get(name, ()))
        stored |= {self._key(each.name): [whole(each.shape)] for each in beside}
        sizes = [piece.bytes for _, _, piece in overlapping(self._path, self._manifest, stored, self._disk)]
        return ReadBytes(sum(sizes), max(sizes, default=0))

    def _key(self, name: str) -> str:
        """Return the name of a tensor in the checkpoint: routers' biases have no moving average."""
        return self._averages.get(name, f"model/{name}")

    def _empty(self, name: str) -> Tensor:
        """A tensor of a parameter's shape, in the format that `read` returns it in."""
        found = self._stored(name)
        wide = torch.promote_types(found.dtype, torch.float32) if name in self._adapted else found.dtype
        return found.to(wide)

    def _stored(self, name: str) -> Tensor:
        """A tensor of the shape and the format of what is stored under a name."""
        entry = self._manifest.tensors.get(self._key(name))
        dtype = DTYPES[entry.dtype] if entry is not None else torch.float32
        return torch.empty(self._adapters.get(name) or self.shapes[name], dtype=dtype, device="meta")


def of_whole_checkpoint(run: Path, step: int | None, average: bool, use: Callable[[SavedWeights], T]) -> T:
    """Return what `use` makes of the weights of a run's checkpoint, which it reads.

    It is that of `step`, or the newest one; where that is damaged the best before it, with a warning. `use`
    must leave nothing behind when it raises. Raises `UserError` as `SavedWeights` does, and where all are
    damaged.
    """
    if step is not None:
        return use(SavedWeights(run, step, average))
    folder = load(run).checkpoint.folder(run)
    failures: list[str] = []
    for path in candidates(folder, None) if folder.is_dir() else ():
        parsed = parse_step_name(path.name)
        try:
            made = use(SavedWeights(run, parsed[0] if parsed else None, average))
        except BadCheckpointError as error:
            failures.append(str(error))
            continue
        if failures:
            warnings.warn(f"{'; '.join(failures)}; {path} is used instead", stacklevel=3)
        return made
    if failures:
        raise CheckpointError(f"no checkpoint in {folder} can be used: {'; '.join(failures)}")
    return use(SavedWeights(run, None, average))  # which says that there is none
