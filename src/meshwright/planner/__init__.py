"""Time, memory and traffic of a run before it starts, and the search for its best layout, without torch."""

OBJECTIVES = ("time", "cost", "longest-context", "largest-model")
"""Least seconds for a token, least money for a token, longest sequences, largest model that fits."""
