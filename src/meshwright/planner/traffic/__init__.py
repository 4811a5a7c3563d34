"""Messages of a step, call by call, and the bytes that they add up to.

`messages` lists them, from the sizes of `layer_shape`; `exchange` lists those of islands.
"""
