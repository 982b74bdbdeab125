"""What the code of attentions, MLPs and blocks of models computes, found by running it on a few numbers."""

from __future__ import annotations

import copy
from typing import Any, Mapping, Sequence

import torch
from torch import Tensor, nn

from nibble._torch.layers import _check_hooks, _Quantized, QuantLinear
from nibble._torch.operators import _ACTIVATIONS
from nibble.errors import Unsupported

# The parts of a block, and the norms before them; the first and the last of their layers.
_PARTS = {"self_attn": ("input_layernorm", "qkv_proj", "o_proj"), "mlp": ("post_attention_layernorm", "gate_up_proj", "down_proj")}
_BLOCK = (*_PARTS, *(norm for norm, _, _ in _PARTS.values()))


def _options(layer: _Quantized) -> dict[str, Any]:
    """How a layer was made, but for its numbers."""
    w = layer.weight
    return {"act_scheme": w.act_scheme, "accumulation": w.accumulation, "device": w.device, "dtype": w.dtype}


def _plain_layers(module: nn.Module, names: Sequence[str]) -> dict[str, QuantLinear]:
    layers = {name: getattr(module, name, None) for name in names}
    for name, layer in layers.items():
        if layer is None:
            raise Unsupported(f"{type(module).__name__} has no {name}")
        if type(layer) is not QuantLinear or layer.activation != "none":
            raise Unsupported(f"{name} is {type(layer).__name__}; a QuantLinear without an activation function can be joined")
        _check_hooks(name, layer)
    return layers  # type: ignore[return-value]


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
        for name, activation in _ACTIVATIONS.items():
            if down.given.shape == gate.shape and torch.allclose(down.given, activation(gate) * up, rtol=0, atol=1e-5):
                return name
    raise Unsupported(f"the forward pass of {type(mlp).__name__} is not down_proj(activation(gate_proj(x)) · up_proj(x))")
