"""Joining the layers of decoder blocks; nibble.torch has what is public."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any, Mapping, Sequence

import torch
from torch import Tensor, nn

from nibble import torch as nt
from nibble.errors import InvalidArgument, Unsupported

__all__ = ["Fused", "fuse", "unfuse"]


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
        layers: dict[str, nt.FusedLinear] = {}
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
        for shared in nt._torch_shared.shared_mlps(block):
            try:
                nt._torch_shared.join_shared(block, shared)
                fused.append(f"{prefix}experts")
            except (InvalidArgument, Unsupported) as problem:
                fused.left[prefix + shared] = str(problem)
    return fused


def unfuse(model: nn.Module) -> None:
    """Undoes fuse(): the layers have their names, numbers and norms again, in place."""
    for block in [module for module in model.modules() if any(isinstance(child, nt._torch_shared._Among) for child in module.children())]:
        nt._torch_shared.part_shared(block)
    for block in [module for module in model.modules() if isinstance(module, _Block)]:
        for part, (norm, *joined) in _PARTS.items():
            for layer in [block._modules.pop(name) for name in joined if name in block._modules]:
                for name, q in layer.split().items():
                    setattr(getattr(block, part), name, nt.QuantLinear(q, **_options(layer)))
                if layer.norm is not None:
                    setattr(block, norm, layer.norm)
        block.__class__ = block._original


# The parts of a block, and the norms before them; the first and the last of their layers.
_PARTS = {"self_attn": ("input_layernorm", "qkv_proj", "o_proj"), "mlp": ("post_attention_layernorm", "gate_up_proj", "down_proj")}
_BLOCK = (*_PARTS, *(norm for norm, _, _ in _PARTS.values()))


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
    return type(f"Fused{original.__name__}", (_Block, original), {"_original": original, "__module__": nt.__name__})


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


def _options(layer: nt._Quantized) -> dict[str, Any]:
    """How a layer was made, but for its numbers."""
    w = layer.weight
    return {"act_scheme": w.act_scheme, "accumulation": w.accumulation, "device": w.device, "dtype": w.dtype}


def _plain_layers(module: nn.Module, names: Sequence[str]) -> dict[str, nt.QuantLinear]:
    layers = {name: getattr(module, name, None) for name in names}
    for name, layer in layers.items():
        if layer is None:
            raise Unsupported(f"{type(module).__name__} has no {name}")
        if type(layer) is not nt.QuantLinear or layer.activation != "none":
            raise Unsupported(f"{name} is {type(layer).__name__}; a QuantLinear without an activation function can be joined")
        _check_hooks(name, layer)
    return layers  # type: ignore[return-value]


def _check_hooks(name: str, module: nn.Module) -> None:
    """Raises Unsupported where something is to run with a module that will not be called any more."""
    if "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks:
        raise Unsupported(f"{name} has hooks, or a forward pass of its own, which would be lost; fuse the model first")


def _joined(module: nn.Module, names: Sequence[str], **options: Any) -> nt.FusedLinear:
    layers = _plain_layers(module, names)
    same = [_options(layer) for layer in layers.values()]
    for name, other in zip(names, same):
        for what, value in other.items():
            if value != same[0][what]:
                raise Unsupported(f"{what} of {names[0]} and {name} is {same[0][what]!r} and {value!r}")
    return nt.FusedLinear({name: layer.weight.unpack() for name, layer in layers.items()}, **same[0], **options)


def _join_attention(block: nn.Module) -> dict[str, nt.FusedLinear]:
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


def _join_mlp(block: nn.Module) -> dict[str, nt.FusedLinear]:
    mlp = block.mlp
    names = ["gate_up_proj"] if "gate_up_proj" in mlp._modules else ["gate_proj", "up_proj"]
    activation = _check_mlp(mlp, names)
    gate_up = _joined(mlp, names, norm=block.post_attention_layernorm, glu=True, activation=activation)
    layers = {"gate_up_proj": gate_up, "down_proj": _joined(mlp, ["down_proj"])}
    for name in (*names, "down_proj"):
        delattr(mlp, name)
    del block.post_attention_layernorm
    return layers


class _Answer(nn.Module):
    """In the place of a module while its surroundings are examined: what it is given, and a given answer."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer, self.given = answer, None

    def forward(self, *args: Any, hidden_states: Any = None, **kwargs: Any) -> Any:
        self.given = args[0] if args else hidden_states
        return self.answer


