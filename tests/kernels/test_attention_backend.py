"""Which kernels compute attention: the choice, and what torch is told. Packages are stand-ins."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, register_flash_attention_impl
from torch.nn.attention._registry import _FLASH_ATTENTION_IMPLS

from meshwright import api
from meshwright.cli.main import main
from meshwright.hardware.attention_backend import AttentionGpu, attention_backends, planned_backends
from meshwright.hardware.find import cluster
from meshwright.kernels.attention_backend import PACKAGES, attention_backend, backends_in_use
from meshwright.report.progress import Progress
from meshwright.spec import RunSpec, UserError, load

CUDA = torch.device("cuda", 0)
H100, B200, A100 = AttentionGpu((9, 0)), AttentionGpu((10, 0)), AttentionGpu((8, 0))
BASE = {"model.preset": "tiny", "data.corpus": "synthetic", "precision.compute": "bf16"}
FP32 = {"precision.compute": "fp32"}
WHOLE = {"data.document_mask": "false"}


def spec_with(flags: dict[str, str]) -> RunSpec:
    return load(None, [*(BASE | flags).items()])


# The choice ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "flags", "plain", "packed"),
    [
        (A100, {}, "FA2", "FA2"),
        (H100, {}, "cudnn", "FA2"),
        (B200, {}, "cudnn", "FA2"),
        (AttentionGpu((8, 9)), {}, "FA2", "FA2"),
        (AttentionGpu((7, 5)), {"precision.compute": "fp16"}, "math", "efficient"),
        (AttentionGpu((10, 3)), {}, "FA2", "FA2"),
        (AttentionGpu((9, 0), cudnn=False), {}, "FA2", "FA2"),
        (AttentionGpu((9, 0), frozenset({"FA3"})), {}, "cudnn", "FA3"),
        (AttentionGpu((10, 0), frozenset({"FA4"})), {}, "cudnn", "FA4"),
        (AttentionGpu((9, 0), frozenset({"FA3"})), {"model.attention_sinks": "true"}, "FA3", "FA3"),
        (AttentionGpu((10, 0), frozenset({"FA4"})), {"model.head_dim": "192"}, "FA2", "FA2"),
        (H100, {"model.head_dim": "192"}, "cudnn", "FA2"),
        (B200, {"model.head_dim": "192"}, "FA2", "FA2"),
        (H100, {"model.attention_softcap": "30"}, "tiles", "tiles"),
        (H100, FP32 | {"model.kv_heads": "4", "model.heads": "4"}, "efficient", "efficient"),
        (H100, FP32, "math", "efficient"),
        (H100, {"precision.compute": "fp64"}, "math", "math"),
        (H100, {"precision.compute": "fp8", "model.ffn": "512"}, "cudnn", "FA2"),
        (H100, {"train.attention_backend": "FA2"}, "FA2", "FA2"),
        (H100, {"train.attention_backend": "FA3"}, "FA3", "FA3"),
        (A100, {"train.attention_backend": "cudnn"}, "cudnn", "FA2"),
        (AttentionGpu((9, 0), cudnn=False), {"train.attention_backend": "cudnn"}, "cudnn", "FA2"),
        (B200, {"train.attention_backend": "cudnn", "model.head_dim": "192"}, "FA2", "FA2"),
        (None, {}, "cpu", "cpu"),
    ],
)  # fmt: skip
def test_the_kernels_are_those_of_device_and_path(
    gpu: AttentionGpu | None, flags: dict[str, str], plain: str, packed: str
) -> None:
    found = attention_backends(spec_with(flags), gpu)
    assert (found.plain, found.packed) == (plain, packed)
    assert found.taken == packed and attention_backends(spec_with(flags), gpu).path == "packed"
    if "model.attention_sinks" not in flags:
        assert attention_backends(spec_with(flags | WHOLE), gpu).taken == plain


@pytest.mark.parametrize(
    ("gpu", "flags", "note"),
    [
        (H100, {}, "without the package of FlashAttention 3"),
        (B200, {"model.head_dim": "192"}, "cuDNN takes heads of a multiple of 8 channels up to 128, and"),
        (AttentionGpu((9, 0), cudnn=False), {}, "cuDNN is older than 9.15.1, or not there"),
        (H100, {"model.attention_softcap": "30"}, "no kernel that torch calls caps scores"),
        (H100, FP32, "cuDNN takes bf16 and fp16, and this run computes attention in fp32"),
        (H100, {"model.attention_sinks": "true"}, "torch calls no kernel of cuDNN's with attention sinks"),
        (A100, {"model.preset": "deepseek-v3"}, "FlashAttention takes values as wide as keys"),
    ],
)  # fmt: skip
def test_what_is_refused_is_said(gpu: AttentionGpu, flags: dict[str, str], note: str) -> None:
    assert any(each.startswith(note) for each in attention_backends(spec_with(flags), gpu).notes)


@pytest.mark.parametrize(
    ("gpu", "flags"),
    [
        (H100, FP32),
        (B200, FP32),
        (B200, {"model.head_dim": "192"}),
        (H100, {"model.head_dim": "320"}),
    ],
)
def test_a_package_that_would_not_be_taken_is_not_missed(gpu: AttentionGpu, flags: dict[str, str]) -> None:
    """The format or the heads are refused, whatever is installed."""
    notes = attention_backends(spec_with(flags), gpu).notes
    assert notes and not any("package" in each for each in notes), notes


def test_the_words_begin_with_the_path_that_samples_take() -> None:
    packed, whole = (attention_backends(spec_with(flags), H100) for flags in ({}, WHOLE))
    assert packed.words == "FlashAttention 2 for packed documents, cuDNN for whole sequences"
    assert whole.words == "cuDNN for whole sequences, FlashAttention 2 for packed documents"
    assert attention_backends(spec_with({}), A100).words == "FlashAttention 2"
    for flags in ({"model.sliding_window": "64", "data.seq_len": "128"}, {"layout.cp": "2"}):
        assert attention_backends(spec_with(WHOLE | flags), H100).path == "packed"


@pytest.mark.parametrize(
    ("name", "taken"),
    [("a100", "FA2"), ("h100", "cudnn"), ("gb200", "cudnn"), ("mi300x", "FA2"), ("cpu", "cpu")],
)
def test_plans_take_the_kernels_of_the_clusters_devices(name: str, taken: str) -> None:
    assert planned_backends(spec_with(WHOLE), cluster(name).device).taken == taken


# What torch is told -------------------------------------------------------------------------------------


class Handle:
    removed = False

    def remove(self) -> None:
        self.removed = True


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Handle]:
    """That of a package which stands for FlashAttention 3 on a GPU of Hopper."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    handle, known = Handle(), _FLASH_ATTENTION_IMPLS["FA3"]
    register_flash_attention_impl("FA3", register_fn=lambda: handle)
    yield handle
    register_flash_attention_impl("FA3", register_fn=known)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of FlashAttention 3 can be found."""
    module = ModuleType(PACKAGES["FA3"])
    module.__spec__ = sys.__spec__
    monkeypatch.setitem(sys.modules, PACKAGES["FA3"], module)


def choosing(name: str, **flags: str) -> RunSpec:
    return spec_with({"train.attention_backend": name} | flags)


def test_torch_knows_the_packages() -> None:
    assert set(PACKAGES) <= set(_FLASH_ATTENTION_IMPLS)


@pytest.mark.parametrize("name", ["FA3", "auto", "cudnn"])
def test_a_package_is_active_in_the_block(
    name: str, handle: Handle, installed: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        with attention_backend(choosing(name), CUDA) as found:
            assert current_flash_attention_impl() == "FA3" and found.packed == "FA3"
            assert backends_in_use(choosing(name), CUDA) == found
        assert handle.removed and current_flash_attention_impl() is None
        with pytest.raises(KeyError), attention_backend(choosing(name), CUDA):
            raise KeyError
    assert current_flash_attention_impl() is None and not caplog.records


@pytest.mark.parametrize("spec", [choosing("FA2"), choosing("FA3", **{"precision.compute": "fp64"})])
def test_a_package_that_nothing_would_call_is_left_alone(
    spec: RunSpec, handle: Handle, installed: None
) -> None:
    with attention_backend(spec, CUDA) as found:
        assert current_flash_attention_impl() is None
        assert backends_in_use(spec, CUDA) == found


def test_a_package_that_cannot_be_loaded_is_told_and_left(handle: Handle, installed: None) -> None:
    def fails() -> Handle:
        raise RuntimeError("undefined symbol")

    register_flash_attention_impl("FA3", register_fn=fails)
    told = pytest.warns(UserWarning, match=r"FA3.*undefined symbol.*takes FlashAttention 2")
    with told, attention_backend(choosing("auto"), CUDA) as found:
        assert (found.plain, found.packed) == ("cudnn", "FA2")


@pytest.mark.parametrize(
    ("name", "version", "cudnn"),
    [
        ("auto", 92000, True), ("auto", 91002, False), ("auto", None, False), ("FA2", 92000, False),
        ("cudnn", 91002, True),
    ],
)  # fmt: skip
def test_cudnn_is_on_and_first_only_where_it_is_chosen(
    name: str, version: int | None, cudnn: bool, handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    before = torch.backends.cuda.cudnn_sdp_enabled(), torch._C._get_sdp_priority_order()
    with attention_backend(choosing(name), CUDA):
        assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
        first = torch.nn.attention.SDPBackend(torch._C._get_sdp_priority_order()[0])
        assert first.name == ("CUDNN_ATTENTION" if cudnn else "FLASH_ATTENTION")
        assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
    assert (torch.backends.cuda.cudnn_sdp_enabled(), torch._C._get_sdp_priority_order()) == before


def test_a_cpu_computes_attention_by_itself(handle: Handle) -> None:
    with attention_backend(choosing("FA3"), torch.device("cpu")) as found:
        assert current_flash_attention_impl() is None and found.plain == found.packed == "cpu"


def test_an_older_torch_is_told(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    with attention_backend(choosing("FA2"), CUDA):
        pass
    with (
        pytest.raises(UserError, match=r"cannot take 'FA3'.*cannot import name"),
        attention_backend(choosing("FA3"), CUDA),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "capability", "words"),
    [
        ("FA3", (10, 0), "'FA3' needs a GPU of compute capability 9.x, and H100 has 10.0; take 'auto'"),
        ("FA4", (8, 0), "'FA4' needs a GPU of compute capability 9.x or 10.x, and H100 has 8.0"),
        ("FA4", (9, 0), "cannot take 'FA4' from flash_attn.cute (No module named 'flash_attn'); install"),
    ],
)
def test_where_it_cannot_be_had(
    name: str, capability: tuple[int, int], words: str, handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with pytest.raises(UserError) as told, attention_backend(choosing(name), CUDA):
        pass
    assert str(told.value).startswith("train.attention_backend: ") and words in str(told.value)


# Where it is told ---------------------------------------------------------------------------------------


def test_a_run_records_its_kernels(tmp_path: Path) -> None:
    keys = {"data.seq_len": "16", "train.steps": "1", "train.batch_tokens": "32", "layout.micro_batch": "1",
            "train.eval_tokens": "32", "precision.compute": "fp32"}  # fmt: skip
    spec = spec_with(keys)
    api.train(spec, out=tmp_path / "run", quiet=True)
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["attention"]
    device = CUDA if torch.cuda.is_available() else torch.device("cpu")
    assert recorded == backends_in_use(spec, device).to_json()


def test_the_first_lines_of_a_run_on_a_gpu_say_its_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    for gpu in (H100, None):
        Progress().on_start({"step": 0, "attention": attention_backends(spec_with({}), gpu).to_json()})
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "start at step 0",
        "attention: FlashAttention 2 for packed documents, cuDNN for whole sequences; without the package of "
        "FlashAttention 3",
        "start at step 0",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--cluster", "h100"], "by FlashAttention 2 for packed documents, cuDNN for whole sequences"),
        (["--cluster", "h100", "--data.document_mask", "false"], "by cuDNN for whole sequences"),
        (["--cluster", "a100"], "by FlashAttention 2"),
        (["--cluster", "b200", "--train.attention_backend", "FA4"], "by FlashAttention 4"),
    ],
)
def test_plans_and_their_reasons_say_the_kernels(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [word for key, value in BASE.items() for word in (f"--{key}", value)]
    main(["plan", "tiny", "--gpus", "1", "--batch-tokens", "64k", *words])
    assert f"Attention: {told}" in " ".join(capsys.readouterr().out.split())
    main(["explain", *words, *keys])
    assert f"attention {told}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("earlier", "now"), [("FA2", "auto"), ("FA3", "FA3")])
def test_records_of_earlier_versions_are_read(earlier: str, now: str) -> None:
    tree = spec_with({}).to_json()
    del tree["train"]["attention_backend"]
    tree["train"]["flash_attention"] = earlier
    assert RunSpec.model_validate(tree).train.attention_backend == now
