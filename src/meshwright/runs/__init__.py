"""The folder of a run: `record` writes and reads its metrics, events and result."""
