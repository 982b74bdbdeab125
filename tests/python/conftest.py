"""What the tests share: golden checkpoints, and weights of every kind with what they mean as floats."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

import nibble

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def distance(got, exact) -> float:
    """‖got − exact‖ / ‖exact‖."""
    got, exact = (np.asarray(x, np.float64) for x in (got, exact))
    assert got.shape == exact.shape
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def act_ordered(rng: np.random.Generator, n=32, k=256, group=64, zeros=True) -> nibble.QuantTensor:
    """4-bit codes whose groups are scattered over the input channels."""
    groups = k // group
    return nibble.QuantTensor(
        f"u4zg{group}" if zeros else f"u4b8g{group}",
        rng.integers(0, 16, (n, k), dtype=np.uint8),
        (rng.random((n, groups)) + 0.5).astype(np.float16),
        rng.integers(0, 16, (n, groups), dtype=np.uint8) if zeros else None,
        g_idx=rng.permutation(np.repeat(np.arange(groups, dtype=np.int32), group)),
        bias=rng.standard_normal(n, dtype=np.float32),
    )
