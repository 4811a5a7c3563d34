"""Bits per byte, size and speed of a model by recipe, and what the quantisation of each layer costs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.data.corpus import Corpus
from meshwright.data.loader import Batch, SplitReader
from meshwright.exchange.hf import export_hf, load_hf
from meshwright.exchange.hf_quantised import Quantisation, quantised_tensors, stored_bytes
from meshwright.infer.forward import no_token_dropped
from meshwright.infer.generate import generate
from meshwright.infer.packed_linears import pack_linears
from meshwright.model.decoder import Decoder
from meshwright.parallel.microbatches import microbatches
from meshwright.spec import RunSpec
from meshwright.weights.quantise import calibrated, nearest, put_back

Row = dict[str, Any]
PROMPT, NEW, ROUNDS = 32, 64, 3
"""Tokens of the prompt and of the continuation that are timed, and how often."""


@dataclass(frozen=True)
class HeldOutBatches:
    """Held-out tokens in batches, and the UTF-8 bytes that they spell."""

    batches: Sequence[Batch]
    bytes: int
    micro_batch: int

    @classmethod
    def read(cls, corpus: Corpus, spec: RunSpec, max_tokens: int | None) -> HeldOutBatches:
        """The first `max_tokens` held-out tokens of a run's data, by default all."""
        reader = SplitReader(corpus.validation, spec, 0, 1)
        batches = list(reader.batches(max_tokens))
        reader.check()
        return cls(batches, reader.split.bytes_for(max_tokens), spec.micro_batch)

    @torch.no_grad()
    def bits_per_byte(self, decoder: Decoder) -> float:
        """The negative log-likelihood of the text by a decoder, in bits, by its bytes."""
        device = next(decoder.parameters()).device
        total = 0.0
        with no_token_dropped(decoder):
            for batch in self.batches:
                for each in microbatches(batch, self.micro_batch, device):
                    total += float(decoder.loss(each.tokens, each.targets, each.positions, each.documents))
        return total / math.log(2) / self.bytes


@dataclass(frozen=True)
class Model:
    """The trained model that is quantised, in fp32; `write` writes a folder of it, quantised if so asked."""

    decoder: Decoder
    held_out: HeldOutBatches
    calibration: Sequence[Tensor]

    def quantised(self, folder: Path, how: Quantisation | None, by_gptq: bool = False) -> None:
        """Write the folder in bf16, or with codes."""
        decoder = self.decoder
        found = None
        if how is not None:
            codes = (
                calibrated(deepcopy(decoder), how, self.calibration)
                if by_gptq
                else nearest(decoder.spec, decoder.tensors(), how)
            )
            found = how, codes
        export_hf(folder, decoder.spec, decoder.tensors(), dtype=torch.bfloat16, quantised=found)


def compare(
    model: Model, recipes: Sequence[tuple[Quantisation | None, bool]], scratch: Path
) -> Iterator[Row]:
    """Yield a row for each recipe, with whether it is by GPTQ: None stands for bf16, and comes first.

    Each is written in a folder of `scratch` and read again. Bits per byte are computed in fp32, whatever the
    weights are stored in.
    """
    shapes = {name: tensor.shape for name, tensor in model.decoder.tensors().items()}
    base = math.nan
    for number, (how, by_gptq) in enumerate(recipes):
        folder = scratch / str(number)
        model.quantised(folder, how, by_gptq)
        bits = model.held_out.bits_per_byte(load_hf(folder, torch.float32))
        base = bits if how is None else base
        name = "bf16" if how is None else how.recipe
        yield {
            "recipe": name + (" gptq" if by_gptq else ""),
            "group": how.group or None if how is not None else None,
            "bits_per_byte": bits,
            "change_percent": 100 * (bits / base - 1),
            "computed_bytes": stored_bytes(model.decoder.spec, shapes, how),
            "file_bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
            "tokens_per_second": _rate(load_hf(folder), model.held_out),
        }


def _rate(decoder: Decoder, held_out: HeldOutBatches) -> float:
    """Tokens a second of greedy generation of one text, as `generate` would compute it."""
    prompt = held_out.batches[0].tokens[0, :PROMPT].tolist()
    packed, took = pack_linears(decoder), []
    for _ in range(ROUNDS + 1):  # the first warms up
        began = time.perf_counter()
        generate(packed, prompt, NEW)
        took.append(time.perf_counter() - began)
    return NEW / statistics.median(took[1:])


def sensitivity(
    model: Model, how: Quantisation, by_block: bool, told: Callable[[Row], None] | None = None
) -> list[Row]:
    """A row for each block or linear layer: the change of bits per byte if only that one is quantised.

    The rest is in bf16. Rows come with the largest change first; `told` gets each as it is found.
    """
    spec = model.decoder.spec
    base = deepcopy(model.decoder).bfloat16().float()
    before = model.held_out.bits_per_byte(base)
    codes = nearest(spec, model.decoder.tensors(), how)
    units: dict[str, list[str]] = {}
    for piece in quantised_tensors(spec):
        if piece.hf in codes:
            module = piece.hf.removesuffix(".weight")
            units.setdefault(".".join(module.split(".")[:3]) if by_block else module, []).append(piece.hf)
    rows: list[Row] = []
    for unit, names in units.items():
        decoder = deepcopy(base)
        put_back(decoder, how, {name: codes[name] for name in names})
        bits = model.held_out.bits_per_byte(decoder)
        rows.append({"layer": unit, "bits_per_byte": bits, "change_percent": 100 * (bits / before - 1)})
        if told is not None:
            told(rows[-1])
    return sorted(rows, key=lambda row: row["change_percent"], reverse=True)
