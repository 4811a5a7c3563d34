"""Triton kernels for CUDA, with the functions on tensors that launch them.

A file has its kernels (`@triton.jit`), functions that launch them, each named after the operator that
`kernels/triton_operator.py` declares for it, and `SPECIALISATIONS`: the types and constants for which tests
compile each kernel for GPUs of capability 8.0, 9.0 and 10.0 and hold it to no spilled registers. With
`TRITON_INTERPRET=1` the same functions take tensors on the CPU; tests compare them with float64 by that.

`low_precision_casts` casts operands to 8 bits and `nvfp4_casts` to 4. `specialisation` is the type of
`SPECIALISATIONS`.
"""
