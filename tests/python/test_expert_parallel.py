"""Experts that are divided among two and four processes over Gloo, or two over NCCL, against one process that has all. Skipped without PyTorch."""

from __future__ import annotations

import copy
import platform
import socket

import pytest
from conftest import distance

import nibble

torch = pytest.importorskip("torch")
nt = pytest.importorskip("nibble.torch")

E, K, I, N, TOP = 8, 64, 32, 48, 3
SCHEMES = ["u4zg32", "u4b8g32", "s8r_s8c"]


def layer(scheme: str, device: str, shared: int = 0, gate: bool = False, **limits: float) -> nt.QuantExperts:
    """shared: so many experts more, of every token, with a gate or without."""
    torch.manual_seed(1)
    act_scheme, scheme = nibble._torch.layers._parts(scheme)

    def quantized(n: int, k: int):
        for _ in range(E + shared):
            yield nibble.QuantTensor(**nibble._fields(nibble.quantize(torch.randn(n, k).numpy(), scheme), bias=torch.randn(n).numpy()))

    backend = {"backend": "cuda"} if device.startswith("cuda") else {}
    gate_up = nibble.pack_experts(quantized(2 * I, K), act_scheme=act_scheme, glu=True, **limits, **backend)
    down = nibble.pack_experts(quantized(N, I), act_scheme=act_scheme, **backend)
    shared_gate = torch.nn.Linear(K, 1, bias=False, device=device) if gate else None
    return nt.QuantExperts(gate_up, down, "quick_gelu" if limits else "silu", shared=shared, shared_gate=shared_gate)


def tokens(count: int, dtype: torch.dtype, device: str):
    """x, ids and weights: tokens with -1 among their ids, and all with expert 1 in some place."""
    torch.manual_seed(2)
    others = torch.stack([torch.randperm(E - 1)[: TOP - 1] for _ in range(count)]) if count else torch.empty(0, TOP - 1, dtype=torch.int64)
    ids = torch.cat([torch.ones(count, 1, dtype=torch.int64), others + (others >= 1)], 1).roll(1, 1)
    ids[::5, 0] = -1
    return [t.to(device) for t in (torch.randn(count, K).to(dtype), ids, torch.rand(count, TOP))]


def check(y, wanted, gpus: bool) -> None:
    """The same bits, where the compiler does not join multiplications and additions of the sum, and where the same kernels run for every number
    of tokens: on CPUs with AVX-512."""
    if not gpus and platform.machine() in ("x86_64", "AMD64") and nibble.doctor()["isa"].startswith(("avx512", "amx")):
        assert torch.equal(y, wanted)
    else:
        assert y.shape == wanted.shape
        assert y.numel() == 0 or distance(y.float().cpu(), wanted.float().cpu()) < (1e-2 if y.dtype == torch.bfloat16 else 1e-4)


def check_tokens(y, wanted, loose: bool, gpus: bool) -> None:
    """loose: the kernel of shared experts, and of their gate, is one for so many tokens, and that for others has other last bits of floats."""
    if loose:
        assert y.shape == wanted.shape
        assert y.numel() == 0 or distance(y.float().cpu(), wanted.float().cpu()) < (1e-2 if y.dtype == torch.bfloat16 else 1e-6)
    else:
        check(y, wanted, gpus)


