"""The operators on a CPU against the plain torch that models use today: time in one process, and peak memory.

fp32, one thread, shapes of one layer at 512 tokens.  A row compares an operator with one peer; both sides are first shown to
give the same result.  Where a product of matrices is most of the work, or a copy, its own time is in the row as the floor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from dsv4c import ops
from dsv4c.bench.measure import peak_bytes
from dsv4c.ops import reference
from dsv4c.ops.visibility import entry_mask

Call = Callable[[], Any]
EPS = 1e-6
SAME = 1e-4  # relative: what both sides have to agree to


@dataclass(frozen=True)
class Shapes:
    """One layer at 512 tokens; the hyper-connections and their hidden width are smaller than Flash's."""

    tokens: int = 512
    heads: int = 64
    head_dim: int = 512
    rotary: int = 64
    streams: int = 4
    hidden: int = 1024
    index_dim: int = 128
    ratio: int = 4
    topk: int = 64
    chunk: int = 128


@dataclass(frozen=True)
class Comparison:
    """An operator and its peers: the fastest of them counts."""

    name: str
    peers: Mapping[str, Call]
    ours: Call
    bar: float | None = None  # times as fast as the peer
    memory_bar: float | None = None  # largest share of the peer's peak
    floor: tuple[str, Call] | None = None
    results: Sequence[Call] = field(default=())  # what is compared; by default what the sides return


def compare_operators(
    shapes: Shapes | None = None, *, repeats: int = 9, compiled: bool = True, progress: Progress | None = None
) -> dict[str, Any]:
    """One row per operator and peer; ``compiled`` takes what Inductor makes of transformers' rotation as a peer too."""
    shapes, rows = shapes or Shapes(), []
    with _one_thread():
        torch.manual_seed(0)
        rotary, others = rotations(shapes, compiled), (normalisations, hyper_connections, selection, target)
        task = progress.add_task("operators", total=len(rotary) + len(others) + 1) if progress else None
        for comparison in (*rotary, *(c for make in others for c in make(shapes))):
            if progress is not None and task is not None:
                progress.update(task, description=comparison.name)
            rows.append(_row(comparison, repeats))
            if progress is not None and task is not None:
                progress.advance(task)
    return {"shapes": vars(shapes), "threads": 1, "repeats": repeats, "rows": rows}


