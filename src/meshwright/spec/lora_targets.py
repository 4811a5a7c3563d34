"""Targets of adapters by the names of transformers, as PEFT has them, and by the decoder's.

PEFT names modules: `q_proj` is the module of that name in every layer, `layers.0.self_attn.q_proj` and
`model.layers.0.self_attn.q_proj` that of one. A run has patterns of the decoder's names, which are what
`lora.targets` becomes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from meshwright.spec.hf.families import FAMILIES
from meshwright.spec.hf.tensor_names import LATENTS, latents_query
from meshwright.spec.lora import ALL_LINEAR, is_adaptable
from meshwright.spec.model import ModelSpec
from meshwright.spec.parameters import parameters


def decoder_targets(model: ModelSpec, targets: Sequence[str]) -> tuple[str, ...]:
    """The targets with patterns of the decoder's names in the place of modules of transformers.

    What is neither stays as it is.
    """
    weights = adaptable_weights(model)
    ours = [target for target in targets if _is_ours(target, weights)]
    if len(ours) == len(targets):
        return tuple(targets)
    modules, named, unknown = [*_modules(model)], dict[str, None](), []
    for target in (each for each in targets if each not in ours):
        found = [name for module, names in modules if f".{module}".endswith(f".{target}") for name in names]
        named |= dict.fromkeys(found)
        unknown += [] if found else [target]
    return tuple(dict.fromkeys([*ours, *patterns_of(named, weights), *unknown]))


def adaptable_weights(model: ModelSpec) -> list[str]:
    """Names of all weights that may have adapters."""
    return [each.name for unit in parameters(model).values() for each in unit if is_adaptable(each)]


def patterns_of(names: Iterable[str], weights: Sequence[str]) -> list[str]:
    """Patterns that match these of all adaptable `weights` and no others: one for a layer of all blocks."""
    wanted, found = set(names), dict[str, None]()
    linear = {name for name in weights if name.endswith(".weight")}  # all but routed experts
    if linear <= wanted:
        found, wanted = {ALL_LINEAR: None}, wanted - linear
    for name in (each for each in weights if each in wanted):
        pattern = f"*.{name.split('.', 2)[2]}"
        of_all = {each for each in weights if fnmatchcase(each, pattern)}
        found[pattern if of_all <= wanted else name] = None
    return [*found]


def family_modules(model: ModelSpec) -> list[str]:
    """Last parts of the names of the family's modules that may have adapters."""
    return sorted({module.rpartition(".")[2] for module, _ in _modules(model)})


def _is_ours(target: str, weights: Sequence[str]) -> bool:
    return target == ALL_LINEAR or any(fnmatchcase(name, target) for name in weights)


def _modules(model: ModelSpec) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (module of transformers 5, names of the decoder's weights that it joins) for each linear layer,
    and for each stacked parameter of routed experts."""
    family = FAMILIES[model.family]
    names = family.names
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"{names.model}.{names.layers}.{layer}"
        joined = {module: each for module, each in names.linears.items() if _is_there(model, layer, each[0])}
        if model.mla is not None:
            has_rank = model.mla.q_rank is not None
            latents = LATENTS | {"q": latents_query(has_rank)}
            joined |= {
                f"self_attn.{module}": (f"attn.{name}",)
                for name, module in latents.items()
                if has_rank or name != "q_a"
            }
        for module, each in joined.items():
            yield f"{theirs}.{module}", tuple(f"{ours}.{name}.weight" for name in each)
        if model.moe is None or not model.has_experts(layer):
            continue
        stacked = family.stacked_names
        if model.moe.shared_ffn:
            for name in ("gate", "up", "down"):
                module = f"{theirs}.{stacked.module}.{stacked.shared}.{name}_proj"
                yield module, (f"{ours}.mlp.shared.{name}.weight",)
        for module, each in zip(stacked.joint or (), (("gate", "up"), ("down",)), strict=True):
            yield f"{theirs}.{stacked.module}.{module}", tuple(f"{ours}.mlp.experts.{name}" for name in each)


def _is_there(model: ModelSpec, layer: int, name: str) -> bool:
    """True if a block has the linear layer of this name, as a family without latents and experts does."""
    return model.mla is None if name.startswith("attn.") else not model.has_experts(layer)
