"""A shared MLP among the experts of its layer, which are run by one plan.

    a MLP of s · I channels      gate, up  [s·I, H]   ┐ rows of I      s experts of I channels: their sum is the MLP
                                 down      [H, s·I]   ┘ columns of I
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import nibble
from nibble import experts as ex
from nibble._torch.experts import _experts, QuantExperts
from nibble._torch.layers import _check_hooks, QuantLinear
from nibble._torch.parallel import ParallelExperts
from nibble._torch.probes import _check_mlp, _numbers, _options, _plain_layers, _run_among
from nibble._torch.shards import _replace, shard_inputs, shard_outputs
from nibble.errors import InvalidArgument, Unsupported

_LAYERS = ("gate_proj", "up_proj", "down_proj")


def split_mlp(
    gate: nibble.QuantTensor, up: nibble.QuantTensor, down: nibble.QuantTensor, channels: int
) -> list[tuple[nibble.QuantTensor, nibble.QuantTensor]]:
    """gate_up and down of experts of so many channels, whose sum is the MLP down(activation(gate(x)) · up(x)): shared experts.

    Their numbers are those of the MLP. Raises InvalidArgument where the channels do not divide the MLP's, Unsupported for an act-order.
    """
    if channels < 1 or down.k % channels or gate.n != down.k or up.n != down.k:
        raise InvalidArgument(f"gate and up have {gate.n} and {up.n} channels, down {down.k}, which are not experts of {channels}")
    if down.g_idx is not None:
        raise Unsupported("the input channels of down are in act-order, of which experts have consecutive ones")
    parts = []
    for begin in range(0, down.k, channels):
        first, second = (shard_outputs(q, begin, begin + channels) for q in (gate, up))
        part, _ = shard_inputs(down, begin, begin + channels)
        if begin and part.bias is not None:  # once in the sum
            part = _replace(part, bias=np.zeros_like(part.bias))
        parts.append((nibble.join([first, second]), part))
    return parts


def _join_mlp(parts: list[tuple[nibble.QuantTensor, nibble.QuantTensor]]) -> dict[str, nibble.QuantTensor]:
    """The inverse of split_mlp(), by the names of the layers."""
    halves = [(shard_outputs(q, 0, q.n // 2), shard_outputs(q, q.n // 2, q.n)) for q, _ in parts]
    gate, up = (nibble.join(list(each)) for each in zip(*halves))
    downs = [down for _, down in parts]
    fields: dict[str, Any] = {"codes": np.concatenate([q.codes for q in downs], 1)}
    if downs[0].group_shape[1] != 0:
        fields["scales"] = np.concatenate([q.scales for q in downs], 1)
        if downs[0].zeros is not None:
            fields["zeros"] = np.concatenate([q.zeros for q in downs], 1)
    if downs[0].prescale is not None:
        fields["prescale"] = np.concatenate([q.prescale for q in downs])
    return dict(zip(_LAYERS, (gate, up, _replace(downs[0], **fields))))


class _Among(nn.Module):
    """In the place of a shared MLP, or of its gate, that is among the experts: nothing is left to add. It keeps what unfuse() needs."""

    def __init__(self, module: nn.Module, options: dict[str, dict[str, Any]] | None = None) -> None:
        super().__init__()
        self.__dict__["module"], self.options = module, options  # not a child: it has no weights, or experts have them

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(())


class _Recorded(nn.Module):
    """In the place of a module while its surroundings are examined: numbers shaped like x, and what it is called with."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.given = seed, ()

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        self.given = x, *args
        return _numbers(self.seed, x.numel(), x.device).to(x.dtype).view_as(x)


def shared_mlps(block: nn.Module) -> list[str]:
    """Of a block with experts, the children that are MLPs beside them."""
    if type(block._modules.get("experts")) is not QuantExperts:
        return []
    return [name for name, child in block._modules.items() if child is not None and all(hasattr(child, layer) for layer in _LAYERS)]


