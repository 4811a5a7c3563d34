"""Bytes that a rank reads of the weights that a run starts from, by a dry run, of files that may be holes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_folders import SHAPES, write_folder
from meshwright import api
from meshwright.api.source import keys_of_source
from meshwright.cli.main import main
from meshwright.spec import UserError, load

SMALL = {"layers": 2, "hidden": 256, "ffn": 512, "heads": 8, "kv_heads": 4, "vocab_size": 512}
FLAGS = {"data.corpus": "synthetic", "data.seq_len": "16", "precision.compute": "bf16"}


def reads(folder: Path, ranks: list[int], **axes: str) -> list[dict[str, int]]:
    given = FLAGS | {key.replace("__", "."): value for key, value in axes.items()}
    spec = load(None, [*keys_of_source(str(folder)), *given.items()])
    return [api.dryrun(spec, rank=rank, reads=True)["ranks"][0]["reads"] for rank in ranks]


def test_ranks_read_the_files_once_together(tmp_path: Path) -> None:
    """Under ZeRO-3; a stage of a pipeline reads its layers."""
    about = write_folder(tmp_path, SMALL, torch.bfloat16, holes=True)
    sharded = reads(tmp_path, [0, 1], layout__dp="2", layout__zero="3", train__batch_tokens="64")
    assert sum(each["bytes"] for each in sharded) == about["bytes"]
    assert {each["at_a_time"] for each in sharded} == {about["largest_tensor"] // 2}
    (stage,) = reads(tmp_path, [1], layout__pp="2", train__batch_tokens="64")
    assert about["bytes"] // 4 < stage["bytes"] < about["bytes"] * 3 // 4


def test_the_command_says_what_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path, SMALL, torch.bfloat16, holes=True)
    words = [word for key, text in FLAGS.items() for word in (f"--{key}", text)]
    sizes = ["--layout.dp", "2", "--layout.zero", "3", "--train.batch_tokens", "64"]
    assert main(["dryrun", "--from", str(tmp_path), *words, *sizes, "--reads"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "to start rank 0 reads 1.4 MiB of the weights' files, at most 128.0 KiB of it in memory at a time"
        in out
    )
    with pytest.raises(UserError, match=r"^--reads: this run starts from random weights"):
        main(["dryrun", *words, *sizes, "--reads"])


@pytest.mark.full
def test_a_rank_of_128_reads_its_share_of_70_billion_parameters(tmp_path: Path) -> None:
    """The files are holes: 141 GB that take no room on the disk."""
    about = write_folder(tmp_path, SHAPES["70B"], torch.bfloat16, holes=True)
    axes = {"layout__dp": "16", "layout__tp": "8", "layout__zero": "3", "train__batch_tokens": "2048"}
    (found,) = reads(tmp_path, [17], **axes)
    share = about["bytes"] / 128
    assert share < found["bytes"] < 1.6 * share  # parts of rows of 2 KiB are read with their rows
    assert found["at_a_time"] < about["largest_tensor"] / 100
