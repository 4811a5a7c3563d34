"""Runs: `record` writes a run's spec, metrics, events and result to its folder, and reads them."""
