"""HF folders in and out: config.json, (sharded) safetensors, tokenizer files.

Tensors are read one at a time, and one parameter is assembled at a time: experts, which are one parameter
here, have a tensor each in published files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from meshwright import atomic
from meshwright.checkpoint.weights import fill
from meshwright.exchange.hf_config import write_hf_config
from meshwright.exchange.hf_files import TensorFiles, why_lacking
from meshwright.exchange.hf_quantised import KEY, QuantisedLayers
from meshwright.exchange.hf_shards import QuantisedCodes, write_weights
from meshwright.exchange.hf_state_dict import HfTensor, Shapes, hf_tensors
from meshwright.exchange.hf_tokenizer import write_json, write_tokenizer
from meshwright.exchange.parameter_source import HeldParameters, ParameterSource
from meshwright.model.decoder import Decoder
from meshwright.model.dynamic_linear import round_inputs
from meshwright.model.quantisation import DYNAMIC
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.hf.families import FAMILIES
from meshwright.spec.hf.json_object import read_json_object
from meshwright.spec.hf.special_tokens import copy_side_files
from meshwright.spec.hf.special_tokens import side_files as find_side_files
from meshwright.spec.hf.text_tokens import MODEL_IDS, model_ids
from meshwright.spec.parameters import parameters
from meshwright.spec.tiling import tiling
from meshwright.spec.weights import hf_model

DTYPES = ("F64", "F32", "F16", "BF16")
"""Number formats of weights that are read, by their names in safetensors files."""
_HEAD = "lm_head.weight"


class HfWeights:
    """The tensors of an HF folder under the decoder's names, read one at a time.

    Opening checks, from the files' headers, that no tensor is missing or unknown, that every shape is the
    one that `spec` asks for, and every dtype a floating-point one; reading checks that every value is
    finite, and that a tied head, if files have one, equals the embedding. Both raise `UserError` with the
    tensor's name. Quantised weights are read in fp32 (`Weights`).
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._folder, self._spec = folder, spec
        self._shapes = tensor_shapes(spec)
        files = TensorFiles(folder, spec)
        self._files, self._stored_names = files.headers, files.stored
        self._opened: tuple[Path, Any] | None = None
        config = read_json_object(folder / "config.json", "model.hf")
        self.quantised = None
        if config.get(KEY) is not None and not any(name.endswith("_scale_inv") for name in self._files):
            self.quantised = QuantisedLayers(folder, config, self._files)
            self._files = self.quantised.headers(self._files)
        stacked = any(name.endswith(".experts.gate_up_proj") for name in self._files)
        expected = hf_tensors(spec, stacked, paired=bool(config.get("rope_interleave", True)))
        self._pieces: list[HfTensor] = []
        self._check(expected)

    def take(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (parameter, value) of these parameters, each once, in the dtype of the file.

        Tensors of files that hold none of them are not read.
        """
        stacked: list[Tensor] = []
        for piece in self._pieces:
            if not any(name in names for name in piece.parameters):
                continue
            tensor = self._read(piece.hf)
            if not torch.isfinite(tensor).all():
                raise UserError(
                    f"model.hf: the tensor {piece.hf} in {self._folder} has values that are not finite; give "
                    "another copy of the model"
                )
            if "embed.weight" in piece.parameters:
                self._check_tied(piece.hf, tensor)
            parts = piece.split(tensor, self._shapes)
            if piece.expert is None:
                named = zip(piece.parameters, parts, strict=True)
                yield from (each for each in named if each[0] in names)
                continue
            (parameter,), (part,) = piece.parameters, parts
            shape = self._shapes[parameter]
            if piece.expert == 0:
                stacked = [part.new_empty(shape)]
            stacked[0][piece.expert] = part
            if piece.expert == shape[0] - 1:
                yield parameter, stacked.pop()

    @property
    def exact(self) -> bool:
        """True if a weight is in float64."""
        return any(self._files[piece.hf][2] == "F64" for piece in self._pieces if not piece.exact)

    def rounded_inputs(self) -> list[str]:
        """The parameters whose layers round their inputs, too, by the folder's recipe."""
        if self.quantised is None or self.quantised.quantisation.recipe not in DYNAMIC:
            return []
        parameters = {piece.hf: piece.parameters[0] for piece in self._pieces}
        return [parameters[name] for name in self.quantised.weights(parameters)]

    def _read(self, name: str) -> Tensor:
        dense = self.quantised.read(name) if self.quantised is not None else None
        if dense is not None:
            return dense
        path = self._files[name][0]
        if self._opened is None or self._opened[0] != path:  # each opening parses the header
            self._opened = path, safe_open(path, framework="pt")
        tensor: Tensor = self._opened[1].get_tensor(self._stored_names[name])
        return tensor

    def _check(self, expected: Iterable[HfTensor]) -> None:
        """Note the pieces one by one: a config.json that asks for more than there is ends at the first."""

        def wanted() -> Iterator[tuple[str, tuple[int, ...]]]:
            for piece in expected:
                self._pieces.append(piece)
                yield piece.hf, piece.shape(self._shapes)

        if any(name.endswith("_scale_inv") for name in self._files):
            raise UserError(
                f"model.hf: the weights in {self._folder} are in fp8 with scales; convert them to bf16 first"
            )
        shapes = {name: shape for name, (_, shape, _) in self._files.items()}
        where = f"model.hf: {self._folder}"
        _check_tensors(where, wanted(), shapes, self._is_redundant, partial(why_lacking, spec=self._spec))
        for piece in self._pieces:
            dtype = self._files[piece.hf][2]
            if dtype not in DTYPES:
                raise UserError(
                    f"model.hf: the tensor {piece.hf} in {self._folder} is in {dtype}; convert it to one of "
                    f"{', '.join(DTYPES)} first"
                )

    def _check_tied(self, name: str, embedding: Tensor) -> None:
        """Raise `UserError` for a tied head that has other values than the embedding `name`.

        transformers 5 computes such a model with both.
        """
        if not self._spec.tied or _HEAD not in self._files:
            return
        head = self._read(_HEAD)
        if head.shape != embedding.shape or not (head == embedding).all():
            raise UserError(
                f"model.hf: tie_word_embeddings is true in {self._folder / 'config.json'}, but the tensor "
                f"{_HEAD} has other values than {name}; set tie_word_embeddings to false there, which keeps "
                "both"
            )

    def _is_redundant(self, name: str) -> bool:
        """Return True for tensors of files that are not weights of the decoder.

        They are masks and rotary tables of old files, copies of a tied head, and DeepSeek's and GLM's
        last layers, which predict further tokens in training.
        """
        if name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")):
            return True
        if self._spec.tied and name == _HEAD:
            return True
        layer = ".".join(name.split(".")[:3])
        predicts = FAMILIES[self._spec.family].deepseek_router == "v3"
        return predicts and f"{layer}.eh_proj.weight" in self._files


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of `Decoder.tensors()`, without a decoder: a config.json may ask for any size."""
    shapes = {each.name: each.shape for unit in parameters(spec).values() for each in unit}
    if spec.moe is not None and spec.moe.bias:
        biased = filter(spec.has_experts, range(spec.layers))
        shapes |= {f"blocks.{layer}.mlp.router.bias": (spec.moe.experts,) for layer in biased}
    return shapes


def import_hf(folder: Path | str) -> tuple[ModelSpec, HfWeights]:
    """Return the spec of an HF folder, and its weights under the decoder's names: `take` them by name.

    Raises `UserError` for a folder that the decoder cannot compute, or whose tensors are not those that its
    config.json asks for.
    """
    spec = hf_model(Path(folder), "model.hf")
    return spec, HfWeights(Path(folder), spec)


def load_hf(folder: Path | str, dtype: torch.dtype | None = None) -> Decoder:
    """Return the decoder of an HF folder with its weights, in `dtype`, by default the one of its config.

    A quantised folder's is fp32 by default, in which codes times scales are exact; its layers round their
    inputs if the recipe says so.
    """
    spec, weights = import_hf(folder)
    if dtype is None:
        dtype = torch.float32 if weights.quantised is not None else _config_dtype(Path(folder))
    decoder = Decoder(spec).to(dtype).eval()
    if weights.quantised is not None:
        round_inputs(decoder, weights.quantised.quantisation.recipe, weights.rounded_inputs())
    fill(decoder.tensors(), weights)
    return decoder


def _config_dtype(folder: Path) -> torch.dtype:
    config = read_json_object(folder / "config.json", "model.hf")
    name = config.get("dtype") or config.get("torch_dtype")
    known = (torch.bfloat16, torch.float16, torch.float64)
    return next((dtype for dtype in known if str(dtype) == f"torch.{name}"), torch.float32)


def export_hf(
    folder: Path | str,
    spec: ModelSpec,
    tensors: Mapping[str, Tensor] | ParameterSource,
    tokenizer_file: Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
    side_files: Path | None = None,
    quantised: QuantisedCodes | None = None,
    card: str | None = None,
) -> None:
    """Write a folder that transformers opens: config, weights, and the tokenizer if its file is given.

    `tensors` are `Decoder.tensors()`, or a source that they are read from one by one. They are written in
    `dtype` (by default that of the embedding), in one file or in several of at most `max_shard_bytes` each
    (by default 5 GB). The folder appears by one rename, whole or not at all. A `tokenizer_config.json` in the
    folder of the tokenizer's file names the end and the beginning of a text; it is copied, with the model's
    length if it has none. Other files of the tokenizer and a generation_config.json are copied from the
    folder `side_files`. With `quantised`, the files have these codes in place of the tensors of their names.
    `card` is the text of README.md. Raises `UserError` for a folder that exists and is not empty or that
    cannot be written, a model that no HF family computes, and tensors that are missing or misshapen.
    """
    folder = Path(folder)
    source = HeldParameters(tensors) if isinstance(tensors, Mapping) else tensors
    try:
        with atomic.folder(folder) as unfinished:
            _check_tensors("export: the decoder", tensor_shapes(spec).items(), source.shapes)
            dtype = dtype or source.dtype
            config = write_hf_config(spec, str(dtype).removeprefix("torch."))
            # Without a key transformers has the family's own, which may be beyond the vocabulary.
            ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
            if side_files is not None:
                copy_side_files(find_side_files(side_files, "export"), side_files, unfinished)
                (unfinished / MODEL_IDS).unlink(missing_ok=True)
                ends |= model_ids(side_files, "export")
            if tokenizer_file is not None:
                ends |= write_tokenizer(unfinished, tokenizer_file, spec.max_seq_len, spec.vocab_size)
            config |= {KEY: quantised[0].config()} if quantised is not None else {}
            write_json(unfinished / "config.json", config | ends)
            if not (unfinished / "generation_config.json").exists():
                write_json(unfinished / "generation_config.json", ends)
            if card is not None:
                (unfinished / "README.md").write_text(card, encoding="utf-8")
            most = max_shard_bytes or tiling().shard_bytes
            write_weights(unfinished, spec, source, dtype, most, quantised)
    except OSError as error:
        raise UserError(
            f"export: {folder} cannot be written ({error.strerror or error}); give another folder"
        ) from error


def _check_tensors(
    where: str,
    wanted: Iterable[tuple[str, Sequence[int]]],
    shapes: Shapes,
    is_redundant: Callable[[str], bool] = lambda _: False,
    why_lacking: Callable[[str, Iterable[str]], str] = lambda *_: "",
) -> None:
    """Raise `UserError`, which starts with `where`, unless the shapes are those of the model's tensors.

    `wanted` gives the model's names and shapes; it is read no further than to the first that is missing.
    """
    known = set()
    for name, shape in wanted:
        known.add(name)
        if name not in shapes:
            why = why_lacking(name, shapes)
            raise UserError(f"{where} lacks the tensor {name}, which this model has{why}")
        if tuple(shapes[name]) != tuple(shape):
            raise UserError(
                f"{where}: the tensor {name} has shape {list(shapes[name])}, but this model has {list(shape)}"
            )
    for name in shapes:
        if name not in known and not is_redundant(name):
            raise UserError(f"{where} has a tensor {name}, which this model does not have")