def join_shared(block: nn.Module, name: str) -> None:
    """Makes a shared MLP some more of the block's experts. Raises Unsupported or InvalidArgument, and has changed nothing then."""
    experts, mlp = block.experts, getattr(block, name)
    if experts.shared:
        raise Unsupported("the experts have a shared one already")
    layers = _plain_layers(mlp, _LAYERS)
    activation = _check_mlp(mlp, _LAYERS[:2])
    if activation != experts.activation:
        raise Unsupported(f"its activation is {activation}, that of the experts {experts.activation}")
    _check_hooks("experts", experts)
    gate = name + "_gate" if name + "_gate" in block._modules else None
    _check_sum(block, name, gate)
    gate_ups, downs = ([each[e] for e in range(len(each))] for each in (_experts(experts.gate_up), _experts(experts.down)))
    options = {layer: _options(layers[layer]) for layer in _LAYERS}
    for layer in _LAYERS:
        if options[layer]["act_scheme"] != downs[0].act_scheme:
            raise Unsupported(f"{layer} quantizes activations by {options[layer]['act_scheme']!r}, experts by {downs[0].act_scheme!r}")
    parts = split_mlp(*(layers[layer].weight.unpack() for layer in _LAYERS), downs[0].k)
    with _place(experts.gate_up.device):
        for packed, more in ((gate_ups, (part for part, _ in parts)), (downs, (part for _, part in parts))):
            first = packed[0]
            spec = {**nibble._spec(first), "backend": first.backend, "layout": first.layout}
            packed += [nibble.pack(q, **spec) for q in more]
        joined = [ex.PackedExperts(each) for each in (gate_ups, downs)]
    block.experts = QuantExperts(*joined, experts.activation, shared=len(parts), shared_gate=None if gate is None else getattr(block, gate))
    for layer in _LAYERS:
        delattr(mlp, layer)
    setattr(block, name, _Among(mlp, options))
    if gate is not None:
        setattr(block, gate, _Among(block._modules[gate]))


def part_shared(block: nn.Module) -> None:
    """Undoes join_shared()."""
    experts = block.experts
    all_parts = [[each[e] for e in range(len(each))] for each in (_experts(experts.gate_up), _experts(experts.down))]
    own = len(all_parts[0]) - experts.shared
    parts = [(gate_up.unpack(), down.unpack()) for gate_up, down in zip(*(each[own:] for each in all_parts))]
    routed = [ex.PackedExperts(each[:own]) for each in all_parts]
    if isinstance(experts, ParallelExperts):
        block.experts = ParallelExperts(*routed, experts.activation, is_share=True, replicated=experts.replicated, group=experts.group)
    else:
        block.experts = QuantExperts(*routed, experts.activation)
    for name, among in [(name, child) for name, child in block._modules.items() if isinstance(child, _Among)]:
        setattr(block, name, among.module)
        if among.options is not None:
            for layer, q in _join_mlp(parts).items():
                setattr(among.module, layer, QuantLinear(q, **among.options[layer]))


def _place(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _check_sum(block: nn.Module, name: str, gate: str | None) -> None:
    """Raises Unsupported unless its code adds experts(x, ids, weights) and shared(x), or sigmoid(gate(x)) · shared(x)."""
    experts, device = block.experts, block.experts.gate_up.device
    dtype = next((p.dtype for p in block.parameters() if p.is_floating_point()), torch.float32)
    x = _numbers(0, experts.hidden_size, device).to(dtype)
    routed, shared = _Recorded(1), _Recorded(2)
    y = _run_among(block, {"experts": routed, name: shared}, x)
    alone = _run_among(block, {"experts": routed, name: _Among(nn.Identity()), **({} if gate is None else {gate: _Among(nn.Identity())})}, x)
    r, s = (_numbers(seed, x.numel(), device) for seed in (1, 2))
    with torch.no_grad():
        factor = 1.0 if gate is None else torch.sigmoid(getattr(block, gate)(x).float())
    a, ids, weights = (*routed.given, None, None)[:3] if len(routed.given) == 3 else (None, None, None)
    same = lambda t, wanted: isinstance(t, Tensor) and torch.allclose(t.float().view(-1), wanted.view(-1), rtol=0, atol=0.05)  # noqa: E731
    if not (
        isinstance(ids, Tensor) and isinstance(weights, Tensor) and ids.shape == weights.shape and not ids.is_floating_point() and same(a, x.float())
        and shared.given and same(shared.given[0], x.float()) and same(y, r + factor * s) and same(alone, r)
    ):  # fmt: skip
        raise Unsupported(f"the forward pass of {type(block).__name__} is not experts(x, ids, weights) + {name}(x), or {name}_gate's part of it")
