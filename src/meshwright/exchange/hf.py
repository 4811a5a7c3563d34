"""HF folders in and out: config.json, (sharded) safetensors, tokenizer files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.weights import fill
from meshwright.exchange.dcp_file import write_dcp
from meshwright.exchange.hf_block_scaled import coded_weights
from meshwright.exchange.hf_config import write_hf_config
from meshwright.exchange.hf_files import by_causal_names, model_files, why_lacking
from meshwright.exchange.hf_quantised import KEY, QuantisedLayers
from meshwright.exchange.hf_shards import QuantisedCodes, write_weights
from meshwright.exchange.hf_state_dict import HfTensor, copies, hf_tensors, lists_further
from meshwright.exchange.hf_tokenizer import write_json, write_tokenizer
from meshwright.exchange.parameter_source import HeldParameters, LastRead, ParameterSource
from meshwright.exchange.safetensors_stream import TensorInfo
from meshwright.exchange.stored_weights import StoredWeights, check_tensors, tensor_shapes
from meshwright.exchange.tensor_store import TensorStore
from meshwright.model.decoder import Decoder
from meshwright.model.dynamic_linear import round_inputs
from meshwright.model.quantisation import DYNAMIC
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.hf.config_read import PREDICTED
from meshwright.spec.hf.families import FAMILIES
from meshwright.spec.hf.json_object import read_json_object
from meshwright.spec.hf.special_tokens import copy_side_files
from meshwright.spec.hf.special_tokens import side_files as find_side_files
from meshwright.spec.hf.text_tokens import MODEL_IDS, model_ids
from meshwright.spec.sharded_tensor import Rectangle
from meshwright.spec.tiling import tiling
from meshwright.spec.weights import hf_model
from meshwright.storage.upload import new_folder

_HEAD = "lm_head.weight"


class HfWeights(StoredWeights):
    """The tensors of an HF folder under the decoder's names, read part by part (`Weights`).

    They are those of the files beside the config.json in `folder`, or of a `store` at `place`, under the
    names of HF. Errors are those of `StoredWeights`; copies of a matrix, such as a tied head, have to equal
    it, if files have any. Quantised weights are read in fp32. A layer that predicts further tokens is left
    out where `spec` has none, with a warning if config.json has one and the files do not.
    """

    def __init__(
        self, folder: Path, spec: ModelSpec, store: TensorStore | None = None, place: Path | None = None
    ) -> None:
        self._folder = folder
        found: TensorStore = by_causal_names(store or model_files(folder, spec), spec)
        self._names = found.headers
        config = read_json_object(folder / "config.json", "model.hf")
        found = coded_weights(folder, config, found)
        self.quantised = found if isinstance(found, QuantisedLayers) else None
        stacked = any(name.endswith(".experts.gate_up_proj") for name in found.headers)
        every = hf_tensors(spec, stacked, paired=bool(config.get("rope_interleave", True)))
        self._copies = copies(spec)
        expected = (piece for piece in every if not piece.copy)
        super().__init__(f"model.hf: {place or folder}", spec, found, expected)
        if config.get(PREDICTED) and not lists_further(spec, found.headers):
            warnings.warn(
                f"model.hf: {folder / 'config.json'} has {PREDICTED} {config[PREDICTED]}, and the weights "
                "have no such layer, as those that transformers writes; the model is read without it",
                stacklevel=2,
            )

    def rounded_inputs(self) -> list[str]:
        """The parameters whose layers round their inputs, too, by the folder's recipe."""
        if self.quantised is None or self.quantised.quantisation.recipe not in DYNAMIC:
            return []
        parameters = {piece.hf: piece.parameters[0] for piece in self._pieces}
        return [parameters[name] for name in self.quantised.weights(parameters)]

    def why_lacking(self, name: str) -> str:
        """Return the cause and the remedy of a tensor that the files lack, or ''."""
        return why_lacking(name, self._names, self._spec)

    def is_redundant(self, name: str) -> bool:
        """Return True for tensors of files that are not weights of the decoder.

        They are masks and rotary tables of old files, copies of matrices, and DeepSeek's and GLM's last
        layers, which predict further tokens, where the model has none.
        """
        if name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")):
            return True
        if self._spec.tied and name == _HEAD:
            return True
        if self._spec.mtp_num_layers:
            return name in self._copies
        layer = ".".join(name.split(".")[:3])
        predicts = FAMILIES[self._spec.family].deepseek_router == "v3"
        return predicts and f"{layer}.eh_proj.weight" in self._names

    def _check_value(self, piece: HfTensor, place: Rectangle, value: Tensor) -> None:
        """Raise `UserError` for a copy that has other values than the matrix itself: a tied head, with which
        transformers 5 computes, or what a layer that predicts further tokens shares with the model."""
        config = self._folder / "config.json"
        if (
            "embed.weight" in piece.parameters
            and self._spec.tied
            and self._differs(_HEAD, piece, place, value)
        ):
            raise UserError(
                f"model.hf: tie_word_embeddings is true in {config}, but the tensor {_HEAD} has other values "
                f"than {piece.hf}; set tie_word_embeddings to false there, which keeps both"
            )
        for name, parameters in self._copies.items():
            if parameters == piece.parameters and self._differs(name, piece, place, value):
                raise UserError(
                    f"model.hf: {self._folder}: the tensor {name} has other values than {piece.hf}, which "
                    f"its layer shares; set {PREDICTED} to 0 in {config}, which leaves the layer out"
                )

    def _differs(self, name: str, piece: HfTensor, place: Rectangle, value: Tensor) -> bool:
        """True if the files have a tensor of this name with other values than a rectangle of a piece."""
        if name not in self._names:
            return False
        shapes = [self._store.headers[each][1] for each in (name, piece.hf)]
        return shapes[0] != shapes[1] or not torch.equal(next(self._store.parts(name, [place])), value)


