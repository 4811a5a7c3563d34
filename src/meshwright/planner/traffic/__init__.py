"""Messages of a step, call by call, and the bytes that they add up to."""
