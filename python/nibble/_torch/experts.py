"""The experts of transformers' models."""

from __future__ import annotations

import math
import weakref
from typing import Any, Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

import nibble
from nibble import experts as ex
from nibble._torch.layers import _parts
from nibble._torch.operators import _operator
from nibble._torch.shards import _replace
from nibble._torch.weights import _host_bytes, _placed, _version, _weight
from nibble.errors import InvalidArgument, Unsupported


def _moe(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, n: int, activation: str) -> Tensor:
    if ids.shape[-1] == 0 or x.numel() == 0:
        return x.new_zeros((*x.shape[:-1], n))
    ids = ids.masked_fill(ids >= gate_up.shape[0], -1).to(torch.int32)  # those of other processes, as transformers has them
    return ex.moe(x.contiguous(), ids, weights.float(), _experts(gate_up), _experts(down), activation=activation)


def _fake_moe(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, n: int, activation: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


_operator("moe(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, int n, str activation) -> Tensor", _moe, _fake_moe)
# By address: the storage, which is not kept; its version; and the experts that read its memory.
_bound: dict[int, tuple[weakref.ref[Any], int, ex.PackedExperts]] = {}


def _experts(packed: Tensor) -> ex.PackedExperts:
    """The experts of [E, bytes], a packed weight in each row; found once, as nibble.torch finds the weight of a tensor."""
    address = packed.data_ptr()
    found = _bound.get(address)
    if found is not None and found[0]() is packed.untyped_storage() and found[1] == _version(packed):
        return found[2]
    experts = ex.PackedExperts([_weight(row) for row in packed.unbind()])

    def forget(storage: Any) -> None:
        if (entry := _bound.get(address)) is not None and entry[0] is storage:
            del _bound[address]

    _bound[address] = weakref.ref(packed.untyped_storage(), forget), _version(packed), experts
    return experts


def _stacked(weights: Sequence[nibble.PackedWeight]) -> Tensor:
    """[E, bytes]: their headers are filled up to the length of the longest, so that rows are equally long."""
    headers = [weight.header() for weight in weights]
    size, first = max(map(len, headers)), weights[0]
    shape = len(headers), size + first.nbytes
    if first.backend == "cuda":
        packed = torch.empty(shape, dtype=torch.uint8, device=f"cuda:{first.device[1]}")
    else:
        packed = _host_bytes(math.prod(shape)).view(shape)
    for row, header, weight in zip(packed, headers, weights):
        start, filled = nibble._core.packed_prefix, np.full(size, ord(" "), np.uint8)
        filled[: len(header)] = np.frombuffer(header, np.uint8)
        filled[start - 8 : start] = np.frombuffer(size.to_bytes(8, "little"), np.uint8)
        row[:size] = torch.from_numpy(filled)
        if first.backend == "cuda":
            row[size:] = torch.from_dlpack(weight.bytes)
        else:
            row.numpy()[size:] = weight.bytes
    return packed


class QuantExperts(nn.Module):
    """y = Σ_j top_k_weights[t,j] · expert_{top_k_index[t,j]}(x[t]): what takes the place of the experts of transformers' models.

    gate_up, down: nibble.PackedExperts. activation: of the glu. shared: so many of them, the last ones, are experts of every token, with weight 1
    or sigmoid(shared_gate(x)); they are no indices of a router's (see nibble.torch.split_mlp). The result has x's type. Experts have no
    gradient. Moved to a GPU, they are packed anew for it; there each expert is packed alone first, so that a layer needs its memory twice
    for a moment.
    """

    gate_up: Tensor
    down: Tensor

    def __init__(
        self, gate_up: ex.PackedExperts, down: ex.PackedExperts, activation: str = "silu", *, shared: int = 0, shared_gate: nn.Module | None = None
    ) -> None:
        super().__init__()
        if not 0 <= shared < len(gate_up) or (shared_gate is not None and not shared):
            raise InvalidArgument(f"{shared} shared experts of {len(gate_up)}{', with a gate' if shared_gate is not None else ''}")
        self.activation, self.num_experts, self.shared = activation, len(gate_up) - shared, shared
        self.shared_gate = shared_gate
        self.hidden_size, self.out_size = gate_up.k, down.n
        self.register_buffer("gate_up", _stacked([gate_up[e] for e in range(len(gate_up))]))
        self.register_buffer("down", _stacked([down[e] for e in range(len(down))]))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        device = fn(torch.empty(0, device=self.gate_up.device)).device
        if device.type not in ("cpu", "cuda"):
            raise Unsupported(f"experts run on CPUs and NVIDIA GPUs, and the model is to move to {device}; convert it with skip='experts'")
        if device != self.gate_up.device:  # bytes have no other type, and another device another layout
            for name in ("gate_up", "down"):
                rows = [_placed(row, device) for row in getattr(self, name).unbind()]
                setattr(self, name, _stacked([_weight(row) for row in rows]))
        if recurse and self.shared_gate is not None:
            self.shared_gate._apply(fn)
        return self

    def extra_repr(self) -> str:
        first = _experts(self.gate_up)[0]
        shared = f", shared={self.shared}" if self.shared else ""
        return f"{self.num_experts}{shared}, hidden_size={self.hidden_size}, scheme={first.scheme}, activation={self.activation}, layout={first.layout}"

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        ids, weights = (top_k_index, top_k_weights) if not self.shared else self._with_shared(hidden_states, top_k_index, top_k_weights)
        return torch.ops.nibble.moe(hidden_states, ids, weights, self.gate_up, self.down, self.out_size, self.activation)

    def _with_shared(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts, and behind them the shared ones."""
        ids = ids.masked_fill(ids >= self.num_experts, -1)  # of other processes
        last = torch.arange(self.num_experts, self.num_experts + self.shared, dtype=ids.dtype, device=ids.device)
        last = last.expand(*ids.shape[:-1], -1)
        if self.shared_gate is None:
            factor = torch.ones(last.shape, device=ids.device)
        else:
            factor = torch.sigmoid(self.shared_gate(x).float()).expand(last.shape)
        return torch.cat([ids, last], -1), torch.cat([weights.float(), factor], -1)


def activation_of(module: nn.Module) -> tuple[str, dict[str, float]]:
    """The activation of a module's glu by nibble's name, with the limits of a clamped one. Raises Unsupported for another one."""
    if hasattr(module, "alpha") and hasattr(module, "limit"):
        if not math.isclose(module.alpha, 1.702):
            raise Unsupported(f"its glu is x·sigmoid({module.alpha}·x); nibble has 1.702")
        return "quick_gelu", {"glu_limit": float(module.limit), "glu_offset": 1.0}
    x = torch.linspace(-4, 4, 33, device="cpu")
    wanted = module.act_fn(x)
    for name, function in (("silu", nn.functional.silu), ("gelu_tanh", _gelu_tanh), ("gelu_erf", nn.functional.gelu)):
        if torch.allclose(function(x), wanted, atol=1e-6):
            return name, {}
    raise Unsupported(f"its activation {type(module.act_fn).__name__} is none of silu, gelu_tanh and gelu_erf")


def _gelu_tanh(x: Tensor) -> Tensor:
    return nn.functional.gelu(x, approximate="tanh")


def are_experts(module: nn.Module) -> bool:
    """Whether it has the experts of a layer in tensors of three dimensions, gate_up_proj and down_proj."""
    return all(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in ("gate_up_proj", "down_proj"))


def from_module(module: nn.Module, scheme: str) -> QuantExperts:
    """Of experts that are floats, quantized one by one. Raises Unsupported for a layer that computes something else."""
    # As transformers' use_experts_implementation() describes them.
    transposed, by_turns = getattr(module, "is_transposed", False), not getattr(module, "is_concatenated", True)
    if not getattr(module, "has_gate", True) or getattr(module, "has_post_expert_norm", False):
        raise Unsupported("its experts have no gate, or a norm of their own")
    activation, limits = activation_of(module)
    act_scheme, weight_scheme = _parts(scheme)

    def quantized(name: str, apart: bool) -> Any:
        weights, biases = getattr(module, name).detach(), getattr(module, name + "_bias", None)
        for e, w in enumerate(weights):
            w = w.T if transposed else w
            bias = None if biases is None else biases[e].detach().cpu()
            if apart:
                w = torch.cat([w[::2], w[1::2]])
                bias = None if bias is None else torch.cat([bias[::2], bias[1::2]])
            q = nibble.quantize(w.contiguous().cpu(), weight_scheme)
            yield q if bias is None else _replace(q, bias=bias)

    gate_up = ex.pack_experts(quantized("gate_up_proj", by_turns), act_scheme=act_scheme, glu=True, **limits)
    down = ex.pack_experts(quantized("down_proj", False), act_scheme=act_scheme)
    if gate_up.n != 2 * down.k:
        raise Unsupported(f"gate_up writes {gate_up.n} channels and down reads {down.k}, which is not half of them")
    return QuantExperts(gate_up, down, activation).to(module.down_proj.device)
