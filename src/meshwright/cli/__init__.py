"""The command line: parse, call one function, print.

`entry` is the console script, which shows the `overview` of verbs at once; `main` finds the verb, `parser`
sorts its words, `help` writes its help, `output` prints its result, and `ending` is the last line of JSON.
`completion` prints a script by which a shell completes commands.
Verbs on runs: `init` writes their file, `train`, `launch` (with status, logs and stop), `runs` (corpora, and
arguments that name a run), `chaos`, `distil`, `verify`, `spec`; `doctor` examines hosts before one.
Verbs on trained models: `models` (generate, export, import, checkpoint), `evaluate`, `quantise`, and
`weights` (average, merge). Pages of runs: `report`.
Verbs that predict: `plan` (plan, explain), with `plan_clusters` for several clusters, `fit`, `simulate`,
`dryrun` (with the tables of `dryrun_timeline`), `goodput`, `validate`, and `hardware` (profile, clusters).
"""
