"""The place of each rank in the world, its environment, and how it ends."""
