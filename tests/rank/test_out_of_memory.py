"""A run that is refused memory ends with a sentence about what needs less."""

from __future__ import annotations

import errno
import multiprocessing
import re
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.rank.out_of_memory import is_out_of_memory, memory_errors_told
from meshwright.spec import RunSpec, UserError
from meshwright.spec.load import from_tree

SPEC = from_tree(
    {
        "model": {"layers": 2, "hidden": 256, "ffn": 512, "heads": 4, "vocab_size": 8192},
        "data": {"seq_len": 512, "corpus": "synthetic"},
        "train": {"batch_tokens": 2**16, "steps": 1},
        "layout": {"micro_batch": 128},
    }
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("std::bad_alloc"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_about_memory_are_told_from_others(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


def test_true_errors_of_torch_and_numpy_are_known() -> None:
    with pytest.raises(UserError, match=r"asked for 4,504 TB more"), memory_errors_told(SPEC):
        torch.empty(2**50)
    with pytest.raises(UserError, match=r"asked for 4\.00 PiB more"), memory_errors_told(SPEC):
        np.ones(2**49)


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="invalid for input") as raised, memory_errors_told(SPEC):
        torch.zeros(3).view(2)
    assert not isinstance(raised.value, UserError)


def test_a_device_that_is_not_known_has_a_sentence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.profile.machine.gpus", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "Nothing 9000")
    with pytest.raises(UserError, match=r"more\); recompute\.policy = 'full'"), memory_errors_told(SPEC):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def train_within(spec: RunSpec, more: int, folder: Path) -> None:
    """Train with at most `more` bytes of addresses beyond those in use, and write the sentence to a file."""
    from meshwright import api

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))
    try:
        api.train(spec, out=folder / "out", quiet=True)
    except UserError as error:
        (folder / "sentence").write_text(f"{error.code} {error}")


def test_a_run_under_a_limit_names_a_plan_that_needs_less(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["meshwright.train.loop", "meshwright.verify.verify"])
    process = context.Process(target=train_within, args=(SPEC, 700 * 2**20, tmp_path))
    process.start()
    process.join()
    sentence = (tmp_path / "sentence").read_text()
    assert process.exitcode == 0 and sentence.startswith("2 layout: this process ran out of memory (it asked")
    found = re.findall(r"needs (\S+ .B) a rank by the plan.*; dp=1, .*would need (\S+ .B) a rank", sentence)
    (((needed, unit), (less, other)),) = [[size.split() for size in pair] for pair in found]
    assert float(less) * {"MB": 1, "GB": 1000}[other] < float(needed) * {"MB": 1, "GB": 1000}[unit]