def import_hf(folder: Path | str) -> tuple[ModelSpec, HfWeights]:
    """Return the spec of an HF folder, and its weights under the decoder's names.

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
    dcp: bool = False,
) -> None:
    """Write a folder that transformers opens: config, weights, and the tokenizer if its file is given.

    `tensors` are `Decoder.tensors()`, or a source that they are read from one by one. They are written in
    `dtype` (by default that of the embedding), in one file or in several of at most `max_shard_bytes` each
    (by default 5 GB). The folder appears by one rename, whole or not at all; below a URL, which `folder` may
    be, its config.json comes last. A `tokenizer_config.json` in the folder of the tokenizer's file names the
    end and the beginning of a text; it is copied, with the model's length if it has none. Other files of the
    tokenizer and a generation_config.json are copied from the folder `side_files`. With `quantised`, the
    files have these codes in place of the tensors of their names; with `dcp`, the tensors, which are then all
    in memory, are those of a directory of torch's distributed checkpoints. `card` is the text of README.md.
    Raises `UserError` for a folder that exists and is not empty or that cannot be written, a model that no HF
    family computes, and tensors that are missing or misshapen.
    """
    source = HeldParameters(tensors) if isinstance(tensors, Mapping) else tensors
    try:
        with new_folder(folder, "export") as made:
            unfinished = made.path
            check_tensors("export: the decoder", tensor_shapes(spec).items(), source.shapes)
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
            if dcp:
                _write_dcp(unfinished, spec, source, dtype)
                return
            most = max_shard_bytes or tiling().shard_bytes
            write_weights(made, spec, source, dtype, most, quantised)
    except OSError as error:
        raise UserError(
            f"export: {folder} cannot be written ({error.strerror or error}); give another folder"
        ) from error


def _write_dcp(folder: Path, spec: ModelSpec, source: ParameterSource, dtype: torch.dtype) -> None:
    last, pieces = LastRead(source), {piece.hf: piece for piece in hf_tensors(spec)}
    listed = [
        TensorInfo(name, piece.shape(source.shapes), piece.dtype(dtype)) for name, piece in pieces.items()
    ]
    write_dcp(folder, listed, lambda name: pieces[name].join(last, dtype))
