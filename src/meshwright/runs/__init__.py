"""Runs: `record` writes a run's spec, metrics, events and result to its folder, and reads them; `status` is
the word on how it stands."""
