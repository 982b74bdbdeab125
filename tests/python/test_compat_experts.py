"""The shims of expert layers against what they are defined to compute, in plain torch. Skipped without PyTorch."""

from __future__ import annotations

import types

import pytest
from conftest import distance

import nibble

torch = pytest.importorskip("torch")
from nibble.compat import _shared, vllm  # noqa: E402

E, T, K, I, TOP, G = 4, 9, 256, 128, 2, 64
DEVICES = ["cpu", *(["cuda"] if nibble.doctor()["gpu"] is not None else [])]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    _shared.clear()


def routed(device: str):
    ids = torch.stack([torch.randperm(E)[:TOP] for _ in range(T)])
    return torch.rand(T, TOP, device=device), ids.to(device)


def layer(x, w1, w2, weights, ids, activation=torch.nn.functional.silu, b1=None, b2=None, rounded=lambda v: v):
    """The definition; ids outside of 0 ... E - 1 are none. rounded: what activations become before they are multiplied."""
    y = torch.zeros(x.shape[0], w2.shape[1])
    for t in range(x.shape[0]):
        for weight, e in zip(weights[t].tolist(), ids[t].tolist()):
            if 0 <= e < w1.shape[0]:
                gate, up = (w1[e] @ rounded(x[t].float()) + (0 if b1 is None else b1[e])).chunk(2)
                y[t] += weight * (w2[e] @ rounded((activation(gate) * up).to(x.dtype).float()) + (0 if b2 is None else b2[e]))
    return y