def rotations(s: Shapes, compiled: bool) -> list[Comparison]:
    """The partial rotation, in place and not, against transformers' form."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    x = torch.randn(1, s.tokens, s.heads, s.head_dim)
    angle = 100 * torch.rand(1, s.tokens, s.rotary // 2)
    cos, sin, given_up = angle.cos(), angle.sin(), x.clone()

    def form(x: Tensor) -> Tensor:
        return apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=2)

    def in_place(x: Tensor) -> Tensor:
        torch.ops.dsv4.rope_(x, cos, sin, False)
        return x

    peers = {"transformers": form}
    if compiled:
        peers["transformers, compiled"] = torch.compile(form, fullgraph=True, dynamic=False)
    rows = []
    for name, peer in peers.items():
        theirs: dict[str, Call] = {name: lambda peer=peer: peer(x)}  # type: ignore[misc]  # bound now, not at the call
        bar = 10.0 if peer is form else 8.0
        # The rotation is orthogonal, so that the same tensor may be turned again and again.
        same = (lambda: in_place(x.clone()), lambda peer=peer: peer(x))
        rows.append(Comparison("rope_, in place", theirs, lambda: in_place(given_up), bar, results=same))
        rows.append(Comparison("rope", theirs, lambda: ops.rope(x, cos, sin, False), floor=("copy", x.clone)))
    return rows


def normalisations(s: Shapes) -> list[Comparison]:
    """20 normalisations of the mixing matrices."""
    logits, grad = torch.randn(2, 1, s.tokens, s.streams, s.streams).unbind()
    leaf = logits.clone().requires_grad_()

    def both_ways(op: Callable[..., Tensor]) -> Call:
        return lambda: torch.autograd.grad(op(leaf, 20, EPS), leaf, grad)

    return [
        Comparison("sinkhorn", {"plain torch": lambda: reference.sinkhorn(logits, 20, EPS)},
                   lambda: ops.sinkhorn(logits, 20, EPS), 10.0),
        Comparison("sinkhorn, and back", {"plain torch": both_ways(reference.sinkhorn)}, both_ways(ops.sinkhorn)),
    ]  # fmt: skip


def hyper_connections(s: Shapes) -> list[Comparison]:
    """The streams before and after a block that returns what it reads, forward and backward."""
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

    n, rows = s.streams, (2 + s.streams) * s.streams
    config = DeepseekV4Config(hidden_size=s.hidden, hc_mult=n, hc_sinkhorn_iters=20, hc_eps=EPS, rms_norm_eps=EPS)
    module = DeepseekV4HyperConnection(config).float()
    with torch.no_grad():
        module.fn.normal_(std=0.02)
        module.base.normal_()
        module.scale.uniform_()
    streams = torch.randn(1, s.tokens, n, s.hidden, requires_grad=True)
    grad, leaves = torch.randn(1, s.tokens, n, s.hidden), (streams, module.fn, module.base, module.scale)
    assert module.fn.shape[0] == rows

    def transformers_form() -> Tensor:
        post, comb, u = module(streams)
        return post[..., None] * u[..., None, :] + torch.matmul(comb.mT, streams)

    def by(source: Any) -> Call:
        def form() -> Tensor:
            u, post, comb, _, _ = source.hc_pre(*leaves, 20, EPS, EPS)
            result: Tensor = source.hc_post(u, streams, post, comb)
            return result

        return form

    def both_ways(form: Call) -> Call:
        return lambda: torch.autograd.grad(form(), leaves, grad)

    peers = {"transformers": both_ways(transformers_form), "plain torch": both_ways(by(reference))}
    return [Comparison("hc_pre and hc_post, and back", peers, both_ways(by(ops)), 4.0)]


def _document(s: Shapes) -> tuple[Tensor, Tensor]:
    """start [1,S] and entry_end [1,P] of one document."""
    entries = torch.arange(s.tokens // s.ratio)
    return torch.zeros(1, s.tokens, dtype=torch.int64), ((entries + 1) * s.ratio - 1)[None]


def selection(s: Shapes) -> list[Comparison]:
    """The indexer's scores and its choice, against scores of all heads, entries and queries at once."""
    start, entry_end = _document(s)
    q, k = torch.randn(1, s.tokens, s.heads, s.index_dim), torch.randn(1, entry_end.shape[1], s.index_dim)
    w = torch.randn(1, s.tokens, s.heads)
    scale = s.index_dim**-0.5
    future = ~entry_mask(start, entry_end, 0)
    scaled = w * scale

    def scores() -> Tensor:
        dots = torch.relu(torch.matmul(q, k.mT[:, None])) * scale
        return (dots * w[..., None]).sum(2).masked_fill(future, float("-inf"))

    def eager() -> tuple[Tensor, Tensor]:
        best, ids = scores().topk(min(s.topk, k.shape[1]), -1)
        return torch.where(best.isinf(), -1, ids), best

    def ours() -> tuple[Tensor, Tensor]:
        ids, best = ops.indexer_topk(q, k, scaled, start, entry_end, s.topk, s.ratio)
        return ids, best

    def chosen(call: Call) -> Call:
        """Scores only, and those that the plain form gives to the ids: equal scores may stand in any order."""

        def results() -> tuple[Tensor, Tensor]:
            ids, best = call()
            return best, scores().gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, float("-inf"))

        return results

    floor = ("the products of visible pairs", lambda: _causal_products(q[0], k[0], s.ratio))
    same = (chosen(ours), chosen(eager))
    return [Comparison("indexer_topk", {"transformers' form": eager}, ours, 1.4, 1 / 32, floor, same)]


