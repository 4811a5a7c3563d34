"""Seconds of a training step."""
