"""Messages of a step, call by call, and the bytes that they add up to.

`messages` lists them, each a `message`, from the sizes of `layer_shape`; `exchange` lists those of ranks
that step apart.
"""
