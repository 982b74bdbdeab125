"""Mixture of experts: layers of the same sizes, of which every token goes through a few.

    gate_up = nibble.pack_experts((nibble.join([gate, up]) for gate, up in layers), glu=True)
    down = nibble.pack_experts(downs)
    ids, weights = nibble.route(logits, top_k=8)
    y = nibble.moe(x, ids, weights, gate_up, down)
"""

from __future__ import annotations

from typing import Any, Iterable, Sequence

import nibble

from . import _arrays, _core
from ._core import ExpertLayer

Array = Any


class PackedExperts:
    """Packed weights of the same sizes, scheme, layout and specification; experts[e] is a PackedWeight."""

    def __init__(self, weights: Sequence[nibble.PackedWeight]) -> None:
        """Of weights in host memory, or on one GPU. Their memory is kept; weights on a GPU that are not equally far apart are copied.

        Raises InvalidArgument where they differ, with the expert and the values.
        """
        self._weights = list(weights)
        self._experts = _core.PackedExperts([weight._weight for weight in self._weights])

    @classmethod
    def _of(cls, experts: _core.PackedExperts) -> PackedExperts:
        self = cls.__new__(cls)
        self._weights, self._experts = [nibble.PackedWeight(weight) for weight in experts.weights], experts
        return self

    def __len__(self) -> int:
        return len(self._weights)

    def __getitem__(self, expert: int) -> nibble.PackedWeight:
        return self._weights[expert]

    @property
    def n(self) -> int:
        """Output channels of each."""
        return self._experts.n

    @property
    def k(self) -> int:
        """Input channels of each."""
        return self._experts.k

    @property
    def nbytes(self) -> int:
        """Packed bytes of all."""
        return self._experts.nbytes

    def __deepcopy__(self, memo: Any) -> PackedExperts:
        return self  # immutable

    def __reduce__(self) -> Any:
        return PackedExperts, (self._weights,)

    def __repr__(self) -> str:
        return f"PackedExperts({len(self)} of W[{self.n},{self.k}], scheme={self[0].scheme!r}, layout={self[0].layout!r})"


def pack_experts(experts: Iterable[nibble.QuantTensor], **spec: Any) -> PackedExperts:
    """Packs each expert as nibble.pack() does, all in the layout of the first; of an iterator no more than one is in memory unpacked.

    spec: what nibble.pack() takes, for gate_up with glu=True. Raises InvalidArgument without experts or where they differ, and what
    nibble.pack() does.
    """
    weights: list[nibble.PackedWeight] = []
    for q in experts:
        weights.append(nibble.pack(q, **spec))
        spec["layout"] = weights[0].layout
    return PackedExperts(weights)


def expert_layers(checkpoint: nibble.Checkpoint) -> list[ExpertLayer]:
    """All layers of experts, in file order, in whatever form they are stored. A layer that lacks a matrix or a number is none."""
    return _core.expert_layers(checkpoint)


def pack_expert_layer(
    checkpoint: nibble.Checkpoint, layer: str | ExpertLayer, *, backend: str = "cpu", a_dtype: Any = "f32", act_scheme: str = "", layout: str = "",
    kernel: str = "", m_max: int = 1 << 13, accumulation: str = "fast", glu_limit: float | None = None, glu_offset: float = 0.0,
) -> tuple[PackedExperts, PackedExperts]:  # fmt: skip
    """gate_up and down of a layer of experts, by its name or as expert_layers() has it; no more than one expert is in memory unpacked.

    gate and up become one weight, packed for a glu, however they are stored. The other arguments are those of nibble.pack(), of gpt-oss
    glu_limit=7, glu_offset=1. Raises NotFound for a layer that there is not, with those that there are, or what it lacks, InvalidArgument
    where its experts differ, and what reading and packing do.
    """
    name = layer if isinstance(layer, str) else layer.name
    gate_up, down = _core.pack_expert_layer(
        checkpoint, name, backend=backend, a_dtype=_arrays.token(a_dtype), act_scheme=act_scheme, layout=layout, kernel=kernel, m_max=m_max,
        accumulation=accumulation, glu_limit=glu_limit, glu_offset=glu_offset,
    )  # fmt: skip
    return PackedExperts._of(gate_up), PackedExperts._of(down)


