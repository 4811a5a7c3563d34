"""Options of functions: each stands once, and is a keyword of the function and a flag of its verb."""

from __future__ import annotations

from typing import Annotated, TypedDict, Unpack

import pytest
from stand_ins import stand_in

from meshwright import api
from meshwright.api.options import Option, completed, options_of, whole
from meshwright.cli.main import main
from meshwright.cli.parser import Flag, flags_of, parse, verb


class Colours(TypedDict, total=False):
    red: Annotated[int, Option("how red", "N", whole(0), 3)]
    deep: Annotated[bool, Option("no pale ones")]


def paint(
    wall: str, coats: Annotated[int, Option("layers of paint", "N", whole(1))], **colours: Unpack[Colours]
) -> None:
    """Stand for a function with an option that must be given, and with those of a `TypedDict`."""


def test_flags_are_the_options_of_a_function() -> None:
    flags = {flag.name: (flag.summary, flag.default, flag.required) for flag in flags_of(paint)}
    wanted = {"coats": ("layers of paint", None, True), "red": ("how red", 3, False)}
    assert flags == wanted | {"deep": ("no pale ones", None, False)}


def test_a_flag_before_a_function_takes_the_place_of_its_option() -> None:
    made = verb("plan", Flag("red", "as a word", "WORD", str), paint)(lambda _: None)
    assert {flag.name: flag.summary for flag in made.flags}["red"] == "as a word"
    assert parse(made, ["--coats", "2", "--red", "dark"]).flags == {"red": "dark", "coats": 2, "deep": False}


def test_options_that_are_not_given_have_their_defaults() -> None:
    assert completed(Colours, {"deep": True}) == {"red": 3, "deep": True}
    with pytest.raises(TypeError, match="unexpected keyword argument 'blue'"):
        completed(Colours, {"blue": 1})
    with pytest.raises(TypeError, match="'max_token'"):
        api.generate(".", "a", max_token=1)  # type: ignore[call-overload]


def test_a_verb_without_flags_calls_its_function_with_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the command line and Python do the same."""
    result = {"held": 0}
    options = list(options_of(api.chaos))
    chaos = stand_in(monkeypatch, "chaos", result)
    with pytest.raises(KeyError):  # of what is to be shown of the result
        main(["chaos", "--out", "o"])
    given = {name: value for name, value in chaos.only[1].items() if name != "out"}
    assert given == {name: default for name, _, default in options if name != "out"}
