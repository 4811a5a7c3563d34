"""The description of this host's processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.host import cpu_info

LISTED = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: A Xeon: 2.50GHz

processor\t: 1
model name\t: B
"""


def test_a_value_is_that_of_the_first_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_args, **_kwargs: LISTED)
    assert cpu_info("vendor_id") == "GenuineIntel"
    assert cpu_info("model name") == "A Xeon: 2.50GHz"
    assert cpu_info("microcode") == ""


def test_other_systems_describe_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_args: object, **_kwargs: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert cpu_info("vendor_id") == ""
