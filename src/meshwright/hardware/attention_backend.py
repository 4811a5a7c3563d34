"""Which kernels compute the attention of a run: a function of the device, its packages and the run's facts.

A run has two paths. Whole causal sequences take scaled dot-product attention ("plain"); packed documents,
windows, attention sinks and context ranks take sequences of many lengths in one call ("packed"). On a GPU, in
bf16 and fp16, by `train.attention_backend = "auto"`:

- plain: cuDNN's on compute capability 9.0 and 10.0, from cuDNN 9.15.1 on, as torch 2.13 does (before, lengths
  that 128 does not divide were wrong: pytorch issue 169849); else FlashAttention.
- packed: FlashAttention, since torch 2.13 computes packed sequences by no kernel of cuDNN's.
- FlashAttention: release 3 (Shah et al. 2024) on capability 9.x and release 4 on 10.x where the package is
  installed, else torch's own, release 2 (Dao 2023).

What a kernel refuses falls to the next one. The rules are those of `sdp_utils.cpp` of torch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from meshwright.hardware.cluster import Device
from meshwright.spec import RunSpec, UserError

AttentionBackend = Literal["cudnn", "FA2", "FA3", "FA4", "efficient", "math", "tiles", "cpu"]
Capability = tuple[int, int]
NAMES: dict[AttentionBackend, str] = {
    "cudnn": "cuDNN", "FA2": "FlashAttention 2", "FA3": "FlashAttention 3", "FA4": "FlashAttention 4",
    "efficient": "torch's memory-efficient kernel", "math": "torch's plain operators",
    "tiles": "this program's operators, in tiles", "cpu": "this program's kernels for processors",
}  # fmt: skip
HALF = ("bf16", "fp16")
CUDNN_FIRST: tuple[Capability, ...] = ((9, 0), (10, 0))
"""Capabilities on which cuDNN's kernel is preferred to FlashAttention."""
MAJORS: dict[AttentionBackend, tuple[int, ...]] = {"FA3": (9,), "FA4": (9, 10)}
"""Major compute capabilities that releases in packages are for. Source: `_fa3.py` and `_fa4.py` of torch."""
NATIVE: dict[int, AttentionBackend] = {9: "FA3", 10: "FA4"}
"""The release that is written for a major compute capability."""
_MOST_CHANNELS: dict[AttentionBackend, int] = {"FA2": 256, "FA3": 256, "FA4": 128}


class AttentionGpu(NamedTuple):
    """The facts of a GPU and its software that the choice depends on."""

    capability: Capability
    packages: frozenset[str] = frozenset()
    """Releases of FlashAttention that can be imported: "FA3", "FA4"."""
    cudnn: bool = True
    """True from cuDNN 9.15.1 on."""


@dataclass(frozen=True)
class AttentionBackends:
    """The kernels of a run's two paths, and why they are not those that were wanted."""

    plain: AttentionBackend
    packed: AttentionBackend
    path: Literal["plain", "packed"]
    """The path that the samples of the run take; where each is one document it is always the plain one."""
    notes: tuple[str, ...] = ()

    @property
    def flash(self) -> AttentionBackend:
        """The release of FlashAttention that calls of it reach."""
        found = (each for each in (self.packed, self.plain) if each in _MOST_CHANNELS)
        return next(found, "FA2")

    @property
    def taken(self) -> AttentionBackend:
        """The kernel of the path that the samples take."""
        return self.packed if self.path == "packed" else self.plain

    @property
    def words(self) -> str:
        """Such as "FlashAttention 2 for packed documents, cuDNN for whole sequences"."""
        if self.plain == self.packed:
            return NAMES[self.plain]
        parts = {
            "packed": f"{NAMES[self.packed]} for packed documents",
            "plain": f"{NAMES[self.plain]} for whole sequences",
        }
        first = parts.pop(self.path)
        return ", ".join([first, *parts.values()])

    def to_json(self) -> dict[str, Any]:
        """Plain values, for records of runs, plans and dry runs."""
        kernels = {"plain": self.plain, "packed": self.packed, "path": self.path}
        return kernels | {"words": self.words, "notes": list(self.notes)}


def check_release(chosen: str, capability: Capability, device: str) -> None:
    """Raise `UserError` for a release of FlashAttention that is not for such a device."""
    majors = next((found for release, found in MAJORS.items() if release == chosen), None)
    if majors is not None and capability[0] not in majors:
        needed = " or ".join(f"{each}.x" for each in majors)
        raise UserError(
            f"train.attention_backend: {chosen!r} needs a GPU of compute capability {needed}, and {device} "
            f"has {capability[0]}.{capability[1]}; take 'auto'"
        )


