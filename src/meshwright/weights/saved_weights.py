"""The weights of one checkpoint of a run, whatever its layout, read piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.directory import candidates
from meshwright.checkpoint.disk import Disk
from meshwright.checkpoint.manifest import DTYPES
from meshwright.checkpoint.reader import match_tensors, parse_manifest, read_manifest_text, stored_parts
from meshwright.checkpoint.weights import Wanted, WeightPart, fill
from meshwright.exchange.stored_weights import tensor_shapes
from meshwright.spec import UserError, load
from meshwright.weights.load import average_names, check_finite, check_state


class SavedWeights:
    """The weights of a checkpoint: of `step`, or of the newest (`Weights`).

    `run` is the folder of a run, `spec` its spec, and `shapes` has the shape of each parameter and of each
    router's bias by name. `average` reads the moving average of the weights (`train.ema`) in their place.
    Raises `UserError` as `infer.load.check_state` does, and where there is no such checkpoint.
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
        held = {self._key(name): self._empty(name, "meta") for name in self.shapes}
        match_tensors(self._manifest, held, self._path)

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self._manifest.step

    @property
    def exact(self) -> bool:
        """True for weights in float64."""
        return self.spec.precision.base == "fp64"

    def read(self, name: str) -> Tensor:
        """Return a parameter or a router's bias, in the format that it is stored in.

        Every byte is checked against its hash. Raises `UserError` for damage and for values that are not
        finite.
        """
        value = self._empty(name)
        fill({name: value}, self)
        return value

    def parts(self, wanted: Wanted) -> Iterator[WeightPart]:
        """Yield the stored pieces that overlap wanted rectangles of parameters and routers' biases.

        Errors are those of `read`.
        """
        names = {self._key(name): name for name in wanted}
        stored = {key: wanted[name] for key, name in names.items()}
        for key, rectangle, value in stored_parts(self._path, self._manifest, stored, self._disk):
            check_finite(self.run, self._manifest.state, names[key], value)
            yield WeightPart(names[key], rectangle, value)

    def _key(self, name: str) -> str:
        """Return the name of a tensor in the checkpoint: routers' biases have no moving average."""
        return self._averages.get(name, f"model/{name}")

    def _empty(self, name: str, device: str = "cpu") -> Tensor:
        entry = self._manifest.tensors.get(self._key(name))
        dtype = DTYPES[entry.dtype] if entry is not None else torch.float32
        return torch.empty(self.shapes[name], dtype=dtype, device=device)
