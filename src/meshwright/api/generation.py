"""Continuations of prompts by a trained model, on one device or on the ranks of a layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack, overload

from meshwright.api.models import as_run, existing, is_run_folder, load_hf, load_run, not_of_ranks
from meshwright.api.options import Option, Step, Weights, choice, completed, fraction, number, whole
from meshwright.api.prompt_files import Row
from meshwright.api.prompt_remarks import warn_of_prompts
from meshwright.api.ranks import run_on_ranks
from meshwright.rank.env import worker
from meshwright.rank.scratch import scratch_folder
from meshwright.spec import UserError, load
from meshwright.spec.load import Overrides, from_tree
from meshwright.spec.precision import PrecisionSpec
from meshwright.units import counted

if TYPE_CHECKING:
    from meshwright.data.tokenizer import Tokenizer
    from meshwright.infer.batching import Request
    from meshwright.infer.forward import DecoderPart
    from meshwright.model.decoder import Decoder

Axes = Mapping[str, object] | Sequence[tuple[str, object]]
"""Dotted keys of a layout with their values."""
OnText = Callable[[int, str], None]
"""Is told the number of a prompt, and the next piece of its continuation."""

MOST_TOKENS = 2**31 - 1
"""Largest number of tokens, and of prompts at a time."""
SPECIAL_TOKENS = ("read", "text", "rendered")
"""Ways to take special tokens that a prompt spells; with 'rendered' none are put around it, either."""
MODULES = ("meshwright.infer.sharded",)
"""Modules that ranks need."""


class Generation(TypedDict, total=False):
    """How prompts are continued; see `generate`."""

    # fmt: off
    max_new_tokens: Annotated[int, Option("most tokens to generate", "N", whole(1), 128)]
    temperature: Annotated[float, Option("0 takes the likeliest token", "T", number(0, inf), 0.0)]
    top_k: Annotated[int | None, Option("draw from the K likeliest tokens", "K", whole(1))]
    top_p: Annotated[float | None, Option("draw from the likeliest tokens that add up to P", "P", fraction)]
    seed: Annotated[int, Option("seed of the draws", "N", whole(0), 0)]
    batch: Annotated[int, Option(
        "most prompts that are continued at a time on a data rank", "N", whole(1), 16)]
    lookup: Annotated[int, Option("most tokens that a turn guesses from earlier text", "N", whole(0), 0)]
    cache_tokens: Annotated[int | None, Option(
        "most tokens whose keys and values are kept at a time", "N", whole(1))]
    special_tokens: Annotated[str, Option(
        "special tokens that a prompt spells: read as tokens, or as text; rendered: and put none around it",
        "|".join(SPECIAL_TOKENS), choice(*SPECIAL_TOKENS), SPECIAL_TOKENS[0])]
    # fmt: on
    weights: Weights
    step: Step


def check_generation(how: Generation) -> None:
    """Raise `UserError` for a value that cannot be meant."""
    least_of = {"max_new_tokens": 0, "step": 0, "batch": 1, "cache_tokens": 1, "lookup": 0}
    for name, least in least_of.items():
        value = how.get(name)
        if value is not None and not (type(value) is int and least <= value <= MOST_TOKENS):
            raise UserError(
                f"{name}: {value!r} is not valid; it should be a whole number from {least} to 2^31 - 1"
            )
    if how["special_tokens"] not in SPECIAL_TOKENS:
        raise UserError(
            f"special_tokens: {how['special_tokens']!r} is not one of {', '.join(SPECIAL_TOKENS)}"
        )


@overload
def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
    run: Path, prompt: str, *, layout: Axes = (), **options: Unpack[Generation]
) -> str: ...
@overload
def generate(
    run: Path, prompt: Sequence[str], *, layout: Axes = (), **options: Unpack[Generation]
) -> list[str]: ...
def generate(
    run: Path, prompt: str | Sequence[str], *, layout: Axes = (), **options: Unpack[Generation]
) -> str | list[str]:
    """Return the continuation of `prompt`, or of each of several, by a checkpoint of a run's folder, or by an
    HF folder.

    `layout` is such as {"layout.tp": 2}, or a list of such pairs, whatever layout trained the model; its
    ranks are started. The options are `max_new_tokens` (128), `temperature` (0 takes the likeliest token),
    `top_k`, `top_p`, `seed`, `weights` ('ema' takes the moving average of a run's), `step` (which of a run's
    checkpoints, by default the newest), `batch` (16: the most prompts that are continued at a time on a data
    rank), `cache_tokens` (the most tokens of these whose keys and values are kept at a time), `lookup` (the
    most tokens that a turn reads ahead) and `special_tokens` ('read' as transformers does; 'text' reads what
    a prompt spells of them as characters; 'rendered' reads them and puts none before or after it, for a chat
    that a template has rendered). Raises `UserError` if the folder has no model or tokenizer.
    """
    run, how = Path(run), completed(Generation, options)
    rows: list[Row] = [{"prompt": text} for text in ([prompt] if isinstance(prompt, str) else prompt)]
    for row in rows:
        if not isinstance(row["prompt"], str):
            raise UserError(
                f"prompt: {row['prompt']!r} is not valid; it should be a text, or a list of texts"
            )
    found = continue_prompts(run, rows, how, layout_keys(layout))
    texts = [row["text"] for row in found]
    return "".join(texts) if isinstance(prompt, str) else texts  # none on other ranks of a torchrun


def layout_keys(layout: Axes) -> Overrides:
    """Return the keys of a layout with their values as texts."""
    pairs = layout.items() if isinstance(layout, Mapping) else layout
    return [(key, str(size)) for key, size in pairs]


def continue_prompts(
    run: Path,
    rows: Sequence[Row],
    how: Generation,
    layout: Overrides = (),
    on_text: OnText | None = None,
    *,
    also_stop: Sequence[int] = (),
) -> list[Row]:
    """Continue the "prompt" of each row as `generate_worker` does, on the ranks of the layout.

    An HF folder is made a run's first, since ranks read their parts of checkpoints.
    """
    check_generation(how)
    ranks = model_ranks(run, layout, how["weights"], how["step"])
    if not rows:
        return []
    with scratch_folder() as scratch:
        source = run if ranks == 1 or worker() is not None else as_run(run, scratch / "run")
        return run_on_ranks(
            partial(generate_worker, source, rows, how, layout, on_text, also_stop=also_stop),
            ranks,
            modules=MODULES,
        )


def model_ranks(run: Path, layout: Overrides, weights: str, step: int | None = None) -> int:
    """Return the number of ranks of a model on a layout.

    Raises `UserError` where `run` is no folder of a model, or has not the weights that are asked for, and for
    a layout that its model cannot take.
    """
    is_run = is_run_folder(existing(run, "the folder of a run or of an HF model"))
    if not is_run and weights != "trained":
        raise UserError(f"--weights: {run} is an HF folder, which has one set of weights; give 'trained'")
    if not is_run and step is not None:
        raise UserError(f"--step: {run} is an HF folder, which has one set of weights; remove --step")
    if not layout:
        return 1
    from meshwright.infer.sharded import spec_to_generate

    if is_run:
        trained = load(run)
        return spec_to_generate(trained.model, trained.precision, layout).layout.world_size
    shortest = {"data": {"seq_len": 1}, "train": {"batch_tokens": 1}}  # that any model's positions hold
    model = from_tree({"model": {"hf": str(run)}, **shortest}).model
    return spec_to_generate(model, PrecisionSpec(), layout).layout.world_size


def generate_worker(
    run: Path,
    rows: Sequence[Row],
    how: Generation,
    layout: Overrides = (),
    on_text: OnText | None = None,
    *,
    also_stop: Sequence[int] = (),
) -> list[Row]:
    """Continue the "prompt" of each row, as one rank of the world of torchrun, or alone.

    The first rank returns the rows, each with the keys "text", "prompt_tokens", "new_tokens" and "stopped"
    (by a token that ends a generation, of which `also_stop` are more than the model's own), and the others an
    empty list. `on_text` is told pieces of the continuations of its own data rank's prompts, on the first
    rank.
    """
    tokenizer = run_tokenizer(run, how["special_tokens"] != "text")
    prompts = Prompts(tokenizer, rows, how, also_stop)
    if (place := worker()) is None or place.rank == 0:
        warn_of_prompts(run, tokenizer, rows, prompts.ids, how["special_tokens"])
    with open_decoder(run, how, layout) as (decoder, part):
        return prompts.continued(decoder, part, on_text)


class Prompts:
    """The "prompt" of each row as tokens, which a decoder continues."""

    def __init__(
        self, tokenizer: Tokenizer, rows: Sequence[Row], how: Generation, also_stop: Sequence[int] = ()
    ) -> None:
        from meshwright.infer.batching import Request

        self._tokenizer, self._rows, self._how = tokenizer, rows, how
        self.ids = [_encoded(tokenizer, row, number, len(rows)) for number, row in enumerate(rows)]
        around = (lambda ids: [*ids]) if how["special_tokens"] == "rendered" else tokenizer.prompt
        stops = (*tokenizer.tokens.stop_ids, *also_stop)
        self._requests = [
            Request(number, around(ids) or [tokenizer.end_id], how["max_new_tokens"], stops)
            for number, ids in enumerate(self.ids)
        ]

    def continued(self, decoder: Decoder, part: DecoderPart | None, on_text: OnText | None) -> list[Row]:
        """Return the rows with their continuations, as `generate_worker` does, by this rank's decoder."""
        from meshwright.infer.generate import check_request, continue_requests
        from meshwright.infer.sampling import Sampling

        how, requests, tokenizer = self._how, self._requests, self._tokenizer
        for request in requests:
            lacking = partial(_lacking, tokenizer, self.ids[request.number], how)
            check_request(decoder.spec, request, _name(request.number, len(requests)), lacking)
        mesh = part.mesh if part is not None else None
        share = (mesh.data_rank, mesh.layout.data_ranks) if mesh is not None else (0, 1)
        own = requests[share[0] :: share[1]]
        stream = _Stream(tokenizer, self.ids, on_text) if on_text is not None else None
        sampling = Sampling(how["temperature"], how["top_k"], how["top_p"], how["seed"])
        continue_requests(
            decoder, own, sampling, tokenizer.vocab_size, how["batch"],
            cache_tokens=how["cache_tokens"], lookup=how["lookup"], show=stream, part=part,
        )  # fmt: skip
        new = {request.number: request.new for request in own}
        if mesh is not None:
            first = mesh.tensor.rank == mesh.pipeline.rank == 0
            for each in mesh.control.gather(list(new.items()) if first else []):
                new.update(each)
            if mesh.rank:
                return []
        return [self._row(request, new[request.number]) for request in requests]

    def _row(self, request: Request, new: list[int]) -> Row:
        request.new = new
        text = _text(self._tokenizer, self.ids[request.number], request.text)
        facts = {"prompt_tokens": len(request.prompt), "new_tokens": len(request.text)}
        row = self._rows[request.number]
        return {**row, "text": text, **facts, "stopped": len(request.text) < len(request.new)}


@contextmanager
def open_decoder(
    run: Path, how: Generation, layout: Overrides
) -> Iterator[tuple[Decoder, DecoderPart | None]]:
    """This rank's decoder and what part it is, which is None on one device."""
    from meshwright.infer.packed_linears import pack_linears
    from meshwright.infer.sharded import load_sharded, spec_to_generate
    from meshwright.rank.world import mesh_of

    average = how["weights"] == "ema"
    if not (run / "run.json").is_file():
        if layout or worker() is not None:
            raise not_of_ranks(run)
        yield pack_linears(load_hf(run)), None
        return
    trained = load(run)
    spec, place = spec_to_generate(trained.model, trained.precision, layout), worker()
    ranks = place.world_size if place is not None else 1
    if spec.layout.world_size != ranks:
        raise UserError(
            f"--layout: {spec.layout.describe()} takes {counted(spec.layout.world_size, 'ranks')}, "
            f"and {ranks} were started; start that many, or give a layout of {ranks}, such as --layout.dp "
            f"{ranks}"
        )
    if place is None:
        yield pack_linears(load_run(run, weights=how["weights"], step=how["step"])), None
        return
    with mesh_of(spec) as mesh:
        yield load_sharded(run, trained, spec, mesh, average, how["step"])


class _Stream:
    """Tells the text of a continuation as it grows, without half characters."""

    def __init__(self, tokenizer: Tokenizer, given: Sequence[Sequence[int]], on_text: OnText) -> None:
        self._tokenizer, self._given, self._on_text = tokenizer, given, on_text
        self._told: dict[int, int] = {}

    def __call__(self, request: Request) -> None:
        text = _text(self._tokenizer, self._given[request.number], request.text)
        if not request.ended:
            text = text.rstrip("\ufffd")  # bytes of a character whose others are still to come
        told = self._told.get(request.number, 0)
        if len(text) > told:
            self._on_text(request.number, text[told:])
            self._told[request.number] = len(text)


def _text(tokenizer: Tokenizer, given: Sequence[int], new: Sequence[int]) -> str:
    # Some tokenizers drop the space before the first word that they decode, so decode everything and cut.
    return tokenizer.decode([*given, *new])[len(tokenizer.decode(given)) :]


def run_tokenizer(run: Path, reads_special: bool = False) -> Tokenizer:
    """Return the tokenizer of a run or of an HF folder. Raises `UserError` if it has none."""
    from meshwright.data.readers import SYNTHETIC
    from meshwright.data.tokenizer import Tokenizer

    file, record = run / "tokenizer.json", run / "run.json"
    if file.is_file():
        return Tokenizer.open(file, reads_special=reads_special)
    if record.is_file() and load(run).data.corpus == SYNTHETIC:
        raise UserError(
            f"{run}: its data.corpus is 'synthetic', numbers that stand for no text, so it has no tokenizer "
            f"to read a prompt; generate from a run that was trained on text"
        )
    raise UserError(f"{run}: has no tokenizer.json; copy the model's into this folder")


def _name(number: int, count: int) -> str:
    return "the prompt" if count == 1 else f"prompt {number + 1} of {count}"


def _lacking(tokenizer: Tokenizer, given: Sequence[int], how: Generation, token: int) -> tuple[str, str]:
    """Return the text of a token of the prompt `given` that the model lacks, and what to do about it."""
    text = tokenizer.decode([token])
    if token not in given:
        return text, "it is put around the prompt: --special-tokens rendered puts nothing there"
    if how["special_tokens"] != "text" and tokenizer.literals.of(text) == [text]:
        return text, "--special-tokens text reads it as characters, or leave it out of the prompt"
    return (
        text,
        "leave it out of the prompt, or give the model's folder the tokenizer.json it was trained with",
    )


def _encoded(tokenizer: Tokenizer, row: Mapping[str, Any], number: int, count: int) -> list[int]:
    try:
        row["prompt"].encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"generate: {_name(number, count)} is not valid text ({error.reason} at character "
            f"{error.start}); give whole characters of Unicode"
        ) from None
    return [int(token) for token in tokenizer.encode(row["prompt"])]
