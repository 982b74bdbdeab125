"""Joining the layers of decoder blocks."""

from __future__ import annotations

import functools
import itertools
from typing import Any, Sequence

from torch import Tensor, nn

from nibble._torch.layers import FusedLinear, QuantLinear
from nibble._torch.probes import _BLOCK, _check_attention, _check_block, _check_mlp, _options, _PARTS, _plain_layers
from nibble._torch.shared import _Among, join_shared, part_shared, shared_mlps
from nibble.errors import InvalidArgument, Unsupported


class Fused(list[str]):
    """The names of the FusedLinear layers that fuse() made, and of QuantExperts that shared MLPs have joined."""

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[str, str] = {}
        """The attentions, MLPs, shared ones too, and blocks of decoders that are as they were, and why."""


def fuse(model: nn.Module) -> Fused:
    """Joins the quantized layers of decoder blocks, with the norms before them and the additions behind them; in place; returns names.

    A block is x += attention(norm(x)); x += mlp(norm(x)) with the modules input_layernorm, self_attn, post_attention_layernorm and mlp: Llama,
    Mistral, Qwen2, Qwen3, Gemma, Phi3 and what else is built like them. It becomes four layers, and computes the same up to rounding:

        qkv_proj       input_layernorm and q_proj, k_proj, v_proj of the attention
        o_proj         that of the attention, and the addition to x
        gate_up_proj   post_attention_layernorm, gate_proj and up_proj of the MLP, and the product of the two
        down_proj      that of the MLP, and the addition to x

    The attention's own code runs between them. A shared MLP beside QuantExperts (DeepSeek, Qwen2-MoE) becomes some more of the experts, which
    one plan runs: those that every token has, with weight 1 or the sigmoid of the MLP's gate. Whether a block, an attention or an MLP is of this form is found by running its code on a
    few numbers; what is not, or has float layers or layers that cannot be joined, is left, and the result's `left` says why: the experts of
    Mixtral, for one. Layers that adapters (PEFT) or checkpoints know by name have other names then: unfuse() undoes all of it.
    Raises InvalidArgument for a model on the meta device.
    """
    fused = Fused()
    for name, block in list(model.named_modules()):
        if isinstance(block, _Block) or not all(isinstance(getattr(block, part, None), nn.Module) for part in _BLOCK):
            continue
        if any(t.is_meta for t in itertools.chain(block.parameters(), block.buffers())):
            raise InvalidArgument(f"{name}: its weights are on the meta device; load them first")
        try:
            _check_block(block)
        except Unsupported as problem:
            fused.left[name] = str(problem)
            continue
        layers: dict[str, FusedLinear] = {}
        for part, join in (("self_attn", _join_attention), ("mlp", _join_mlp)):
            try:
                layers.update(join(block))
            except (InvalidArgument, Unsupported) as problem:
                fused.left[f"{name}.{part}"] = str(problem)
        if layers:
            block.__class__ = _block_class(type(block))
            for own, layer in layers.items():
                setattr(block, own, layer)
                fused.append(f"{name}.{own}" if name else own)
    for name, block in list(model.named_modules()):
        prefix = f"{name}." if name else ""
        for shared in shared_mlps(block):
            try:
                join_shared(block, shared)
                fused.append(f"{prefix}experts")
            except (InvalidArgument, Unsupported) as problem:
                fused.left[prefix + shared] = str(problem)
    return fused


def unfuse(model: nn.Module) -> None:
    """Undoes fuse(): the layers have their names, numbers and norms again, in place."""
    for block in [module for module in model.modules() if any(isinstance(child, _Among) for child in module.children())]:
        part_shared(block)
    for block in [module for module in model.modules() if isinstance(module, _Block)]:
        for part, (norm, *joined) in _PARTS.items():
            for layer in [block._modules.pop(name) for name in joined if name in block._modules]:
                for name, q in layer.split().items():
                    setattr(getattr(block, part), name, QuantLinear(q, **_options(layer)))
                if layer.norm is not None:
                    setattr(block, norm, layer.norm)
        block.__class__ = block._original


class _Block:
    """The forward pass of a block with fused layers: what is mixed into its own class."""

    _original: type[nn.Module]

    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        x, gate_up = hidden_states, self._modules.get("gate_up_proj")
        if "qkv_proj" in self._modules:  # whose result the attention splits, and o_proj is behind it
            x = self.o_proj(self.self_attn(hidden_states=self.qkv_proj(x, next=self.o_proj), **kwargs)[0], x, gate_up)
        else:
            x = x + self.self_attn(hidden_states=self.input_layernorm(x), **kwargs)[0]
        if gate_up is not None:
            return self.down_proj(gate_up(x, next=self.down_proj), x)
        return x + self.mlp(self.post_attention_layernorm(x))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty_block, (self._original,), self.__dict__


@functools.lru_cache(maxsize=None)
def _block_class(original: type[nn.Module]) -> type[nn.Module]:
    return type(f"Fused{original.__name__}", (_Block, original), {"_original": original, "__module__": "nibble.torch"})


def _empty_block(original: type[nn.Module]) -> nn.Module:
    return _block_class(original).__new__(_block_class(original))


class _Columns(nn.Module):
    """In the place of a projection: its part of the joined one's result, which the attention is given in place of x."""

    def __init__(self, begin: int, end: int) -> None:
        super().__init__()
        self.begin, self.end = begin, end

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.begin : self.end]

    def extra_repr(self) -> str:
        return f"{self.begin}:{self.end}"


def _joined(module: nn.Module, names: Sequence[str], **options: Any) -> FusedLinear:
    layers = _plain_layers(module, names)
    same = [_options(layer) for layer in layers.values()]
    for name, other in zip(names, same):
        for what, value in other.items():
            if value != same[0][what]:
                raise Unsupported(f"{what} of {names[0]} and {name} is {same[0][what]!r} and {value!r}")
    return FusedLinear({name: layer.weight.unpack() for name, layer in layers.items()}, **same[0], **options)


def _join_attention(block: nn.Module) -> dict[str, FusedLinear]:
    attention = block.self_attn
    names = ["qkv_proj"] if "qkv_proj" in attention._modules else ["q_proj", "k_proj", "v_proj"]
    _check_attention(attention, names)
    layers = {"qkv_proj": _joined(attention, names, norm=block.input_layernorm), "o_proj": _joined(attention, ["o_proj"])}
    begin = 0
    for name, n, *_ in layers["qkv_proj"]._parts:
        setattr(attention, name, _Columns(begin, begin + n))
        begin += n
    attention.o_proj = nn.Identity()
    del block.input_layernorm
    return layers


def _join_mlp(block: nn.Module) -> dict[str, FusedLinear]:
    mlp = block.mlp
    names = ["gate_up_proj"] if "gate_up_proj" in mlp._modules else ["gate_proj", "up_proj"]
    activation = _check_mlp(mlp, names)
    gate_up = _joined(mlp, names, norm=block.post_attention_layernorm, glu=True, activation=activation)
    layers = {"gate_up_proj": gate_up, "down_proj": _joined(mlp, ["down_proj"])}
    for name in (*names, "down_proj"):
        delattr(mlp, name)
    del block.post_attention_layernorm
    return layers
