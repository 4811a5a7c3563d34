"""Functions of the API replaced by ones that note their calls, for tests of the command line."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from meshwright import api


class Recorder:
    """Stands for one function of the API: takes what that takes, keeps it, and returns `result`."""

    def __init__(self, function: Callable[..., Any], result: Any) -> None:
        self.signature, self.result = inspect.signature(function), result
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.signature.bind(*arguments, **named)
        self.calls.append((arguments, named))
        return self.result

    @property
    def only(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert len(self.calls) == 1
        return self.calls[0]


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, result: Any, module: ModuleType = api) -> Recorder:
    recorder = Recorder(getattr(module, name), result)
    monkeypatch.setattr(module, name, recorder)
    return recorder


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def be_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