def moe(
    x: Array, ids: Array, weights: Array, gate_up: PackedExperts, down: PackedExperts, *, activation: str = "silu",
    residual: Array | None = None, out_dtype: Any = None, out: Array | None = None, kernel: str = "",
) -> Array:  # fmt: skip
    """y[t] = Σ_j weights[t,j] · down_e(glu(gate_up_e(x[t]))) + residual[t], with e = ids[t,j]: added in float32 in the order of j.

    x: f32, f16 or bf16 [..., K]. ids: int32 [..., top_k], the experts of a token, each at most once; -1: none. weights: float32, of the
    same shape. gate_up was packed with glu=True; then activation is that of its first half. A layer without a gate is packed without
    it. residual: [..., N]. out_dtype: f32, f16 or bf16, by default that of x, which the result between the two layers has, too.
    out: written and returned. kernel: force one by name.
    On a GPU, where the experts and all arrays are, nothing waits for the host and ids are not checked: those outside 0 ... E - 1 are none.
    There the results of down_e are rounded to out_dtype before they are added, too; on the CPU they are float32.
    Raises InvalidArgument with the values that do not fit; nothing has been written then.
    """
    return _core.moe(gate_up._experts, down._experts, x, ids, weights, activation, residual, out_dtype, out, kernel)


def grouped(
    x: Array, experts: PackedExperts, *, offsets: Array | None = None, counts: Array | None = None, rows: Array | None = None,
    ids: Array | None = None, a_scale: Array | None = None, a_zero: Array | None = None, act_scheme: str | None = None,
    activation: str = "none", row_scale: Array | None = None, gate: Array | None = None, residual: Array | None = None,
    out_dtype: Any = None, out: Array | None = None, stream: Any = None, kernel: str = "",
) -> Array:  # fmt: skip
    """One product, in which each row has its expert: y[i] = epilogue(x[i] · W_eᵀ). Which, int32 arrays say, beside the experts:

    offsets [E+1]: x [R,K] is sorted by expert, whose rows are offsets[e] ... offsets[e+1] - 1. The result is [R,N].
    offsets and rows [R]: row i of that order is x[rows[i]], of any number of rows. The result has the order. x: f32, f16 or bf16.
    counts [E]: x is [E,R,K], of which each expert has the first counts[e] rows, and so has the result [E,R,N]; its other rows are not written.
    ids [..., top_k]: x is [..., K], a row for each token, or [..., top_k, K], one for each pair of a token and an expert; f32, f16 or bf16.
      The result is [..., top_k, N], in the order of ids, and zeros where an id is -1, no expert. Nothing is to be sorted by the caller.

    x: f32, f16, bf16, or codes with a_scale [R], [R,G], with counts [E,R], [E,R,G], or of one element, and a_zero alike. row_scale, gate
    and residual have as many rows as the result, too, activation is a name; all as PackedWeight.linear() has them. Biases are the experts'
    own.
    On a GPU, where the experts and all arrays are, nothing waits for the host, and offsets, counts, rows and ids are not checked: what they
    say beyond the rows of x is left out, and ids outside 0 ... E - 1 are none. With ids the result is f32, f16 or bf16 there, and has a
    multiple of 8 columns. stream: as PackedWeight.linear() takes it.
    Raises InvalidArgument with the values that do not fit; nothing has been written then.
    """
    return _core.grouped(
        experts._experts, x, offsets, counts, rows, ids, a_scale, a_zero, act_scheme, activation, row_scale, gate, residual, out_dtype, out, stream,
        kernel,
    )  # fmt: skip


def route(
    logits: Array, top_k: int, *, bias: Array | None = None, score: str = "softmax", normalize: bool = True, groups: int = 1,
    top_groups: int = 1, scale: float = 1.0, stream: object | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """The top_k experts of each token, the best first, of equals the lower number: (ids, int32 [..., top_k]; weights, float32).

    logits: f32, f16 or bf16 [..., E]; NaN counts as -infinity. score: "softmax" over all experts, or "sigmoid" of each. bias: float32 [E],
    added to scores for the choice only (DeepSeek-V3). normalize: weights are divided by their sum. groups, top_groups: experts form equal
    groups, of which those are kept whose two best choices have the largest sum. scale: multiplies all weights. Logits on a GPU are routed
    there, up to 1024 experts; stream: as PackedWeight.linear() takes it.
    Raises InvalidArgument with the values that do not fit.
    """
    return _core.route(logits, bias, top_k, score, normalize, groups, top_groups, scale, stream)
