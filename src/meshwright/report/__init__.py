"""Output for people.

`record` writes a run's metrics, events and result to its folder, `progress` shows them live, and `trackers`
send them to TensorBoard, Weights & Biases and Trackio. `run_page`, `plan_page` and `timeline` make HTML pages
that open offline, from the templates that `page` renders and the plots of `chart`, with the `curves` of a
run's rows and the fields of `island_page`. `plan_text` explains a plan as text, and `format` shows values.
"""
