"""Runs as jobs of a scheduler: written as its file, submitted, looked at, followed and stopped.

`job` describes a job without any scheduler's words, and `sizing` finds its nodes and its time. `slurm`,
`kubernetes`, `ray`, `skypilot` and `ssh` each write a job as their file, with `templates` and `yaml_text`,
submit it, and say how it is, by programs that `program` runs; `scheduler` is what they have in common, and
`schedulers` lists them. `submission` is the record of what was submitted, in the run's folder, `progress` how
far its runs are, and `follow` shows that as it goes on.
"""
