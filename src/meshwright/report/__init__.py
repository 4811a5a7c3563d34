"""Output for people.

`progress` shows a run's metrics live, and `trackers` send them to TensorBoard, Weights & Biases and
Trackio. `run_page`, `plan_page`, `chaos_page` and `timeline` make HTML pages that open offline, from the
templates that `page` renders and the plots of `chart`; `island_page` has fields of the first. `curves`
are those of its rows. `plan_text` explains a plan as text, and `format` shows values.
"""
