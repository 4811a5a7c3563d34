"""What is done with a trained decoder: generation."""

from meshwright.infer.generate import generate

__all__ = ["generate"]
