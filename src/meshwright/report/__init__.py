"""Output for people.

`progress` shows a run's metrics live, and `trackers` send them to TensorBoard, Weights & Biases and
Trackio. `run_page`, `comparison_page`, `plan_page`, `chaos_page` and `timeline` make HTML pages that open
offline, from the templates that `page` renders and the plots of `chart`. `run_facts`, `curves` and
`island_page` are what a record says for the first two, and `live_report` writes the first while a run goes
on. `plan_text` explains a plan as text, and `format` shows values.
"""
