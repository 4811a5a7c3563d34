"""Which layouts the training programs run that plans are made for.

`table` has a row for each program of `--stack`, made of the `kinds` of rules that several have in common;
`rules` says what a rule is, and `stage_cuts` how programs deal blocks to stages that leave no choice.
"""
