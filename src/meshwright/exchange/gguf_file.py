"""A GGUF file for llama.cpp: a model's architecture, its tokenizer and its weights in one.

Tensors are those of the HF folder under llama.cpp's names, with four differences: of queries and keys the
channels that positions rotate are in pairs, for Llama's graph and some others; a norm's weight is the factor
itself; the experts of a layer are one tensor; and of latent attention the part of `kv_b` that makes keys is
apart from the one that makes values, and transposed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright import atomic
from meshwright.exchange.gguf_metadata import check_computed, rope_factors, write_metadata
from meshwright.exchange.gguf_tokenizer import read_tokenizer
from meshwright.exchange.hf_config import write_hf_config
from meshwright.exchange.hf_state_dict import HfTensor, Rotary, hf_tensors, without_further
from meshwright.exchange.llama_cpp_graphs import GRAPHS
from meshwright.exchange.parameter_source import HeldParameters, ParameterSource, ShapesAlone
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.hf.families import FAMILIES

GGUF_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "q8_0": "Q8_0"}
"""Number formats of matrices -> names of `gguf.GGMLQuantizationType`."""
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""Their numbers in `general.file_type` (llama.h, `llama_ftype`)."""
_ALWAYS_FP32 = ("ffn_gate_inp.weight", "position_embd.weight", "rope_freqs.weight")


def check_gguf(file: Path, spec: ModelSpec) -> None:
    """Raise `UserError` where a model cannot become this GGUF file, before its weights are loaded."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UserError(
            "export: GGUF files need the package gguf; install it with `pip install 'meshwright[gguf]'`"
        ) from None
    if file.exists():
        raise UserError(f"export: {file} exists; give another file")
    write_hf_config(spec, "float32")
    check_computed(spec)


def export_gguf(
    file: Path,
    spec: ModelSpec,
    tensors: Mapping[str, Tensor] | ParameterSource,
    tokenizer_file: Path,
    dtype: str,
) -> None:
    """Write a model and its tokenizer as a GGUF file, which appears whole or not at all.

    `tensors` are `Decoder.tensors()`, or a source that they are read from one by one. Matrices are written as
    `dtype`, a key of `GGUF_DTYPES`; vectors and routers in float32, and with q8_0 matrices whose rows are no
    whole blocks of 32 in float16. One parameter is read and converted at a time. A layer that predicts
    further tokens is left out, with a warning. Raises `UserError` as `check_gguf` does, for a tokenizer that
    llama.cpp does not know, and for a file that cannot be written.
    """
    check_gguf(file, spec)
    import gguf

    if spec.mtp_num_layers:
        warnings.warn(
            f"export: {file} is written without the layer of model.mtp_num_layers, which predicts further "
            "tokens; an HF folder has it",
            stacklevel=2,
        )
    source = HeldParameters(tensors) if isinstance(tensors, Mapping) else tensors
    tokenizer, quantized = read_tokenizer(tokenizer_file, spec.vocab_size), GGUF_DTYPES[dtype]
    try:
        with atomic.file(file) as unfinished:
            writer = gguf.GGUFWriter(unfinished, str(FAMILIES[spec.family].gguf))
            writer.add_file_type(_FILE_TYPES[quantized])
            if quantized == "Q8_0":
                writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            write_metadata(writer, spec)
            tokenizer.write(writer)
            for name, value in gguf_tensors(spec, ShapesAlone(source.shapes, source.dtype)):
                kind = _kind(name, value.shape, quantized)
                block, size = gguf.GGML_QUANT_SIZES[kind]
                count = prod(value.shape) // block * size
                writer.add_tensor_info(name, value.shape, np.dtype(np.float32), count, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, value in gguf_tensors(spec, source):
                writer.write_tensor_data(_encoded(value, _kind(name, value.shape, quantized)))
            writer.close()
    except OSError as error:
        raise UserError(
            f"export: {file} cannot be written ({error.strerror or error}); give another file"
        ) from error


def gguf_tensors(spec: ModelSpec, source: ParameterSource) -> Iterator[tuple[str, Tensor]]:
    """Yield (llama.cpp's name, value in fp32) of each tensor."""
    import gguf

    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == FAMILIES[spec.family].gguf)
    names = gguf.get_tensor_name_map(arch, spec.layers)
    for piece in hf_tensors(without_further(spec)):
        if ".experts." in piece.parameters[0]:
            if not piece.expert:  # the first one brings all
                yield from ((_of_experts(name), source[name].float()) for name in piece.parameters)
            continue
        for hf, value in _converted(spec, piece, source):
            name = names.get_name(hf, try_suffixes=(".weight", ".bias"))
            assert name is not None, hf
            yield name if hf.endswith((".weight", ".bias")) else f"{name}.weight", value
    factors = rope_factors(spec)
    if factors is not None:
        yield "rope_freqs.weight", factors


def _of_experts(parameter: str) -> str:
    """Return llama.cpp's name of a layer's experts, by that of the parameter."""
    _, layer, _, _, leaf = parameter.split(".")
    kind, _, bias = leaf.partition("_")
    return f"blk.{layer}.ffn_{kind}_exps.{bias or 'weight'}"


def _converted(spec: ModelSpec, piece: HfTensor, source: ParameterSource) -> Iterator[tuple[str, Tensor]]:
    """Yield what becomes of a tensor of the HF folder, under names of the HF folder's form."""
    hf, parts, family = piece.hf, piece.hf.split("."), FAMILIES[spec.family]
    if parts[-2] in ("q_proj", "k_proj") and spec.mla is None and GRAPHS[str(family.gguf)].rotary_pairs:
        heads = spec.heads if parts[-2] == "q_proj" else spec.kv_heads
        piece = replace(piece, rotary=piece.rotary or (Rotary(heads, spec.head_dim),))
    value = replace(piece, transposed=False).join(source, torch.float32)
    if spec.norm_unit_offset and parts[-2].endswith("norm"):
        value = value + 1
    if parts[-2] == "kv_b_proj":
        assert spec.mla is not None
        per_head = value.unflatten(0, (spec.heads, -1))
        keys, values = per_head.split([per_head.shape[1] - spec.mla.v_dim, spec.mla.v_dim], 1)
        yield hf.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
        yield hf.replace("kv_b_proj", "v_b_proj"), values
    elif parts[-2] == "shared_expert_gate":
        yield hf, value[0]
    elif parts[-1] == "e_score_correction_bias":
        yield ".".join([*parts[:-1], "e_score_correction.bias"]), value
    else:
        yield hf, value


def _kind(name: str, shape: torch.Size, quantized: str) -> Any:
    """Return the `gguf.GGMLQuantizationType` of a tensor."""
    import gguf

    if len(shape) == 1 or name.endswith(_ALWAYS_FP32):
        return gguf.GGMLQuantizationType.F32
    kind = gguf.GGMLQuantizationType[quantized]
    return kind if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else gguf.GGMLQuantizationType.F16


def _encoded(value: Tensor, kind: Any) -> np.ndarray[Any, Any]:
    """Return a tensor's bytes as the file has them, in row-major order."""
    import gguf

    if kind == gguf.GGMLQuantizationType.BF16:
        return value.bfloat16().contiguous().view(torch.int16).numpy()
    return gguf.quants.quantize(value.contiguous().numpy(), kind)
