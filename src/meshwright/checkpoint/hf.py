"""HF folders in and out: config.json, (sharded) safetensors, tokenizer files.

A `_Piece` says how one tensor of the file is made of the decoder's parameters and back: by name, by a
transpose (GPT-2's Conv1D keeps its weights the other way round) and by joining (its c_attn is q, k and v).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.model.decoder import Decoder
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.hf import write_hf_config

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class _Piece:
    """One tensor of an HF file: the parameters that it joins along dim 0, and whether it is transposed."""

    hf: str
    parameters: tuple[str, ...]
    transposed: bool = False


def _pieces(spec: ModelSpec) -> list[_Piece]:
    """Every tensor of the family's files, in the order of the model."""
    return _gpt2_pieces(spec) if spec.family == "gpt2" else _llama_pieces(spec)


def _llama_pieces(spec: ModelSpec) -> list[_Piece]:
    pieces = [_Piece("model.embed_tokens.weight", ("embed.weight",))]
    linears = [
        (f"attn.{x}", f"self_attn.{x}_proj", spec.out_bias if x == "o" else spec.qkv_bias) for x in "qkvo"
    ]
    linears += [(f"mlp.{x}", f"mlp.{x}_proj", spec.mlp_bias) for x in ("gate", "up", "down")]
    norms = [("attn_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")]
    norms += [(f"attn.{x}_norm", f"self_attn.{x}_norm") for x in "qk" if spec.qk_norm]
    for layer in range(spec.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        for name, hf, bias in [*linears, *((name, hf, False) for name, hf in norms)]:
            pieces += [
                _Piece(f"{theirs}.{hf}.{leaf}", (f"{ours}.{name}.{leaf}",))
                for leaf in (("weight", "bias") if bias else ("weight",))
            ]
    pieces.append(_Piece("model.norm.weight", ("head.norm.weight",)))
    return pieces if spec.tied else [*pieces, _Piece("lm_head.weight", ("head.weight",))]


def _gpt2_pieces(spec: ModelSpec) -> list[_Piece]:
    pieces = [
        _Piece("transformer.wte.weight", ("embed.weight",)),
        _Piece("transformer.wpe.weight", ("embed.positions",)),
    ]
    norms = {"ln_1": "attn_norm", "ln_2": "mlp_norm"}
    linears = {
        "attn.c_attn": ("attn.q", "attn.k", "attn.v"),
        "attn.c_proj": ("attn.o",),
        "mlp.c_fc": ("mlp.up",),
        "mlp.c_proj": ("mlp.down",),
    }
    for layer in range(spec.layers):
        ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        for leaf in ("weight", "bias"):
            pieces += [
                _Piece(f"{theirs}.{hf}.{leaf}", (f"{ours}.{name}.{leaf}",)) for hf, name in norms.items()
            ]
            pieces += [
                _Piece(f"{theirs}.{hf}.{leaf}", tuple(f"{ours}.{n}.{leaf}" for n in names), leaf == "weight")
                for hf, names in linears.items()
            ]
    pieces += [_Piece(f"transformer.ln_f.{leaf}", (f"head.norm.{leaf}",)) for leaf in ("weight", "bias")]
    return pieces if spec.tied else [*pieces, _Piece("lm_head.weight", ("head.weight",))]


class HfWeights:
    """The tensors of an HF folder under the decoder's names, read one at a time.

    `shapes` are those that `spec` asks for. Opening checks that no tensor is missing or left over, and every
    shape, from the files' headers; raises `UserError` with the tensor's name.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder, self.spec = folder, spec
        with torch.device("meta"):
            self.shapes = {name: parameter.shape for name, parameter in Decoder(spec).named_parameters()}
        self._files = _headers(folder)
        self._pieces = _pieces(spec)
        self._names = {piece.hf: self._stored_name(piece.hf) for piece in self._pieces}
        self._check()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(parameter, value), each once, in the dtype of the file."""
        for piece in self._pieces:
            name = self._names[piece.hf]
            with safe_open(self._files[name][0], framework="pt") as file:
                tensor = file.get_tensor(name)
            tensor = tensor.T if piece.transposed else tensor
            sizes = [self.shapes[parameter][0] for parameter in piece.parameters]
            yield from zip(piece.parameters, (part.contiguous() for part in tensor.split(sizes)), strict=True)

    def _stored_name(self, name: str) -> str:
        """GPT-2's published files leave out the `transformer.` of the names."""
        bare = name.removeprefix("transformer.")
        return bare if name not in self._files and bare in self._files else name

    def _check(self) -> None:
        for piece in self._pieces:
            name = self._names[piece.hf]
            if name not in self._files:
                raise UserError(
                    f"model.hf: {self.folder} lacks the tensor {name}, which its config.json asks for"
                )
            wanted, found = self._wanted(piece), self._files[name][1]
            if wanted != found:
                raise UserError(
                    f"model.hf: the tensor {name} of {self._files[name][0]} has shape {list(found)}, "
                    f"but config.json asks for {list(wanted)}"
                )
        known = set(self._names.values())
        for name, (path, _) in self._files.items():
            if name not in known and not self._is_redundant(name):
                raise UserError(
                    f"model.hf: {path} has a tensor {name}, which its config.json has no place for"
                )

    def _wanted(self, piece: _Piece) -> tuple[int, ...]:
        first, *rest = (self.shapes[name] for name in piece.parameters)
        shape = (first[0] + sum(other[0] for other in rest), *first[1:])
        return shape[::-1] if piece.transposed else tuple(shape)

    def _is_redundant(self, name: str) -> bool:
        """What old files hold beside the weights: masks, rotary tables, and a tied head once more."""
        if name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")):
            return True
        return self.spec.tied and name == "lm_head.weight"


def _headers(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Tensor name -> (file, shape), from the headers of the folder's safetensors files."""
    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    found[name] = (path, tuple(file.get_slice(name).get_shape()))
        except (SafetensorError, OSError) as error:
            raise UserError(f"model.hf: {path} is not a readable safetensors file ({error})") from error
    return found


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / WEIGHTS, folder / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UserError(
            f"model.hf: {folder} has neither {WEIGHTS} nor {INDEX}; give a folder with safetensors"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"model.hf: {index} is not a safetensors index ({error})") from error
    for name in names:
        if Path(name).name != name:
            raise UserError(f"model.hf: {index} names the file {name!r}, which is outside of its folder")
        if not (folder / name).is_file():
            raise UserError(f"model.hf: {index} names the file {name}, which is not in {folder}")
    return [folder / name for name in names]


def import_hf(folder: Path | str) -> tuple[ModelSpec, HfWeights]:
    """The spec of an HF folder, and its weights under the decoder's names (iterate for (name, tensor)).

    Raises `UserError` for a folder that the decoder cannot compute, or whose tensors are not those that its
    config.json asks for.
    """
    spec = ModelSpec.model_validate({"hf": str(folder)})
    return spec, HfWeights(Path(folder), spec)


def load_hf(folder: Path | str, dtype: torch.dtype | None = None) -> Decoder:
    """The decoder of an HF folder with its weights, in `dtype` (by default the one that its config names)."""
    spec, weights = import_hf(folder)
    decoder = Decoder(spec).to(dtype or _config_dtype(Path(folder))).eval()
    parameters = dict(decoder.named_parameters())
    with torch.no_grad():
        for name, value in weights:
            parameters[name].copy_(value)
    return decoder


def _config_dtype(folder: Path) -> torch.dtype:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return _DTYPES.get(config.get("dtype") or config.get("torch_dtype") or "float32", torch.float32)


def export_hf(
    folder: Path | str,
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    tokenizer_file: Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a folder that transformers opens: config, weights, and the tokenizer if its file is given.

    `tensors` are the decoder's parameters by name, written in `dtype` (by default that of the embedding), in
    one file or in several of at most `max_shard_bytes` each. The folder appears by one rename, whole or not
    at all. Raises `UserError` for a folder that exists and is not empty, a model that no HF family computes,
    and tensors that are missing or misshapen.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; give another one to export to")
    _check_tensors(spec, tensors)
    dtype = dtype or tensors["embed.weight"].dtype
    end_id = _end_id(tokenizer_file) if tokenizer_file is not None else None
    config = write_hf_config(spec, str(dtype).removeprefix("torch."))
    config |= {"bos_token_id": end_id, "eos_token_id": end_id}
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        os.chmod(unfinished, 0o755)  # mkdtemp's are for their owner alone
        _write_json(unfinished / "config.json", config)
        _write_json(unfinished / "generation_config.json", {"bos_token_id": end_id, "eos_token_id": end_id})
        _write_weights(unfinished, spec, tensors, dtype, max_shard_bytes)
        if tokenizer_file is not None:
            _write_tokenizer(unfinished, tokenizer_file, spec.max_seq_len)
        os.replace(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _check_tensors(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> None:
    with torch.device("meta"):
        wanted = {name: parameter.shape for name, parameter in Decoder(spec).named_parameters()}
    for name, shape in wanted.items():
        if name not in tensors:
            raise UserError(f"export: the tensor {name} is missing, which this model has")
        if tensors[name].shape != shape:
            raise UserError(
                f"export: the tensor {name} has shape {list(tensors[name].shape)}, not {list(shape)}"
            )
    for name in tensors:
        if name not in wanted:
            raise UserError(f"export: there is a tensor {name}, which this model does not have")


def _write_weights(
    folder: Path, spec: ModelSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype, max_shard_bytes: int
) -> None:
    """One file, or as many as `max_shard_bytes` asks for with an index; one of them in memory at a time."""
    shards = _deal(_pieces(spec), tensors, dtype, max_shard_bytes)
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        name = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        joined = {piece.hf: _join(piece, tensors, dtype) for piece in shard}
        save_file(joined, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(joined, name)
        total += sum(tensor.nbytes for tensor in joined.values())
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _deal(
    pieces: list[_Piece], tensors: Mapping[str, Tensor], dtype: torch.dtype, max_shard_bytes: int
) -> list[list[_Piece]]:
    """Consecutive pieces, as many to a shard as fit; a piece larger than a shard has one to itself."""
    shards: list[list[_Piece]] = [[]]
    room = max_shard_bytes
    for piece in pieces:
        size = sum(tensors[name].numel() for name in piece.parameters) * dtype.itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(piece)
        room -= size
    return shards


def _join(piece: _Piece, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    parts = [tensors[name].detach().to(device="cpu", dtype=dtype) for name in piece.parameters]
    joined = torch.cat(parts) if len(parts) > 1 else parts[0]
    return (joined.T if piece.transposed else joined).contiguous()


def _end_token(tokenizer_file: Path) -> dict[str, Any]:
    """The entry of the token that ends a document: `<|endoftext|>`, or the first of the special tokens."""
    try:
        added = json.loads(tokenizer_file.read_text(encoding="utf-8"))["added_tokens"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{tokenizer_file} is not a tokenizer.json ({error})") from error
    special = [token for token in added if token.get("special")]
    if not special:
        raise UserError(f"{tokenizer_file} has no special token that could end a document")
    return next((token for token in special if token["content"] == "<|endoftext|>"), special[0])


def _end_id(tokenizer_file: Path) -> int:
    return int(_end_token(tokenizer_file)["id"])


def _write_tokenizer(folder: Path, tokenizer_file: Path, max_seq_len: int) -> None:
    end = _end_token(tokenizer_file)["content"]
    shutil.copyfile(tokenizer_file, folder / "tokenizer.json")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
