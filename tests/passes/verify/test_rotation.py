"""The rule ``rotation``: right models of every layer kind are proved, each wrong rotation of a small layer is reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4c import ops
from dsv4c.passes.verify import Subject, verify
from tests.passes.verify.mutation import CONFIGS
from tests.passes.verify.traced import RATIO, B, C, H, K, P, R, S, graph, messages, model, numbers, report, whole

PLACES = {"swa": 3, "csa": 8, "hca": 4, "swa-hash": 3, "csa-hash": 8, "hca-hash": 4, "mtp": 6, "two": 11}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_right_model_is_proved_at_every_place(kind: str) -> None:
    found = verify(model(kind), ["rotation"])
    assert found.ok, str(found)
    assert found.checked["rotation"] == PLACES[kind]


def tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    angle = positions[..., None].float() * frequencies
    return angle.cos(), angle.sin()


def layer(
    *, q: Callable[..., Tensor] = ops.rope, kv: Callable[..., Tensor] = ops.rope, entries: Callable[..., Tensor] = ops.rope,
    back: Callable[..., Tensor] = lambda o, cos, sin: ops.rope(o, cos, sin, True), shift: int = 1 - RATIO,
    pooled: bool = False, given: bool = False,
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:  # fmt: skip
    """An attention layer whose rotations can be exchanged; ``shift``: where entries stand, counted from their window's end;
    ``pooled``: at their index instead; ``given``: tables are inputs of the graph."""

    def forward(x: Tensor, pool: Tensor, wq: Tensor, wk: Tensor, wo: Tensor, sink: Tensor, start: Tensor, end: Tensor,
                frequencies: Tensor, e_cos: Tensor, e_sin: Tensor, t_cos: Tensor, t_sin: Tensor) -> Tensor:  # fmt: skip
        positions = torch.arange(S, device=x.device).expand(B, S) - start
        cos, sin = (t_cos, t_sin) if given else tables(positions, frequencies)
        at = torch.arange(P, device=x.device).expand(B, P) if pooled else positions.gather(1, (end + shift).clamp(min=0))
        entry_cos, entry_sin = (e_cos, e_sin) if given else tables(at, frequencies)
        queries, keys = (x @ wq).view(B, S, H, C), x @ wk
        o, _ = ops.sparse_attention(
            q(queries, cos, sin, False), kv(keys, cos, sin, False), entries(pool @ wk, entry_cos, entry_sin, False), sink,
            start,
            end, None, C**-0.5, 4, RATIO,
        )  # fmt: skip
        return back(o, cos, sin).reshape(B, S, H * C) @ wo

    table, entry = numbers(B, S, R // 2), numbers(B, P, R // 2)
    weights = (numbers(H * C, H * C), numbers(H * C, C), numbers(H * C, H * C), numbers(H))
    args = (numbers(B, S, H * C), numbers(B, P, H * C), *weights, whole(B, S), whole(B, P), numbers(R // 2))
    return forward, (*args, entry, entry, table, table)


def unrotated(x: Tensor, *_: object) -> Tensor:
    return x


def twice(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    return ops.rope(ops.rope(x, cos, sin, inverse), cos, sin, inverse)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"given": True},
        {"q": lambda x, cos, sin, inverse: ops.rope(x.float(), cos.clone(), sin.detach(), inverse).to(x.dtype)},
        {"back": lambda o, cos, sin: ops.rope(o * 2, cos[:, :S], sin.contiguous(), True)},
    ],
    ids=["as it is", "tables from outside", "through copies and casts", "a whole slice of the table"],
)
def test_a_right_layer_is_proved(change: dict[str, object]) -> None:
    forward, args = layer(**change)  # type: ignore[arg-type]  # the changes are keyword arguments
    found = report("rotation", forward, *args)
    assert found.ok, str(found)
    assert found.checked["rotation"] == 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": unrotated}, "queries (q of sparse_attention) are not rotated"),
        ({"q": twice}, "are rotated 2 times"),
        ({"q": lambda x, cos, sin, _: ops.rope(x, cos, sin, True)}, "are rotated backward"),
        ({"kv": unrotated}, "window keys (kv of sparse_attention) are not rotated"),
        ({"kv": lambda x, cos, sin, i: ops.rope(x, sin, cos, i)}, "by another table than the layer's queries"),
        ({"kv": lambda x, cos, sin, i: x + ops.rope(x, cos, sin, i)}, "are not rotated on one of the ways here"),
        ({"entries": unrotated}, "entries (entries of sparse_attention) are not rotated"),
        ({"entries": twice}, "are rotated 2 times"),
        ({"shift": 0}, "at the position of the last token of their window"),
        ({"shift": 2 - RATIO}, "at the position of token 1 of their window"),
        ({"pooled": True}, "at their index among the entries"),
        ({"back": lambda o, cos, sin: o}, "without being rotated back"),
        ({"back": lambda o, cos, sin: twice(o, cos, sin, True)}, "rotated 2 times before the projection"),
        ({"back": lambda o, cos, sin: ops.rope(o, cos, sin, False)}, "is rotated forward again"),
        ({"back": lambda o, cos, sin: ops.rope(o, sin, cos, True)}, "rotated back by another table"),
        ({"back": lambda o, cos, sin: ops.rope(o, cos, sin, True) + o}, "without being rotated back"),
    ],
)  # fmt: skip
def test_a_wrong_rotation_is_reported(change: dict[str, object], says: str) -> None:
    forward, args = layer(**change)  # type: ignore[arg-type]  # the changes are keyword arguments
    found = report("rotation", forward, *args)
    assert any(says in m for m in messages(found)), str(found)


def fused(forward: Callable[..., Tensor], args: tuple[Tensor, ...], table: str = "own") -> Subject:
    """The layer with core and rotation back in one operator; ``table``: "own", or "entries" for the wrong one."""
    found = graph(forward, *args)
    nodes = found.graph.graph
    (core,) = nodes.find_nodes(op="call_function", target=torch.ops.dsv4.sparse_attention.default)
    *forward_ropes, back = nodes.find_nodes(op="call_function", target=torch.ops.dsv4.rope.default)
    core.target = torch.ops.dsv4.sparse_attention_derotated.default
    core.args = (*core.args, *(forward_ropes[0 if table == "own" else 2].args[1:3]))
    back.replace_all_uses_with(back.args[0])
    nodes.erase_node(back)
    return found


def test_the_fused_core_is_a_core_and_one_rotation_back() -> None:
    found = verify(fused(*layer()), ["rotation"])
    assert found.ok, str(found)
    assert found.checked["rotation"] == 4


def test_a_fused_core_with_another_table_is_reported() -> None:
    assert "rotated back by another table" in messages(verify(fused(*layer(), table="entries"), ["rotation"]))[0]


def test_a_fused_core_that_is_rotated_back_again_is_reported() -> None:
    forward, args = layer(back=lambda o, cos, sin: twice(o, cos, sin, True))
    assert "rotated 2 times" in messages(verify(fused(forward, args), ["rotation"]))[0]


def test_an_indexer_is_bound_to_the_positions_of_its_own_operands() -> None:
    def forward(x: Tensor, k: Tensor, w: Tensor, start: Tensor, end: Tensor, frequencies: Tensor) -> Tensor:
        positions = torch.arange(S, device=x.device).expand(B, S) - start
        q = ops.rope(x.view(B, S, H, C), *tables(positions, frequencies), False)
        keys = ops.rope(k, *tables(positions.gather(1, end), frequencies), False)
        return ops.indexer_topk(ops.hadamard(q), ops.hadamard(keys), w, start, end, K, RATIO)[1]

    args = (numbers(B, S, H * C), numbers(B, P, C), numbers(B, S, H), whole(B, S), whole(B, P), numbers(R // 2))
    (message,) = messages(report("rotation", forward, *args))
    assert "keys (k of indexer_topk) are rotated at the position of the last token" in message