def four_bits(n: int, k: int, with_zeros: bool):
    """w1 or w2 as uint8 [E, N, K/2], scales, zeros or None, and the matrices."""
    q, s = torch.randint(16, (E, n, k)), torch.rand(E, n, k // G) * 0.02 + 0.001
    z = torch.randint(16, (E, n, k // G)) if with_zeros else torch.full((E, n, k // G), 8)
    w = (q - z.repeat_interleave(G, 2)) * s.repeat_interleave(G, 2)
    zeros = (z[:, ::2] | z[:, 1::2] << 4).to(torch.uint8) if with_zeros else None
    return (q[..., ::2] | q[..., 1::2] << 4).to(torch.uint8), s, zeros, w


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_zeros", [False, True])
@pytest.mark.parametrize("config", [False, True])
def test_four_bits(device, with_zeros, config):
    (w1, s1, z1, m1), (w2, s2, z2, m2) = four_bits(2 * I, K, with_zeros), four_bits(K, I, with_zeros)
    parts = {"w1_scale": s1, "w2_scale": s2, "w1_zp": z1, "w2_zp": z2}
    options = {name: None if t is None else t.to(device) for name, t in parts.items()} | {"use_int4_w4a16": True, "block_shape": [0, G]}
    if config:
        options = {"quant_config": types.SimpleNamespace(**options)}
    x, (weights, ids) = torch.randn(T, K).half().to(device), routed(device)
    y = vllm.fused_experts(x, w1.to(device), w2.to(device), weights, ids, **options)
    assert y.dtype == torch.float16 and y is not x and distance(y.float().cpu(), layer(x.cpu(), m1, m2, weights, ids)) < 3e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_floats(device, dtype):
    w1, w2 = (torch.randn(E, 2 * I, K) * 0.1).to(dtype), (torch.randn(E, K, I) * 0.1).to(dtype)
    b1, b2 = torch.randn(E, 2 * I).to(dtype), torch.randn(E, K).to(dtype)
    x, (weights, ids) = torch.randn(T, K).to(dtype).to(device), routed(device)
    wanted = layer(x.cpu(), w1.float(), w2.float(), weights, ids, lambda t: torch.nn.functional.gelu(t), b1.float(), b2.float())
    options = {"w1_bias": b1.to(device), "w2_bias": b2.to(device)}
    y = vllm.fused_experts(x, w1.to(device), w2.to(device), weights, ids, True, "gelu", quant_config=types.SimpleNamespace(**options))
    assert y.data_ptr() == x.data_ptr() and distance(y.float().cpu(), wanted) < (3e-3 if dtype == torch.float16 else 2e-2)


def codes_of(kind: str, group: int):
    """Activations as codes times a scale of a token, or of each group of one: the largest becomes the largest code."""

    def rounded(v):
        parts = v.view(-1, group or v.numel())
        scale = parts.abs().amax(1, keepdim=True) / (448 if kind == "fp8_w8a8" else 127)
        codes = parts / scale
        return ((codes.to(torch.float8_e4m3fn).float() if kind == "fp8_w8a8" else codes.round()) * scale).view_as(v)

    return (lambda v: v) if kind == "int8_w8a16" else rounded


def in_blocks(w, n, k):
    return w.repeat_interleave(n, 1).repeat_interleave(k, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["fp8_w8a8", "int8_w8a8", "int8_w8a16"])
@pytest.mark.parametrize("scales", ["tensor", "channel", "block"])
def test_eight_bits(device, kind, scales):
    def weight(n, k):
        if scales == "block" and kind == "int8_w8a16":  # groups of a channel, codes from 0 on
            q, s = torch.randint(256, (E, n, k), dtype=torch.uint8), torch.rand(E, n, k // G) * 0.002
            return q, s, (q.float() - 128) * s.repeat_interleave(G, 2)
        q = torch.randn(E, n, k).to(torch.float8_e4m3fn) if kind == "fp8_w8a8" else torch.randint(-127, 128, (E, n, k), dtype=torch.int8)
        shape = {"tensor": (E,), "channel": (E, n), "block": (E, n // 128, k // 128)}[scales]
        s = (torch.rand(shape) + 0.1) * (0.1 if kind == "fp8_w8a8" else 0.002)
        return q, s, q.float() * (in_blocks(s, 128, 128) if scales == "block" else s.reshape(E, -1, 1))

    block = None if scales != "block" else [0, G] if kind == "int8_w8a16" else [128, 128]
    (w1, s1, m1), (w2, s2, m2) = weight(2 * I, K), weight(K, I)
    x, (weights, ids) = torch.randn(T, K).half().to(device), routed(device)
    options = {f"use_{kind}": True, "w1_scale": s1.to(device), "w2_scale": s2.to(device), "block_shape": block}
    y = vllm.fused_experts(x, w1.to(device), w2.to(device), weights, ids, **options)
    wanted = layer(x.cpu(), m1, m2, weights, ids, rounded=codes_of(kind, 128 if scales == "block" else 0))
    # Between the layers numbers are rounded to f16, which moves them by up to 2^-11, so that codes fall the other way: of FP8, 2^-4 apart, 2^-7 of
    # them, each 0.09 off, in all sqrt(2^-7) * 0.09 = 0.008; of int8, the root of squares a quarter of the largest, 1.5 %, each 4/127 off, in all 0.004.
    assert distance(y.float().cpu(), wanted) < (0.0125 if kind == "fp8_w8a8" else 5e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_maps_and_weights_of_inputs(device):
    """Of 8 experts 4 are here; Llama 4 multiplies its token by the weight of its one expert."""
    w1, s1, _, m1 = four_bits(2 * I, K, False)
    w2, s2, _, m2 = four_bits(K, I, False)
    options = {"w1_scale": s1.to(device), "w2_scale": s2.to(device), "use_int4_w4a16": True, "block_shape": [0, G]}
    held = torch.tensor([-1, 2, -1, 0, 1, -1, 3, -1])
    ids = torch.stack([torch.randperm(8)[:TOP] for _ in range(T)])
    x, weights = torch.randn(T, K).half().to(device), torch.rand(T, TOP)
    run = lambda ids, weights, **more: vllm.fused_experts(  # noqa: E731
        x, w1.to(device), w2.to(device), weights.to(device), ids.to(device), **options, **more
    )
    y = run(ids, weights, expert_map=held.to(device), global_num_experts=8)
    assert distance(y.float().cpu(), layer(x.cpu(), m1, m2, weights, held[ids])) < 3e-3
    one = held[ids[:, :1]].clamp(min=0)
    scaled = (x.cpu().float() * weights[:, :1]).half()
    y = run(one, weights[:, :1], apply_router_weight_on_input=True)
    assert distance(y.float().cpu(), layer(scaled, m1, m2, torch.ones(T, 1), one)) < 3e-3
    with pytest.raises(nibble.Unsupported, match="with 2 experts of a token"):
        run(held[ids], weights, apply_router_weight_on_input=True)


def test_what_is_refused():
    w1, s1, _, _ = four_bits(2 * I, K, False)
    w2, s2, _, _ = four_bits(K, I, False)
    x, (weights, ids) = torch.randn(T, K), routed("cpu")
    options = {"w1_scale": s1, "w2_scale": s2, "use_int4_w4a16": True, "block_shape": [0, G]}
    call = lambda **more: vllm.fused_experts(x, w1, w2, weights, ids, **{**options, **more})  # noqa: E731
    with pytest.raises(nibble.Unsupported, match="'swigluoai'"):
        call(activation="swigluoai")
    with pytest.raises(nibble.Unsupported, match="a1_scale or a2_scale"):
        call(a1_scale=torch.ones(1))
    with pytest.raises(nibble.InvalidArgument, match="fp8_w8a8 and int4_w4a16"):
        call(use_fp8_w8a8=True)
    with pytest.raises(nibble.InvalidArgument, match="floats with w1_scale"):
        call(use_int4_w4a16=False)
    with pytest.raises(nibble.InvalidArgument, match=r"take \[4,?\s?256, 8\]|take \[4, 256, 8\]"):
        call(block_shape=[0, 32])
    eight = {"w1_scale": s1, "w2_scale": s2, "use_int8_w8a16": True, "block_shape": [0, G], "w1_zp": torch.zeros(E, I, K // G, dtype=torch.uint8)}
    with pytest.raises(nibble.Unsupported, match="zero points of 8-bit codes"):
        vllm.fused_experts(x, torch.zeros(E, 2 * I, K, dtype=torch.uint8), torch.zeros(E, K, I, dtype=torch.uint8), weights, ids, **eight)
    with pytest.raises(nibble.Unsupported, match="use_nvfp4_w4a4"):
        vllm.fused_experts(x, w1, w2, weights, ids, quant_config=types.SimpleNamespace(use_nvfp4_w4a4=True))
