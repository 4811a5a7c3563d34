"""Distillation: a teacher's answers, asked for in each step or stored in a folder.

`distillation` is the part of the training step, `teacher` a teacher on a mesh of its own whose answers
`token_exchange` moves to the student's ranks, and `stored_answers` the folder.
"""
