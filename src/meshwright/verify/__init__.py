"""Equality of layouts with one device: the reference, the comparison, and what finds the cause."""
