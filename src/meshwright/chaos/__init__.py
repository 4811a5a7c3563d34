"""Faults on purpose: `faults` is a plan of them, `inject` lets them hit a rank, `chaos` those from outside.

`verdict` says whether the run withstood them.
"""
