"""Supervision of runs: detection of failures and hangs, and restarts from memory or disk."""
