#!/usr/bin/env python3
"""The shortest way through nibble in Python: float weights → quantized → packed → run, and a look at the result. Needs NumPy alone.

usage: examples/quickstart.py [CHECKPOINT]       with a checkpoint, its first quantized layer is taken
"""

from __future__ import annotations

import sys

import numpy as np

import nibble


def main() -> int:
    rng = np.random.default_rng(0)
    if len(sys.argv) > 1:
        checkpoint = nibble.open(sys.argv[1])
        q = checkpoint.read(checkpoint.layers[0])
    else:
        w = rng.standard_normal((1024, 2048), dtype=np.float32)
        q = nibble.quantize(w, "u4zg128", clip_search=True)
        print(f"quantized: {nibble.quantization_error(w, q)}")
    print(f"{q}: {q.description}, {q.bits_per_weight:.2f} bits per weight; codes {q.codes.shape} {q.codes.dtype}")

    weight = nibble.pack(q)  # once
    x = rng.standard_normal((4, weight.k), dtype=np.float32)
    y = weight.linear(x, activation="silu")  # often
    exact = x @ weight.dequantize().T
    if weight.has_bias:
        exact = exact + np.asarray(q.bias, np.float32)
    exact *= 0.5 + 0.5 * np.tanh(exact / 2)  # silu
    error = float(np.linalg.norm(y - exact) / np.linalg.norm(exact))
    print(f"{weight}: relative error {error:.1e} of float arithmetic on the same weight")

    fast = nibble.pack(q, act_scheme="s8r")  # activations become int8 per token while running: faster, another result
    print(f"{fast}: {np.linalg.norm(fast(x) - weight(x)) / np.linalg.norm(weight(x)):.1e} from that of exact activations")

    for bucket in weight.explain(m_max=256):
        print(f"  M = {bucket.m_low}…{bucket.m_high}: {' → '.join(bucket.steps)}, about {bucket.cost_us:.0f} µs")
    report = nibble.verify(q, m=4, sample_columns=64)
    print(report)
    return 0 if report and error < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