def target(s: Shapes) -> list[Comparison]:
    """The teacher of the indexer, against a loop over chunks of queries that gathers their entries."""
    start, entry_end = _document(s)
    n = entry_end.shape[1]
    q, entries = torch.randn(1, s.tokens, s.heads, s.head_dim), torch.randn(1, n, s.head_dim)
    scale = s.head_dim**-0.5
    seen = entry_mask(start, entry_end, 0)
    best, ids = torch.rand(1, s.tokens, n).masked_fill(~seen, -1.0).topk(min(s.topk, n), -1)
    ids = torch.where(best < 0, -1, ids)
    lse = torch.einsum("bthc,bpc->bthp", q, entries).mul_(scale).masked_fill(~seen[:, :, None], float("-inf")).logsumexp(-1)
    lse = torch.logaddexp(lse, torch.zeros(()))  # the sink, so that every row has something to attend to

    def chunked() -> Tensor:
        out = torch.empty(ids.shape)
        for t in range(0, s.tokens, s.chunk):
            part, chosen = slice(t, t + s.chunk), ids[0, t : t + s.chunk]
            gathered = entries[0][chosen.clamp(min=0)]
            z = torch.einsum("thc,tkc->thk", q[0, part], gathered) * scale
            z = z.masked_fill((chosen < 0)[:, None], float("-inf"))
            mass = torch.exp(z - lse[0, part, :, None]).sum(1)
            out[0, part] = mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        return out

    def ours() -> Tensor:
        result: Tensor = ops.indexer_kl_target(q, entries, ids, lse, scale, s.ratio)
        return result

    floor = ("the products of visible pairs", lambda: _causal_products(q[0], entries[0], s.ratio))
    return [Comparison("indexer_kl_target", {"chunks of queries": chunked}, ours, 1.5, 1 / 16, floor)]


def _causal_products(q: Tensor, k: Tensor, ratio: int, block: int = 64) -> None:
    """The products of q [S,H,c] with the entries that a block of queries may see, and nothing else."""
    out = torch.empty(block * q.shape[1] * len(k))
    for t in range(0, len(q), block):
        rows, n = q[t : t + block].flatten(0, 1), min(len(k), (t + block) // ratio)
        torch.mm(rows, k[:n].T, out=out[: len(rows) * n].view(len(rows), n))


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def processor_seconds(sides: Mapping[str, Call], *, repeats: int, at_least: float = 5e-3) -> dict[str, float]:
    """Median processor time of each side, interleaved A B A B: other work on the machine is not in it.

    A short call is timed over as many as take ``at_least`` seconds.
    """

    def timed(call: Call, n: int) -> float:
        began = time.process_time()
        for _ in range(n):
            call()
        return (time.process_time() - began) / n

    for call in sides.values():
        call()
    count = {name: max(1, int(at_least / timed(call, 1))) for name, call in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, call in sides.items():
            times[name].append(timed(call, count[name]))
    return {name: statistics.median(t) for name, t in times.items()}


def difference(ours: Any, theirs: Any) -> float:
    """Largest ``|a - b| / |b|`` of the tensors of both; infinite where what is not finite is not the same."""
    pairs = zip(*((r,) if isinstance(r, Tensor) else r for r in (ours, theirs)), strict=True)
    worst = 0.0
    for a, b in pairs:
        if not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        a, b = a[b.isfinite()].double(), b[b.isfinite()].double()
        worst = max(worst, float((a - b).norm() / b.norm().clamp(min=1e-30)))
    return worst


def _row(c: Comparison, repeats: int) -> dict[str, Any]:
    first, *others = c.results or (c.ours, *c.peers.values())
    result = first()
    for other in others:
        off = difference(result, other())
        if not off <= SAME:
            raise AssertionError(f"{c.name}: the sides differ by {off:.1e}, more than {SAME}")
    del result
    seconds = processor_seconds(
        {"dsv4c": c.ours, **c.peers, **({c.floor[0]: c.floor[1]} if c.floor else {})}, repeats=repeats
    )
    peer = min(c.peers, key=seconds.__getitem__)
    ratio = seconds[peer] / seconds["dsv4c"]
    row = {
        "operator": c.name, "peer": peer, "seconds": seconds, "ratio": ratio, "bar": c.bar,
        "reached": None if c.bar is None else ratio >= c.bar,
        "floor": None if c.floor is None else {"name": c.floor[0], "ratio": seconds["dsv4c"] / seconds[c.floor[0]]},
    }  # fmt: skip
    if c.memory_bar is not None:
        peaks = {"dsv4c": peak_bytes(c.ours), peer: peak_bytes(c.peers[peer])}
        share = peaks["dsv4c"] / peaks[peer]
        row |= {"peak_bytes": peaks, "memory_share": share, "memory_bar": c.memory_bar}
        row["memory_reached"] = share <= c.memory_bar
    return row
