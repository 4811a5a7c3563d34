"""Failures during training: checkpoint intervals and goodput, by formulas and by simulation.

`goodput` has the formulas, `monte_carlo` the simulation that they are tested against, and `training_time`
the days and money of a planned run.
"""