@torch.no_grad()
def check_shared(rank: int, ranks: int, device: str, gpus: bool) -> None:
    """Shared experts are on every rank; the tokens of each, of some ranks none, and the same tokens everywhere."""
    own = nibble._torch.experts._experts
    for scheme, shared, gate in (("u4zg32", 1, False), ("s8r_s8c", 2, False), ("u4b8g32", 2, True)):
        loose = gate or (scheme != "s8r_s8c" and not gpus)
        whole = layer(scheme, device, shared, gate)
        experts = nt.ParallelExperts(own(whole.gate_up), own(whole.down), shared=shared, shared_gate=whole.shared_gate)
        assert (experts.num_experts, experts.shared, experts.gate_up.shape[0]) == (E, shared, E // ranks + shared)
        routed = slice(rank * E // ranks, (rank + 1) * E // ranks)
        assert torch.equal(experts.gate_up, torch.cat([whole.gate_up[routed], whole.gate_up[E:]]))
        for each in (0, 1, 23):
            sizes = [each * r for r in range(ranks)]
            x, ids, weights = tokens(sum(sizes), torch.float32, device)
            ids[1::4, 2] = E  # of other processes in transformers' words, and not the first shared expert
            mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
            y, wanted = experts(x[mine], ids[mine], weights[mine]), whole(x, ids, weights)[mine]
            check_tokens(y, wanted, loose, gpus)
        model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": whole})})
        assert nt.shard_experts(model, replicated=True) == ["mlp.experts"] and type(model["mlp"]["experts"]) is nt.ParallelExperts
        x, ids, weights = tokens(7, torch.bfloat16 if not gate else torch.float32, device)
        check_tokens(model["mlp"]["experts"](x, ids, weights), whole(x, ids, weights), loose, gpus)
    with pytest.raises(nibble.InvalidArgument, match=f"E={E + 1} does not divide among {ranks} ranks"):
        nt.ParallelExperts(own(whole.gate_up), own(whole.down), shared=1)


def rank_main(rank: int, port: int, gpus: bool, ranks: int) -> None:
    import torch.distributed as dist

    device = f"cuda:{rank}" if gpus else "cpu"
    if gpus:
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpus else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    for scheme in SCHEMES:
        whole = layer(scheme, device, **({"glu_limit": 7.0, "glu_offset": 1.0} if scheme == "u4b8g32" else {}))
        own = nibble._torch.experts._experts
        experts = nt.ParallelExperts(own(whole.gate_up), own(whole.down), whole.activation)
        assert experts.num_experts == E and experts.gate_up.shape[0] == E // ranks and list(nt.ParallelExperts.share(E))[0] == rank * E // ranks
        assert torch.equal(experts.gate_up, whole.gate_up[rank * E // ranks : (rank + 1) * E // ranks])
        for dtype in (torch.float32, torch.bfloat16):
            for each in (0, 1, 23):  # tokens of the last rank: the first has none
                sizes = [each * r for r in range(ranks)]
                x, ids, weights = tokens(sum(sizes), dtype, device)
                wanted = whole(x, ids, weights)
                mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
                y = experts(x[mine], ids[mine], weights[mine])
                assert y.dtype == dtype and y.shape == (sizes[rank], N)
                check(y, wanted[mine], gpus)
    # The same tokens everywhere, as in a model whose other layers are not divided: 7 do not divide among the ranks.
    model = torch.nn.ModuleDict({"a": torch.nn.ModuleDict({"experts": whole}), "b": torch.nn.ModuleDict({"experts": whole})})
    assert nt.shard_experts(model, replicated=True) == ["a.experts"]
    assert type(model["a"]["experts"]) is nt.ParallelExperts and model["b"]["experts"] is model["a"]["experts"]
    for count in (7, 1, 0):
        x, ids, weights = tokens(count, torch.bfloat16, device)
        check(model["a"]["experts"](x.unsqueeze(0), ids.unsqueeze(0), weights.unsqueeze(0)), whole(x, ids, weights).unsqueeze(0), gpus)
    # A share that was packed alone.
    gate_ups, downs = ([weight.unpack() for weight in own(packed)] for packed in (whole.gate_up, whole.down))
    x, ids, weights = tokens(4, torch.float32, device)
    if not gpus:
        # docs: begin share
        share = nt.ParallelExperts.share(len(gate_ups))  # of 8 experts and 4 ranks, rank 1 has 2 and 3
        gate_up = nibble.pack_experts((gate_ups[e] for e in share), act_scheme="s8r", glu=True)
        down = nibble.pack_experts((downs[e] for e in share), act_scheme="s8r")
        experts = nt.ParallelExperts(gate_up, down, is_share=True)
        y = experts(x, ids, weights)  # of this rank's tokens, whose experts are anywhere
        # docs: end share
        check(y, whole(x, ids, weights), gpus)
    check_shared(rank, ranks, device, gpus)
    with pytest.raises(nibble.InvalidArgument, match=f"E=9 does not divide among {ranks} ranks"):
        nt.ParallelExperts.share(9)
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
@pytest.mark.parametrize("ranks, gpus", [(2, False), (4, False), (2, True)])
def test_processes(ranks, gpus):
    if gpus and (torch.cuda.device_count() < 2 or nibble.doctor()["gpu"] is None):
        pytest.skip("two GPUs, and a build with CUDA")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(rank_main, args=(port, gpus, ranks), nprocs=ranks)


def model_main(rank: int, port: int, ranks: int) -> None:
    """A fused model of Qwen2-MoE's, with its shared expert and the gate of it among the experts, divided and put back."""
    import torch.distributed as dist
    from test_shared_experts import block_of, converted

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    for kind, shared in (("qwen2", 4), ("deepseek", 2)):
        whole = converted(kind)
        nt.fuse(whole)
        model = copy.deepcopy(whole)
        assert "model.layers.1.mlp.experts" in nt.shard_experts(model, replicated=True)
        experts = block_of(model).experts
        assert type(experts) is nt.ParallelExperts and (experts.shared, experts.num_experts, experts.gate_up.shape[0]) == (shared, 8, 8 // ranks + shared)
        ids = torch.randint(128, (2, 9), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            wanted = whole(ids).logits
            assert distance(model(ids).logits, wanted) < 1e-6
            nt.unfuse(model)
            experts = block_of(model).experts
            assert type(experts) is nt.ParallelExperts and (experts.shared, experts.gate_up.shape[0]) == (0, 8 // ranks)
            assert distance(model(ids).logits, wanted) < 1e-5
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
@pytest.mark.parametrize("ranks", [2, 4])
def test_models_with_shared_experts(ranks):
    pytest.importorskip("transformers")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(model_main, args=(port, ranks), nprocs=ranks)
