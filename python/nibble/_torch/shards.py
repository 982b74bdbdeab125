"""Parts of quantized layers: some of their output channels, or of their input channels."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

import nibble
from nibble.errors import InvalidArgument


def _replace(q: nibble.QuantTensor, **fields: Any) -> nibble.QuantTensor:
    return nibble.QuantTensor(**nibble._fields(q, **fields))


def _regrouped(scheme: str, n: int, k: int) -> str:
    """The scheme with another group shape: "u4zg128" → "u4zg64"."""
    stem = re.sub(r"(g\d+|b\d+x\d+)$", "", scheme)
    return f"{stem}g{k}" if n == 1 else f"{stem}b{n}x{k}"


def _common(group: int, begin: int, end: int, total: int) -> int:
    """The largest groups that lie within a group each and begin where the part does; the same for all parts of one size."""
    return group if end - begin == total else math.gcd(group, begin, end - begin)


def shard_outputs(q: nibble.QuantTensor, begin: int, end: int) -> nibble.QuantTensor:
    """The layer with the output channels [begin, end) alone. A boundary inside a block of output channels makes blocks smaller."""
    if not 0 <= begin < end <= q.n:
        raise InvalidArgument(f"output channels [{begin}, {end}) of {q.n}")
    n, k = q.group_shape
    fields: dict[str, Any] = {"codes": q.codes[begin:end]}
    if n != 0:
        smaller = _common(n, begin, end, q.n)
        rows = np.arange(begin, end, smaller) // n
        fields.update(scales=q.scales[rows], zeros=None if q.zeros is None else q.zeros[rows])
        if smaller != n:
            fields["scheme"] = _regrouped(q.scheme, smaller, k or q.k)
    if q.bias is not None:
        fields["bias"] = q.bias[begin:end]
    return _replace(q, **fields)


def shard_inputs(q: nibble.QuantTensor, begin: int, end: int) -> tuple[nibble.QuantTensor, np.ndarray]:
    """The layer with a part of its input channels, and which ones: channels [begin, end) in the order of their groups.

    Without act-order these are begin … end-1. With it they are those of whole groups, in order, so that the part has no g_idx. A boundary
    inside a group makes groups smaller. The bias stays; the sum of all parts' results has it once per part.
    """
    if not 0 <= begin < end <= q.k:
        raise InvalidArgument(f"input channels [{begin}, {end}) of {q.k}")
    order = np.arange(q.k) if q.g_idx is None else np.argsort(q.g_idx, kind="stable")
    channels = order[begin:end]
    n, k = q.group_shape
    fields: dict[str, Any] = {"codes": np.ascontiguousarray(q.codes[:, channels]), "g_idx": None}
    if k != 0:
        smaller = _common(k, begin, end, q.k)
        groups = np.arange(begin, end, smaller) // k
        fields.update(scales=q.scales[:, groups], zeros=None if q.zeros is None else q.zeros[:, groups])
        if smaller != k:
            fields["scheme"] = _regrouped(q.scheme, n or q.n, smaller)
    if q.prescale is not None:
        fields["prescale"] = q.prescale[channels]
    return _replace(q, **fields), channels
