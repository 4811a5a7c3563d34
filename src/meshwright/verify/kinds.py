"""Kinds of values that `verify` compares: their order, words about them, and where checkpoints have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

ByKind = Mapping[str, Mapping[str, Tensor]]
"""Whole tensors by kind and name."""
_LEFT_OVER = {"outer error": "outer message"}
"""Kind that is what another one has rounded off -> that one."""
_MODEL = ("parameter", "router bias", "ema", "outer parameter")
"""Kinds that are the model's weights where a run begins."""
_ZEROS = ("outer momentum", "outer error")
"""Kinds, beside moments, that are zeros where a run begins."""
_PHRASES = {
    "initial weight": "the initial value of {}",
    "learning rate": "the learning rate of {}",
    "clipping": "the clipping of a norm {}",
    "samples": "the {} of the samples",
    "forward": "the output of {}",
    "loss": "the loss",
    "further loss": "the loss of further tokens",
    "backward": "the backward of {}",
    "balance": "the router's statistics {}",
    "gradient": "the gradient of {}",
    "grad norm": "the gradient norm",
    "router bias": "{}",
    "loaded step": "the step: the run went on from {}",
    "loaded parameter": "{} as loaded",
    "loaded router bias": "{} as loaded",
    "loaded exp_avg": "the first moment of {} as loaded",
    "loaded exp_avg_sq": "the second moment of {} as loaded",
    "loaded ema": "the moving average of {} as loaded",
    "output": "the module's {}",  # this and the next two are of `meshwright.testing`
    "parameter gradient": "the gradient of {}",
    "input gradient": "the gradient of {}",
    "parameter": "the update of {}",
    "frozen": "{}, which is not trained and has changed",
    "exp_avg": "the first moment of {}",
    "exp_avg_sq": "the second moment of {}",
    "ema": "the moving average of {}",
    "validation loss": "the validation {}",
    "outer parameter": "the outer step of {}",
    "outer momentum": "the outer momentum of {}",
    "outer error": "what an island had not sent yet of {} after the step",
}


def phrase(kind: str) -> str:
    """Words about values of a kind, with braces for the name; a moment may be of any name."""
    if kind in _PHRASES:
        return _PHRASES[kind]
    loaded = kind.startswith("loaded ")
    return f"the {kind.removeprefix('loaded ')} of {{}}{' as loaded' if loaded else ''}"


def kinds_of_a_step(moments: Iterable[str]) -> tuple[str, ...]:
    """The kinds that are compared in each step, in the order in which a step computes them."""
    return (
        "forward", "balance", "loss", "further loss", "backward", "gradient", "grad norm", "router bias",
        "parameter",
        *moments, "ema", "outer parameter", "outer momentum", "outer error",
    )  # fmt: skip


def kind_of(key: str, apart: bool) -> tuple[str, str]:
    """(kind, name) of a tensor by its name in a checkpoint of replicas, which step `apart` or together.

    What islands have by themselves is named `island.<number>/<name>`; the model is what they last agreed on.
    """
    island, _, own = key.partition("/") if key.startswith("island.") else ("", "", key)
    kind, _, name = own.removeprefix("optim/").partition("/")
    if kind == "outer":
        kind, _, name = own.removeprefix("outer/").partition("/")
        kind = f"outer {kind}"
    elif kind == "model" and apart and not island:
        kind = "outer parameter"
    elif kind == "model":
        kind = "router bias" if name.endswith(".router.bias") else "parameter"
    return kind, f"{island}/{name}" if island else name


def minuends(kind: str, wanted: ByKind) -> Mapping[str, Tensor] | None:
    """The numbers that values of a kind are differences of, and are rounded like; None of other kinds."""
    return wanted.get(_LEFT_OVER.get(kind, ""))


def model_in(found: ByKind) -> Mapping[str, Tensor]:
    """The weights of the run's model and the routers' biases, among values of a step."""
    return found.get("outer parameter") or {**found["parameter"], **found.get("router bias", {})}


def imported(wanted: ByKind, moments: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """The states of a run that begins with the model of those that are `wanted`."""
    model, zeros, begun = model_in(wanted), (*moments, *_ZEROS), dict[str, dict[str, Tensor]]()
    for kind, tensors in wanted.items():
        if kind in zeros:
            begun[kind] = {name: tensor.new_zeros(tensor.shape) for name, tensor in tensors.items()}
        elif kind in _MODEL:
            begun[kind] = {name: model[name.rpartition("/")[2]] for name in tensors}
    return begun