def _run_among(module: nn.Module, answers: Mapping[str, _Answer], x: Tensor, **kwargs: Any) -> Any:
    """What the code of a module makes of x among other modules than its own. Raises Unsupported where it cannot be run."""
    probe = copy.copy(module)
    probe.__dict__["_modules"] = {**module._modules, **answers}
    probe.__dict__.update(training=True, gradient_checkpointing=False)  # so that dropout shows
    if hasattr(getattr(module, "config", None), "_attn_implementation"):
        probe.__dict__["config"] = copy.copy(module.config)
        probe.config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            return type(module).forward(probe, x, **kwargs)
    except Exception as problem:  # whatever other code may raise
        raise Unsupported(f"the forward pass of {type(module).__name__} is another: {problem}") from None


def _numbers(seed: int, n: int, device: Any = "cpu") -> Tensor:
    """[1, 1, n], between -2 and 2."""
    return 2 * torch.sin(seed + 1.7 * torch.arange(n, device=device, dtype=torch.float32)).view(1, 1, n)


_NOTHING = dict(attention_mask=None, position_ids=None, use_cache=False)


def _check_block(block: nn.Module) -> None:
    """Raises Unsupported unless it is x += attention(norm(x)); x += mlp(norm(x))."""
    for name, other in block._modules.items():
        if name not in _BLOCK and not isinstance(other, nn.Identity) and not (isinstance(other, nn.Dropout) and other.p == 0):
            raise Unsupported(f"{type(block).__name__} has a {name}, too: {type(other).__name__}")
    if "forward" in block.__dict__:
        raise Unsupported(f"this {type(block).__name__} has a forward pass of its own, which would be lost; fuse the model first")
    x, attended, fed = (_numbers(seed, 8) for seed in range(3))
    before, after = _Answer(_numbers(3, 8)), _Answer(_numbers(4, 8))
    attention, mlp = _Answer((attended, None)), _Answer(fed)
    parts = {"input_layernorm": before, "self_attn": attention, "post_attention_layernorm": after, "mlp": mlp}
    y = _run_among(block, parts, x, position_embeddings=None, **_NOTHING)
    right = before.given is x and attention.given is before.answer and mlp.given is after.answer
    if not (right and isinstance(y, Tensor) and torch.equal(after.given, x + attended) and torch.equal(y, x + attended + fed)):
        raise Unsupported(f"the forward pass of {type(block).__name__} is not x += attention(norm(x)); x += mlp(norm(x))")


def _check_attention(attention: nn.Module, names: Sequence[str]) -> None:
    """Raises Unsupported unless its code gives x to its projections alone, and returns what o_proj does."""
    layers, x = _plain_layers(attention, [*names, "o_proj"]), _numbers(0, 8)
    device = layers[names[0]].packed.device
    answers = {name: _Answer(_numbers(i, layers[name].out_features, device)) for i, name in enumerate(names)}
    out = _Answer(_numbers(5, 8))
    angles = _numbers(6, getattr(attention, "head_dim", 8), device)
    result = _run_among(attention, {**answers, "o_proj": out}, x, position_embeddings=(angles.cos(), angles.sin()), attention_mask=None)
    if not (isinstance(result, tuple) and result[0] is out.answer and all(answer.given is x for answer in answers.values())):
        raise Unsupported(f"the forward pass of {type(attention).__name__} is not projections, attention and o_proj")


def _check_mlp(mlp: nn.Module, names: Sequence[str]) -> str:
    """The activation function. Raises Unsupported unless it is down_proj(activation(gate_proj(x)) · up_proj(x))."""
    _plain_layers(mlp, [*names, "down_proj"])
    _check_hooks("mlp", mlp)
    gate, up, x = _numbers(1, 64), _numbers(2, 64), _numbers(0, 8)
    results = [torch.cat([gate, up], -1)] if len(names) == 1 else [gate, up]
    answers, down = {name: _Answer(result) for name, result in zip(names, results)}, _Answer(_numbers(3, 8))
    y = _run_among(mlp, {**answers, "down_proj": down}, x)
    if y is down.answer and all(answer.given is x for answer in answers.values()):
        for name, activation in nt._ACTIVATIONS.items():
            if down.given.shape == gate.shape and torch.allclose(down.given, activation(gate) * up, rtol=0, atol=1e-5):
                return name
    raise Unsupported(f"the forward pass of {type(mlp).__name__} is not down_proj(activation(gate_proj(x)) · up_proj(x))")

# Where pickles find them: this module cannot be the first that is imported.
for _public in (Fused, fuse, unfuse, _Columns, _empty_block):
    _public.__module__ = "nibble.torch"
