"""Distillation: a teacher's answers, asked for in each step or stored in a folder.

`teacher` is a teacher on a mesh of its own, whose answers `token_exchange` moves to the student's ranks, and
the part of the training step that takes them. `stored_answers` is the folder.
"""
