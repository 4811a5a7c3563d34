"""Failures: how often to save, and what they leave of a run's time."""