def attention_backends(spec: RunSpec, gpu: AttentionGpu | None) -> AttentionBackends:
    """The kernels of attention of a run on a GPU; None stands for processors, which have kernels of ours."""
    path = _path(spec)
    if gpu is None:
        return AttentionBackends("cpu", "cpu", path)
    model = spec.model
    if model.attention_softcap is not None:
        notes = ("no kernel that torch calls caps scores, as model.attention_softcap does",)
        return AttentionBackends("tiles", "tiles", path, notes)
    flash, why_flash = _flash(spec, gpu)
    cudnn, why_cudnn = _cudnn(spec, gpu)
    narrow = model.v_dim != model.head_dim
    packed = flash or _with_mask(spec)
    if cudnn:
        plain: AttentionBackend = "cudnn"
    elif model.attention_sinks:
        plain = flash or "tiles"
    elif flash and not narrow:
        plain = flash
    else:
        plain = _without_mask(spec)
        why_cudnn = [*why_cudnn, *([_NARROW] if flash else [])]
    return AttentionBackends(plain, packed, path, tuple(dict.fromkeys([*why_flash, *why_cudnn])))


_NARROW = "FlashAttention takes values as wide as keys, and whole sequences are not padded to that"


def planned_backends(spec: RunSpec, device: Device) -> AttentionBackends:
    """The kernels of attention of a run on a device that need not be at hand.

    Of packages it is assumed to have the one that the run asks for by name.
    """
    if device.kind == "cpu":
        return attention_backends(spec, None)
    packages, capability = frozenset({spec.train.attention_backend}), device.capability or (8, 0)
    if device.capability is not None:
        check_release(spec.train.attention_backend, capability, device.name)
    return attention_backends(spec, AttentionGpu(capability, packages))


def holds_documents(spec: RunSpec) -> bool:
    """True if a sample holds several documents, or answers, between which there is no attention."""
    return (spec.data.pack and spec.data.document_mask) or spec.preference is not None


def _path(spec: RunSpec) -> Literal["plain", "packed"]:
    """The path that samples of several documents take, and those of windows, sinks or context ranks."""
    length = spec.data.seq_len
    windows = any(kind.window is not None and kind.window < length for kind in spec.model.kinds)
    needs = holds_documents(spec) or windows or spec.model.attention_sinks or spec.layout.cp > 1
    return "packed" if needs else "plain"


def _flash(spec: RunSpec, gpu: AttentionGpu) -> tuple[AttentionBackend | None, list[str]]:
    """The release of FlashAttention, None where it takes no such queries, and why not the wanted one."""
    chosen, channels, format = spec.train.attention_backend, spec.model.head_dim, spec.precision.base
    native = NATIVE.get(gpu.capability[0])
    wanted: AttentionBackend = "FA2"
    if chosen in ("FA3", "FA4"):
        wanted = chosen
    elif chosen != "FA2" and native in gpu.packages and native is not None:
        wanted = native
    notes = []
    reasons = {
        release: _refusal(release, channels, most, format, gpu.capability)
        for release, most in _MOST_CHANNELS.items()
    }
    if chosen in ("auto", "cudnn") and native is not None and wanted != native and not reasons[native]:
        notes.append(f"without the package of {NAMES[native]}")
    for release in dict.fromkeys((wanted, "FA2")):
        if not reasons[release]:
            return release, notes
        notes.append(reasons[release])
    return None, notes


def _cudnn(spec: RunSpec, gpu: AttentionGpu) -> tuple[bool, list[str]]:
    """True if whole sequences take cuDNN's kernel, and why they do not where it is wanted."""
    chosen, model = spec.train.attention_backend, spec.model
    wanted = chosen == "cudnn" or (chosen == "auto" and gpu.capability in CUDNN_FIRST)
    if not wanted:
        return False, []
    most = 256 if gpu.capability == (9, 0) else 128
    channels = max(model.head_dim, model.v_dim)
    reason = _refusal("cudnn", channels, most, spec.precision.base, gpu.capability)
    if not reason and model.attention_sinks:
        reason = "torch calls no kernel of cuDNN's with attention sinks"
    if not reason and chosen == "auto" and not gpu.cudnn:
        reason = "cuDNN is older than 9.15.1, or not there"
    return not reason, [reason] if reason else []


def _refusal(kernel: AttentionBackend, channels: int, most: int, format: str, capability: Capability) -> str:
    """Why a kernel does not take heads of so many channels in a format; "" where it does."""
    name = NAMES[kernel]
    if format not in HALF:
        return f"{name} takes bf16 and fp16, and this run computes attention in {format}"
    if capability < (8, 0):
        return f"{name} needs compute capability 8.0"
    if channels > most or channels % 8:
        return f"{name} takes heads of a multiple of 8 channels up to {most}, and the model has {channels}"
    return ""


def _without_mask(spec: RunSpec) -> AttentionBackend:
    """Torch's kernel of whole sequences that neither cuDNN nor FlashAttention takes."""
    model, word = spec.model, 8 if spec.precision.base in HALF else 4
    fits = spec.precision.base != "fp64" and model.head_dim % word == 0 and model.v_dim % word == 0
    return "efficient" if fits and model.kv_heads == model.heads else "math"


def _with_mask(spec: RunSpec) -> AttentionBackend:
    """The kernel where a mask has to be stored; torch's then read a key once for each query head."""
    if spec.layout.cp > 1 or spec.model.attention_sinks:
        return "tiles"
    word = 8 if spec.precision.base in HALF else 4
    fits = spec.precision.base != "fp64" and not spec.model.head_dim % word
    return "efficient" if fits and not spec.model.v_dim % word else "math"
