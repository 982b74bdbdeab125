"""Shares of layers for several processes."""

from __future__ import annotations

from typing import Any, Iterable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import nibble
from nibble import experts as ex
from nibble._torch.experts import _experts, QuantExperts
from nibble._torch.layers import QuantLinear
from nibble._torch.shards import _replace, shard_inputs, shard_outputs
from nibble.errors import InvalidArgument, NotFound, Unsupported


def _read_part(cls: Any, checkpoint: nibble.Checkpoint, name: str, which: str, group: Any, options: dict[str, Any]) -> Any:
    """The rank's layer from its own bytes of the file, or from all of them where these are not apart."""
    layer = next((module for module in checkpoint.modules if module.name == name), None)
    if layer is None:
        raise NotFound(f"{checkpoint.path}: no module {name}")
    total, what = (layer.n, "N") if which == "outputs" else (layer.k, "K")
    try:
        share = checkpoint.read(layer, **{which: _part(total, what, group)})
    except Unsupported:
        return cls(checkpoint.read(layer), group=group, **options)
    return cls(share, is_share=True, group=group, **options)


def _part(total: int, what: str, group: Any) -> tuple[int, int]:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if total % ranks != 0:
        raise InvalidArgument(f"{what}={total} does not divide among {ranks} ranks")
    return rank * (total // ranks), (rank + 1) * (total // ranks)


class ColumnParallelLinear(QuantLinear):
    """A rank's share of the output channels of a layer: y[..., N / ranks] = x · Wᵀ + bias; with gather_output all of y, on every rank.

    q: the whole layer; with is_share this rank's output channels alone, as engines load them. channels: which output channels this rank
    computes, where the next layer wants others than its N / ranks consecutive ones (RowParallelLinear.channels of an act-order layer).
    """

    def __init__(
        self, q: nibble.QuantTensor, *, channels: Iterable[int] | None = None, gather_output: bool = False, is_share: bool = False,
        group: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        if is_share:
            if channels is not None:
                raise InvalidArgument("channels= picks from a whole layer; q is a share")
        elif channels is not None:
            _part(q.n, "N", group)
            if gather_output:
                raise InvalidArgument("gather_output puts consecutive channels together; it takes no channels=")
            if q.group_shape[0] != 1:
                raise InvalidArgument(f"{q.scheme}: output channels share scales, and cannot be picked one by one")
            chosen = np.asarray(list(channels), dtype=np.int64)
            rows = {name: None if getattr(q, name) is None else getattr(q, name)[chosen] for name in ("codes", "scales", "zeros", "bias")}
            q = _replace(q, **rows)
        else:
            q = shard_outputs(q, *_part(q.n, "N", group))
        super().__init__(q, **options)
        self.gather_output, self.group = gather_output, group

    @classmethod
    def read(cls, checkpoint: nibble.Checkpoint, name: str, *, group: Any = None, **options: Any) -> ColumnParallelLinear:
        """Of a layer of a checkpoint, whose other output channels are not read where the file has them apart."""
        return _read_part(cls, checkpoint, name, "outputs", group, options)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.gather_output:
            return y
        parts = [torch.empty_like(y) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, y.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)


class RowParallelLinear(QuantLinear):
    """A rank's share of the input channels of a layer; y[..., N] is the sum over all ranks, and the same on each.

    q: the whole layer; with is_share this rank's input channels alone, consecutive ones, with the whole bias.
    input_is_parallel: x is this rank's share already, x_whole[..., self.channels]; else x is whole and the share is taken from it.
    Without act-order the channels are consecutive, as a ColumnParallelLinear in front leaves them. With act-order they are those of
    whole groups: give the layer in front channels=self.channels. Activations quantized while running are so from this rank's share.
    """

    channels: Tensor

    def __init__(
        self, q: nibble.QuantTensor, *, input_is_parallel: bool = False, is_share: bool = False, group: Any = None, **options: Any
    ) -> None:
        if is_share:
            part, channels = q, np.arange(q.k) + dist.get_rank(group) * q.k
        else:
            part, channels = shard_inputs(q, *_part(q.k, "K", group))
        if dist.get_rank(group) != 0 and part.bias is not None:
            part = _replace(part, bias=None)
        if options.get("activation", "none") != "none":
            raise InvalidArgument("an activation comes after the sum over all ranks; apply it to the result")
        super().__init__(part, **options)
        self.register_buffer("channels", torch.from_numpy(np.array(channels)), persistent=False)
        self.input_is_parallel, self.group = input_is_parallel, group

    @classmethod
    def read(cls, checkpoint: nibble.Checkpoint, name: str, *, group: Any = None, **options: Any) -> RowParallelLinear:
        """Of a layer of a checkpoint, whose other input channels are not read where the file has them apart: not in act-order, nor where a
        boundary is inside a group."""
        return _read_part(cls, checkpoint, name, "inputs", group, options)

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = x[..., self.channels]
        y = super().forward(x)
        dist.all_reduce(y, group=self.group)
        return y


#
#   this rank's tokens ──rows by rank──▶ experts of rank 0 … ──a result of each pair (token, choice)──▶ the weighted sum, here
#
# A token goes once to each rank that has experts of its. What comes back are results in f32, not sums: added here in the order of a
# token's choices, they make the bits of a layer that has all experts.
class ParallelExperts(QuantExperts):
    """A rank's share of the experts of a layer: what QuantExperts computes, of this rank's tokens, which go where their experts are.

    gate_up, down: all experts, of which rank r of R keeps r·E/R ... (r+1)·E/R - 1; with is_share these alone (see share()). shared, shared_gate: as
    QuantExperts has them; the last `shared` experts, of a share too, are on every rank, and a token does not leave its rank for them.
    replicated: every rank has the same tokens, computes its part of them, and gets all results. Otherwise every rank has its own, any
    number of them and also none, but calls as often as the others do. The numbers of rows that go are read by the host.
    A result has the bits of one process that has all tokens, where the same kernels run: on a CPU they do, but for shared experts, of which
    the number of the rank's tokens decides; on a GPU the number of rows of all experts together.
    """

    def __init__(
        self, gate_up: ex.PackedExperts, down: ex.PackedExperts, activation: str = "silu", *, is_share: bool = False,
        replicated: bool = False, group: Any = None, shared: int = 0, shared_gate: nn.Module | None = None,
    ) -> None:  # fmt: skip
        if not is_share:
            routed = max(len(gate_up) - shared, 0)
            own = [*self.share(routed, group), *range(routed, len(gate_up))]
            gate_up, down = (ex.PackedExperts([each[e] for e in own]) for each in (gate_up, down))
        super().__init__(gate_up, down, activation, shared=shared, shared_gate=shared_gate)
        self.num_experts *= dist.get_world_size(group)
        self.replicated, self.group = replicated, group

    @staticmethod
    def share(experts: int, group: Any = None) -> range:
        """Which of so many experts this rank has. Raises InvalidArgument where they do not divide among the ranks."""
        return range(*_part(experts, "E", group))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, ids, weights = (t.flatten(0, -2) for t in (hidden_states, top_k_index, top_k_weights))
        factor = None if self.shared_gate is None else torch.sigmoid(self.shared_gate(x).float()).view(-1, 1)
        if self.replicated:
            ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
            most = -(-x.shape[0] // ranks)
            mine = slice(rank * most, (rank + 1) * most)
            part = self._own_tokens(x[mine], ids[mine], weights[mine], None if factor is None else factor[mine])
            y = _gathered(part, most, self.group)[: x.shape[0]]
        else:
            y = self._own_tokens(x, ids, weights, factor)
        return y.view(*hidden_states.shape[:-1], self.out_size)

    def _own_tokens(self, x: Tensor, ids: Tensor, weights: Tensor, factor: Tensor | None) -> Tensor:
        ranks = dist.get_world_size(self.group)
        each = self.num_experts // ranks
        # [R,T,top_k]: whether rank r has the expert. Ids that are outside of their range are of no rank.
        wanted = ids.div(each, rounding_mode="floor") == torch.arange(ranks, device=ids.device).view(-1, 1, 1)
        there, token = wanted.any(-1).nonzero(as_tuple=True)  # rows that go, by rank
        local = (ids[token] - each * there.unsqueeze(-1)).masked_fill(~wanted[there, token], -1)

        sizes = torch.stack([wanted.any(-1).sum(1), wanted.sum((1, 2))], 1)  # rows and pairs for each rank
        of_others = torch.empty_like(sizes)
        dist.all_to_all_single(of_others, sizes, group=self.group)
        (rows, pairs), (rows_here, pairs_here) = torch.stack([sizes, of_others]).transpose(1, 2).tolist()

        given = _exchanged([x[token], local.to(torch.int32)], rows, rows_here, self.group)
        row, choice = (given[1] >= 0).nonzero(as_tuple=True)
        (results,) = _exchanged([self._results(given[0][row], given[1][row, choice])], pairs_here, pairs, self.group)

        _, token, choice = wanted.nonzero(as_tuple=True)  # in the order of the results
        of_choices = results.new_zeros((ids.shape[1], x.shape[0], self.out_size))
        of_choices[choice, token] = results
        factors = weights.float().masked_fill(~wanted.any(0), 0)
        y = results.new_zeros((x.shape[0], self.out_size))
        for j, result in enumerate(of_choices):
            y += factors[:, j : j + 1] * result
        for e in range(each, each + self.shared):  # last in the sum, as QuantExperts has them
            result = self._results(x, torch.full((x.shape[0],), e, dtype=torch.int32, device=x.device))
            y += result if factor is None else factor * result
        return y.to(x.dtype)

    def _results(self, x: Tensor, ids: Tensor) -> Tensor:
        """f32 [rows, N]: of each row what its expert, one of this rank's, makes of it."""
        if x.shape[0] == 0:
            return x.new_empty((0, self.out_size), dtype=torch.float32)
        ones = torch.ones(x.shape[0], 1, device=x.device)
        return ex.moe(
            x, ids.unsqueeze(-1), ones, _experts(self.gate_up), _experts(self.down), activation=self.activation, out_dtype=torch.float32
        )


def _exchanged(parts: list[Tensor], sizes: list[int], sizes_here: list[int], group: Any) -> list[Tensor]:
    """Rows for the ranks, sizes[r] of them for rank r, against theirs for this one: of several matrices, side by side in one message."""
    bytes_ = [part.contiguous().view(torch.uint8) for part in parts]
    sent = torch.cat(bytes_, 1)
    received = sent.new_empty((sum(sizes_here), sent.shape[1]))
    dist.all_to_all_single(received, sent, sizes_here, sizes, group=group)
    columns = received.split([each.shape[1] for each in bytes_], 1)
    return [each.clone(memory_format=torch.contiguous_format).view(part.dtype) for each, part in zip(columns, parts)]


def _gathered(part: Tensor, rows: int, group: Any) -> Tensor:
    """The parts of all ranks, of `rows` rows each; a part that has fewer is filled up."""
    filled = part.new_zeros((rows, part.shape[1]))
    filled[: part.shape[0]] = part
    parts = [torch.empty_like(filled) for _ in range(dist.get_world_size(group))]
    dist.all_gather([each.view(torch.uint8) for each in parts], filled.view(torch.uint8), group=group)
    return torch.cat(parts)


def shard_experts(model: nn.Module, *, replicated: bool = False, group: Any = None) -> list[str]:
    """Replaces every QuantExperts by this rank's share of it, ParallelExperts, in place; returns names. replicated: as it has it. Shared experts
    stay whole on every rank.

    Raises InvalidArgument where experts do not divide among the ranks; the layers before are replaced then.
    """
    names, shares = [], {}
    for above, parent in list(model.named_modules()):
        for child, module in list(parent.named_children()):
            if type(module) is not QuantExperts:
                continue
            name = f"{above}.{child}" if above else child
            if module not in shares:
                try:
                    shares[module] = ParallelExperts(
                        _experts(module.gate_up), _experts(module.down), module.activation, replicated=replicated, group=group,
                        shared=module.shared, shared_gate=module.shared_gate,
                    )  # fmt: skip
                except InvalidArgument as problem:
                    raise InvalidArgument(f"{name}: {problem}") from None
                names.append(name)
            setattr(parent, child, shares[module])
    return names
