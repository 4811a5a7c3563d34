"""The training step, the loop around it, and the proof that a layout does not change it."""
