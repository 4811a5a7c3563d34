"""The command lines that train and serve what was found."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from meshwright.planner.fit.published import WORDS as PUBLISHED
from meshwright.planner.fit.vllm import UTILIZATION, prompt_tokens
from meshwright.planner.search.request import PlanRequest
from meshwright.spec import Layout, RunSpec
from meshwright.spec.hf.config_read import has_weights
from meshwright.spec.schema import known_keys
from meshwright.spec.sections import SelectiveRecompute

_OF_PIPELINES = ("schedule", "virtual", "stages")
"""Keys of the layout without effect unless there is a pipeline."""


def train_command(spec: RunSpec, request: PlanRequest) -> str:
    """The `meshwright train` of a run that a request has led to, with all keys of its layout that matter.

    Raises `UserError`.
    """
    words = ["meshwright", "train", *model_words(spec, request)]
    keys = {key: text for key, text in request.overrides if not key.startswith(("layout.", "recompute."))}
    if not request.run_file:
        keys = {key: text for key, text in keys.items() if not _is_usual(key, text)}
    keys.setdefault("precision.compute", spec.precision.compute)
    keys |= {"data.seq_len": str(spec.data.seq_len), "train.batch_tokens": str(spec.train.batch_tokens)}
    keys |= _layout_keys(spec.layout, request.given_in("layout"))
    keys["recompute.policy"] = spec.recompute.policy
    if isinstance(spec.recompute, SelectiveRecompute) and (saved := spec.recompute.saved_words):
        keys["recompute.save"] = saved
    return shlex.join([*words, *(word for key, text in keys.items() for word in (f"--{key}", text))])


_SIXTEEN = {"bf16": "bfloat16", "fp16": "float16"}
"""Formats of 16 bits -> their names for `export` and vLLM."""


def model_words(spec: RunSpec, request: PlanRequest) -> list[str]:
    """The words that name the model. Raises `UserError`."""
    if source := request.run_file:
        return [source]
    if spec.model.preset is not None:
        return ["--model.preset", spec.model.preset]
    folder = str(spec.model.hf)
    return ["--from" if has_weights(folder) else "--model.hf", folder]


def serve_commands(spec: RunSpec, form: str, model: str, batch: int, length: int) -> list[str]:
    """The commands that write a model's weights in a format, and serve them by vLLM with the sizes counted.

    `model` is the folder of a run or of an HF model, or what stands for one.
    """
    folder, layout = f"{model}-{form}", spec.layout
    writing = [["meshwright", "quantise", model, folder, "--recipe", form]]
    name = _SIXTEEN.get(form)
    if name is not None:
        is_hf = (Path(model) / "config.json").is_file()
        folder = model if is_hf else folder
        writing = [] if is_hf else [["meshwright", "export", model, folder, "--dtype", name]]
    if form in PUBLISHED:  # which vLLM finds in config.json
        folder, writing = model, []
    serving = ["vllm", "serve", folder, "--max-model-len", str(length), "--max-num-seqs", str(batch)]
    serving += ["--max-num-batched-tokens", str(prompt_tokens(batch))]
    serving += ["--gpu-memory-utilization", str(UTILIZATION)]
    serving += [] if form in _SIXTEEN or form in PUBLISHED else ["--quantization", "compressed-tensors"]
    sizes = {
        "tensor-parallel-size": layout.tp, "pipeline-parallel-size": layout.pp,
        "data-parallel-size": layout.dp,
    }  # fmt: skip
    serving += [word for flag, size in sizes.items() if size > 1 for word in (f"--{flag}", str(size))]
    serving += ["--enable-expert-parallel"] if layout.ep > 1 else []
    serving += ["--dtype", "float16"] if form == "fp16" else []  # else a model in bf16 is served in it
    return [shlex.join(words) for words in (*writing, serving)]


def served_model(request: PlanRequest) -> str:
    """The folder that is served: of a run or an HF model, or RUN, which stands for one."""
    path = Path(str(request.model))
    is_model = not isinstance(request.model, RunSpec) and ((path / "run.json").is_file() or has_weights(path))
    return str(path) if is_model else "RUN"


def _is_usual(key: str, text: str) -> bool:
    """True for the default of a key, but for keys of adapters, without which there would be none."""
    known = known_keys().get(key)
    return known is not None and known.default == text and not key.startswith("lora.")


def _layout_keys(layout: Layout, given: dict[str, Any]) -> dict[str, str]:
    """Dotted keys of a layout that differ from the usual ones, or from those that a run file may give."""
    usual, found = Layout().model_dump(), layout.model_dump()
    idle = () if layout.pp > 1 else _OF_PIPELINES
    shown = {
        name: value
        for name, value in found.items()
        if name in given or (value != usual[name] and name not in idle)
    }
    return {f"layout.{name}": _text(value) for name, value in shown.items()}


def _text(value: Any) -> str:
    """A value as its flag takes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
