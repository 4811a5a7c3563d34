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

import tokenizers
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.model.decoder import Decoder
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.hf_json import read_json_object
from meshwright.spec.hf_write import write_hf_config
from meshwright.spec.tokens import KNOWN_ENDS, copy_side_files, find_bos, token_name

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
    weight_map = read_json_object(index, "model.hf").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"model.hf: {index} has no weight_map from tensors to files")
    names = sorted(set(weight_map.values()))
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
    config = read_json_object(folder / "config.json", "model.hf")
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return _DTYPES.get(name, torch.float32) if isinstance(name, str) else torch.float32


def _mode_of_new_files(folder: Path) -> int:
    """What a file made here may be read by: safetensors makes its own readable by their owner alone."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    return mode


def export_hf(
    folder: Path | str,
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    tokenizer_file: Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    side_files: Path | None = None,
) -> None:
    """Write a folder that transformers opens: config, weights, and the tokenizer if its file is given.

    `tensors` are the decoder's parameters by name, written in `dtype` (by default that of the embedding), in
    one file or in several of at most `max_shard_bytes` each. The folder appears by one rename, whole or not
    at all. A `tokenizer_config.json` beside the tokenizer's file names the end and the beginning of a text;
    it is copied, and told the model's length if it has none. The other files of the tokenizer and the
    generation_config.json that the folder `side_files` has go along. Raises `UserError` for a folder that
    exists and is not empty or that cannot be written, a model that no HF family computes, and tensors that
    are missing or misshapen.
    """
    folder = Path(folder)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} exists and is not an empty folder; give another one to export to")
        _check_tensors(spec, tensors)
        dtype = dtype or tensors["embed.weight"].dtype
        ends = _Ends.of(tokenizer_file) if tokenizer_file is not None else _Ends()
        config = write_hf_config(spec, str(dtype).removeprefix("torch.")) | ends.ids()
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            os.chmod(unfinished, 0o755)  # mkdtemp's are for their owner alone
            _write_json(unfinished / "config.json", config)
            _write_json(unfinished / "generation_config.json", ends.ids())
            if side_files is not None:
                copy_side_files(side_files, unfinished)
            _write_weights(unfinished, spec, tensors, dtype, max_shard_bytes)
            if tokenizer_file is not None:
                _write_tokenizer(unfinished, tokenizer_file, ends, spec.max_seq_len)
            os.replace(unfinished, folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    except (OSError, SafetensorError) as error:
        raise UserError(f"export: {folder} cannot be written ({error})") from error


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
        (folder / name).chmod(_mode_of_new_files(folder))
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


@dataclass(frozen=True)
class _Ends:
    """The tokens (text, id) that end and begin a text; None for one that the tokenizer does not have."""

    eos: tuple[str, int] | None = None
    bos: tuple[str, int] | None = None

    @staticmethod
    def of(tokenizer_file: Path) -> _Ends:
        """As the `tokenizer_config.json` beside the file says.

        Else the end has a known name, and the beginning is what the tokenizer's post-processor puts first.
        """
        try:
            backend = tokenizers.Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"export: {tokenizer_file} is not a tokenizer.json ({error})") from error
        known = [(name, i) for name in KNOWN_ENDS if (i := backend.token_to_id(name)) is not None]
        path = tokenizer_file.with_name("tokenizer_config.json")
        config = read_json_object(path, "export") if path.is_file() else {}
        name = token_name(config.get("eos_token"))
        eos = known[0] if name is None and known else None
        if name is not None and (number := backend.token_to_id(name)) is not None:
            eos = (name, number)
        if eos is None:
            wanted = repr(name) if name is not None else f"any of {', '.join(KNOWN_ENDS)}"
            raise UserError(
                f"export: {tokenizer_file} has no end-of-document token {wanted}; name one of its tokens as "
                f"eos_token in {path.name} beside it"
            )
        bos = find_bos(config, json.loads(backend.to_str())["post_processor"], backend.token_to_id)
        return _Ends(eos, (str(backend.id_to_token(bos)), bos) if bos is not None else None)

    def ids(self) -> dict[str, int | None]:
        """The two as keys of config.json and generation_config.json."""
        return {
            "bos_token_id": self.bos[1] if self.bos else None,
            "eos_token_id": self.eos[1] if self.eos else None,
        }


def _write_tokenizer(folder: Path, tokenizer_file: Path, ends: _Ends, max_seq_len: int) -> None:
    shutil.copyfile(tokenizer_file, folder / "tokenizer.json")
    beside = tokenizer_file.with_name("tokenizer_config.json")
    if beside.is_file():
        shutil.copyfile(beside, folder / beside.name)
        config = read_json_object(beside, "export")
        if "model_max_length" not in config:
            _write_json(folder / beside.name, config | {"model_max_length": max_seq_len})
        return
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": ends.bos[0] if ends.bos else None,
        "eos_token": ends.eos[0] if ends.eos else None,
        "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / beside.name, config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
