"""Failures during training: checkpoint intervals and goodput, by formulas and by simulation."""
