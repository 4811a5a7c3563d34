"""DeepSpeed's checkpoints: fp32 weights of ZeRO's stages 1 to 3, a file for each rank, and universal ones.

Up to stage 2 the weights of a group of parameters are one flat vector, of which each rank has a part; under
stage 3 each rank has a part of every parameter. A universal checkpoint has a file for each parameter. Source:
DeepSpeed 0.19, `deepspeed/utils/zero_to_fp32.py` and `deepspeed/checkpoint/ds_to_universal.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.exchange.restricted_pickle import Unread, load_torch_file
from meshwright.exchange.tensor_store import (
    Header,
    MappedTensors,
    TensorStore,
    WholeTensors,
    dtype_name,
    header_of,
)
from meshwright.exchange.torch_files import TorchFiles
from meshwright.spec import UserError

NEWEST, NEWEST_UNIVERSAL = "latest", "latest_universal"
_MODEL, _OPTIMISER = "*_model_states.pt", "*_optim_states.pt"
_UNIVERSAL_WEIGHT = "fp32.pt"


def open_zero(folder: Path, key: str) -> TensorStore:
    """Return the weights in a directory such as `global_step100`, in fp32 where ZeRO has them so.

    Errors start with `key`. Raises `UserError` for files that are missing or damaged, and for tensor or
    pipeline parallelism.
    """
    models = sorted(folder.glob(_MODEL), key=_order)
    if any(not re.search(r"mp_rank_0+_model_states", path.name) for path in models):
        raise UserError(
            f"{key}: {folder} has parts of tensor or pipeline parallelism; convert it by DeepSpeed's "
            "ds_to_universal.py, and give that directory"
        )
    optimisers = sorted(folder.glob(_OPTIMISER), key=_order)
    if not optimisers:
        return TorchFiles(models, key)
    return _ZeroStore(folder, models, optimisers, key)


class _Pieces(NamedTuple):
    """The flat pieces of a tensor, in order, and its shape."""

    pieces: list[Tensor]
    shape: tuple[int, ...]


class _ZeroStore(WholeTensors):
    """Weights in files of optimisers, mapped into memory and put together one by one (`TensorStore`)."""

    def __init__(self, folder: Path, models: list[Path], optimisers: list[Path], key: str) -> None:
        self._folder, self._key = folder, key
        if not models:
            raise self._wrong(f"lacks the file {_MODEL}")
        states = [load_torch_file(path, key) for path in optimisers]
        about = [load_torch_file(path, key) for path in models]
        try:
            self._tensors = dict(self._find(about, [state["optimizer_state_dict"] for state in states]))
            aliases = dict(about[0].get("shared_params") or {})
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise self._wrong(f"is no checkpoint of ZeRO ({type(error).__name__}: {error})") from error
        self._tensors |= {
            str(alias): self._tensors[name] for alias, name in aliases.items() if name in self._tensors
        }
        self.headers: dict[str, Header] = {
            name: (folder, found.shape, dtype_name(found.pieces[0].dtype))
            for name, found in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU."""
        found = self._tensors[name]
        return torch.cat(found.pieces)[: math.prod(found.shape)].view(found.shape)

    def _find(
        self, about: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[str, _Pieces]]:
        stage, ranks = _number(states[0]["zero_stage"]), states[0]["partition_count"]
        counts = set(ranks) if isinstance(ranks, list) else {ranks}
        if counts != {len(states)}:
            raise self._wrong(f"has the optimisers of {len(states)} ranks of {max(counts)}")
        if stage >= 3 and len(about) != len(states):
            raise self._wrong(f"has the models of {len(about)} ranks of {len(states)}")
        shapes = about[0]["param_shapes"]
        groups = [shapes] if isinstance(shapes, Mapping) else list(shapes)
        yield from self._frozen(about, stage)
        if stage >= 3:
            flats = [list(state["fp32_flat_groups"]) for state in states]
            yield from self._of_every_rank({name: s for group in groups for name, s in group.items()}, flats)
            return
        flats = [list(state["single_partition_of_fp32_groups"]) for state in states]
        paddings = states[0].get("param_alignment_paddings")
        for number, group in enumerate(groups):
            vector, offset = [parts[number] for parts in flats], 0
            for position, (name, shape) in enumerate(group.items()):
                size = math.prod(shape)
                yield str(name), self._cut(str(name), vector, offset, size, shape)
                offset += size + (paddings[number][position] if paddings is not None else 0)

    def _of_every_rank(
        self, shapes: Mapping[str, Sequence[int]], flats: Sequence[Sequence[Tensor]]
    ) -> Iterator[tuple[str, _Pieces]]:
        offset = 0
        for name, shape in shapes.items():
            part = -(-math.prod(shape) // len(flats))
            cuts = [self._cut(name, flat, offset, part, shape) for flat in flats]
            yield str(name), _Pieces([piece for cut in cuts for piece in cut.pieces], tuple(shape))
            offset += part

    def _frozen(self, about: Sequence[Mapping[str, Any]], stage: int) -> Iterator[tuple[str, _Pieces]]:
        """Yield parameters that were not trained, which are beside the models."""
        for name, shape in (about[0].get("frozen_param_shapes") or {}).items():
            ranks = about if stage >= 3 else about[:1]
            parts = [each["frozen_param_fragments"][name].detach().flatten() for each in ranks]
            yield str(name), _Pieces(parts, tuple(shape))

    def _cut(
        self, name: str, vector: Sequence[Tensor], offset: int, size: int, shape: Sequence[int]
    ) -> _Pieces:
        """Return the part of consecutive flat tensors from `offset` on."""
        pieces, start, wanted = [], 0, size
        for flat in vector:
            first = max(offset - start, 0)
            if first < flat.numel() and wanted:
                pieces.append(flat.detach().flatten()[first : first + wanted])
                offset += pieces[-1].numel()
                wanted -= pieces[-1].numel()
            start += flat.numel()
        if wanted:
            raise self._wrong(f"ends before the parameter {name}")
        return _Pieces(pieces, tuple(shape))

    def _wrong(self, what: str) -> UserError:
        return UserError(f"{self._key}: {self._folder} {what}; copy all files of the checkpoint again")


class UniversalStore(MappedTensors):
    """The weights of a universal checkpoint: `zero/NAME/fp32.pt` (`TensorStore`).

    Errors start with `key`. Raises `UserError` for a file that is damaged, lacks its tensor, or names
    something to run.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._key = key
        self._files = {path.parent.name: path for path in sorted(folder.glob(f"zero/*/{_UNIVERSAL_WEIGHT}"))}
        if not self._files:
            raise UserError(
                f"{key}: {folder} has no zero/NAME/{_UNIVERSAL_WEIGHT}; copy the whole checkpoint again"
            )
        self.headers = {name: header_of(path, self.read(name)) for name, path in self._files.items()}

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU."""
        content = load_torch_file(self._files[name], self._key)
        value = content.get("param") if isinstance(content, dict) else content
        if not isinstance(value, Tensor):
            raise UserError(f"{self._key}: {self._files[name]} lacks its tensor; copy the file again")
        return value.detach()


def _number(stage: Any) -> int:
    """Return ZeRO's stage, which some versions store as an enumeration of their own."""
    return int(str(stage.values[0])) if isinstance(stage, Unread) else int(stage)


def _order(path: Path) -> list[int]:
    """Return the numbers in a file's name: `zero_pp_rank_10` comes after `zero_pp_rank_2`."""
    return [int(number) for number in re.findall(r"\d+", path.name)]
