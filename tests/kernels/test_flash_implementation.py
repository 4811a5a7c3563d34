"""Which program computes flash attention. Torch's registry is real, the packages are stand-ins."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, register_flash_attention_impl
from torch.nn.attention._registry import _FLASH_ATTENTION_IMPLS

from meshwright import api
from meshwright.kernels.flash_implementation import PACKAGES, flash_implementation
from meshwright.spec import UserError, load

CUDA = torch.device("cuda", 0)


class Handle:
    removed = False

    def remove(self) -> None:
        self.removed = True


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Handle]:
    """That of a package which stands for FlashAttention 3 on a GPU of Hopper."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
    handle, known = Handle(), _FLASH_ATTENTION_IMPLS["FA3"]
    register_flash_attention_impl("FA3", register_fn=lambda: handle)
    yield handle
    register_flash_attention_impl("FA3", register_fn=known)


def test_torch_knows_the_packages() -> None:
    assert set(PACKAGES) <= set(_FLASH_ATTENTION_IMPLS)


def test_it_is_active_in_the_block(handle: Handle, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for name in ("FA2", "FA3"):
            with flash_implementation(name, CUDA):
                assert current_flash_attention_impl() == (None if name == "FA2" else name)
            assert current_flash_attention_impl() is None
        with pytest.raises(KeyError), flash_implementation("FA3", CUDA):
            raise KeyError
    assert handle.removed and current_flash_attention_impl() is None and not caplog.records


def test_a_cpu_computes_attention_by_itself(handle: Handle) -> None:
    with flash_implementation("FA3", torch.device("cpu")):
        assert current_flash_attention_impl() is None


def test_an_older_torch_is_told(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    with flash_implementation("FA2", CUDA):
        pass
    with (
        pytest.raises(UserError, match=r"cannot take 'FA3'.*cannot import name"),
        flash_implementation("FA3", CUDA),
    ):
        pass


def test_a_run_takes_what_its_spec_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[str, str]] = []

    @contextmanager
    def take(name: str, device: torch.device) -> Iterator[None]:
        taken.append((name, device.type))
        yield
        taken.append(("end", ""))

    monkeypatch.setattr("meshwright.kernels.flash_implementation.flash_implementation", take)
    keys = {"model.preset": "tiny", "data.corpus": "synthetic", "data.seq_len": "16", "train.steps": "1"}
    more = {"train.batch_tokens": "32", "layout.micro_batch": "1", "train.flash_attention": "FA3"}
    more |= {"train.eval_tokens": "32"}
    api.train(load(None, [*keys.items(), *more.items()]), out=tmp_path / "run", quiet=True)
    assert taken == [("FA3", "cuda" if torch.cuda.is_available() else "cpu"), ("end", "")]


@pytest.mark.parametrize(
    ("name", "capability", "words"),
    [
        ("FA3", (10, 0), "'FA3' needs a GPU of compute capability 9.x, and H100 has 10.0; take 'FA2'"),
        ("FA4", (8, 0), "'FA4' needs a GPU of compute capability 9.x or 10.x, and H100 has 8.0"),
        ("FA4", (9, 0), "cannot take 'FA4' from flash_attn.cute (No module named 'flash_attn'); install"),
    ],
)
def test_where_it_cannot_be_had(
    name: str, capability: tuple[int, int], words: str, handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with pytest.raises(UserError) as told, flash_implementation(name, CUDA):
        pass
    assert str(told.value).startswith("train.flash_attention: ") and words in str(told.value)
