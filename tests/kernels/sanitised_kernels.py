"""Runs all kernels in C++ on all formats and shapes, compiled with the sanitizers of addresses and of
undefined behaviour: a program, since these must be loaded first (`test_cpu_kernels.py`)."""

from __future__ import annotations

import ctypes
import sys

import torch

import attention_kernel_cases as attention
from meshwright.cpp_library import cache_folder
from meshwright.kernels import attention_cpu_kernel, cpu_kernels, elementwise_cpu

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g")


def main(options: list[str]) -> None:
    library = ctypes.CDLL(str(cpu_kernels.KERNELS.build(cache_folder(), *FLAGS, *options)))
    attention_cpu_kernel.library = elementwise_cpu.library = lambda: library
    calls = 0
    for dtype in attention.ROUNDED:
        for batch, queries, keys, *sizes in attention.SHAPES.values():
            inputs, grad = attention.draw(dtype, batch, queries, keys, *sizes)
            masks = [None, *([attention.documents(dtype, queries, keys, batch)] if queries == keys else [])]
            for mask in masks:
                assert attention_cpu_kernel.takes(*inputs, None)
                attention.with_gradients(inputs, mask, grad)
                calls += 1
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, heads = (torch.randn(*shape).to(dtype) for shape in ((300, 97), (97,), (3, 70, 4, 48)))
        y, scale = elementwise_cpu.rms_norm(x, weight, 1e-5)
        elementwise_cpu.rms_norm_backward(y, x, weight, scale)
        elementwise_cpu.swiglu_backward(elementwise_cpu.swiglu(x, y), x, y)
        weights = torch.randn(300)
        elementwise_cpu.weighted_swiglu_backward_(
            elementwise_cpu.weighted_swiglu(x, y, weights), x, y, weights
        )
        elementwise_cpu.cross_entropy_(x, torch.randint(97, (300,)), -100, True, 1.0)
        for tables in ((), (1,), (3,)):
            for width in (16, 32):
                cosine, sine = (torch.randn(*tables, 70, 1, last).to(dtype) for last in (32, width))
                elementwise_cpu.rotate(heads, cosine, sine, 1)
                calls += 1
    print(calls, "calls")


if __name__ == "__main__":
    main(sys.argv[1:])
