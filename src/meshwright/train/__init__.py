"""The training step with its parts, and the loop around it."""
