"""The page of models, `docs/models.md`, whose table is made from the table of families.

Run as `python tools/models_page.py` from the repository's root to write the table anew. The rest of the page
is written by hand; tests/test_models_page.py holds the table to the families.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwright.spec.hf.families import FAMILIES
from meshwright.spec.hf.family import Family

PAGE = Path("docs/models.md")
BEGIN, END = "<!-- table of families -->\n", "<!-- end of the table -->\n"
_HEAD = (
    "| models | `model.family` | class in transformers | blocks | llama.cpp |",
    "| --- | --- | --- | --- | --- |",
)


def table() -> str:
    """Return the table of families, in Markdown."""
    rows = (
        f"| {family.models} | `{name}` | `{family.causal_lm}` | {'; '.join(_blocks(family)) or 'plain'} | "
        f"{f'`{family.gguf}`' if family.gguf else '-'} |"
        for name, family in FAMILIES.items()
    )
    return "\n".join([*_HEAD, *rows]) + "\n"


def page(text: str) -> str:
    """Return the text of the page with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _blocks(family: Family) -> Iterator[str]:
    """Yield what the blocks of a family have beside those of Llama."""
    fixed = family.fixed
    if family.latents:
        yield "latent attention"
    if family.experts is not None:
        yield "experts with biases" if family.expert_switches.get("expert_bias") else "experts"
    if family.expert_switches.get("shared_gate"):
        yield "a gate of the shared expert"
    if fixed.get("attention_sinks"):
        yield "attention sinks"
    if fixed.get("qk_norm"):
        yield "norms of queries and keys" + (" over all heads" if "qk_norm_over" in fixed else "")
    if (placement := fixed.get("norm_placement")) is not None:
        yield {"post": "norms after layers", "both": "norms before and after layers"}[placement]
    if fixed.get("parallel_block"):
        yield "attention and feed-forward side by side"
    if fixed.get("norm") == "layernorm" or family.learned_positions:
        yield "LayerNorm"
    if family.learned_positions:
        yield "learned positions"
    if not any(each in ("swiglu", "geglu_tanh") for each in family.activations[1].values()):
        yield "no gate"
    if "geglu_tanh" in family.activations[1].values():
        yield "GEGLU"
    if family.windows:
        yield "windows by layer" if family.layer_types else "windows"
    if family.rope_share is not None:
        yield "partial rotation"
    if family.skips_rope is not None:
        yield "layers without positions"
    if family.rope_by_type:
        yield "positions scaled in layers without a window alone"
    if "attention_softcap" in family.keys:
        yield "soft caps"
    if "residual_scale" in family.keys:
        yield "factors of embeddings, residuals, scores and logits"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
