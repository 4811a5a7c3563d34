"""Generation with a trained decoder."""

from meshwright.infer.generate import generate

__all__ = ["generate"]
