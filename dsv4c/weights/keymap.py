"""Which tensor of which layout is which: the names, shapes and storage of every parameter, as data.

Everything that reads or writes weights stands on this table. Our tensors stack the experts and join gate and up
projections, the released layout has one tensor for each, Hugging Face joins some. So a tensor is a sequence of
:class:`Part` s, the finest pieces any layout tells apart, and every layout says where in which of its keys a part
lies. Source: specification, section 0 (names, storage) and section 8 (shapes).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from dsv4c.config import LayerKind, ModelConfig
from dsv4c.errors import WeightsError

Layout = Literal["dsv4c", "released", "hf", "transformers"]
Storage = Literal["bf16", "fp32", "int64", "fp8", "fp4"]  # fp8 and fp4 are bf16 where a file is not quantised
Select = tuple[int | slice, ...]

WRITABLE: tuple[Layout, ...] = ("hf", "released", "dsv4c")


@dataclass(frozen=True)
class Row:
    """One tensor. A name of two words is a tensor in two halves (gate, up); ``{e}`` in a name: one tensor an
    expert.
    """

    ours: str
    hf: str
    shape: str  # names of :func:`_sizes`
    storage: Storage
    when: Literal["always", "compressed", "csa", "hash", "learned"] = "always"
    released: str = ""  # where it is not our name


_TOP = (
    Row("embed.weight", "model.embed_tokens.weight", "V D", "bf16"),
    Row("norm.weight", "model.norm.weight", "D", "bf16"),
    Row("hc_head.fn", "model.hc_head.hc_fn", "n nD", "fp32", released="hc_head_fn"),
    Row("hc_head.base", "model.hc_head.hc_base", "n", "fp32", released="hc_head_base"),
    Row("hc_head.scale", "model.hc_head.hc_scale", "one", "fp32", released="hc_head_scale"),
    Row("head.weight", "lm_head.weight", "V D", "bf16"),
)

_COMPRESSOR = "self_attn.compressor"
_INDEXER = "self_attn.compressor.indexer"
_BLOCK = (
    Row("attn_norm.weight", "input_layernorm.weight", "D", "bf16"),
    Row("hc_attn.fn", "attn_hc.fn", "mix nD", "fp32", released="hc_attn_fn"),
    Row("hc_attn.base", "attn_hc.base", "mix", "fp32", released="hc_attn_base"),
    Row("hc_attn.scale", "attn_hc.scale", "three", "fp32", released="hc_attn_scale"),
    Row("attn.wq_a.weight", "self_attn.q_a_proj.weight", "q D", "fp8"),
    Row("attn.q_norm.weight", "self_attn.q_a_norm.weight", "q", "bf16"),
    Row("attn.wq_b.weight", "self_attn.q_b_proj.weight", "Hc q", "fp8"),
    Row("attn.wkv.weight", "self_attn.kv_proj.weight", "c D", "fp8"),
    Row("attn.kv_norm.weight", "self_attn.kv_norm.weight", "c", "bf16"),
    Row("attn.attn_sink", "self_attn.sinks", "H", "fp32"),
    Row("attn.wo_a.weight", "self_attn.o_a_proj.weight", "Gg Hc/G", "fp8"),
    Row("attn.wo_b.weight", "self_attn.o_b_proj.weight", "D Gg", "fp8"),
    Row("attn.compressor.wkv.weight", f"{_COMPRESSOR}.kv_proj.weight", "wc D", "bf16", "compressed"),
    Row("attn.compressor.wgate.weight", f"{_COMPRESSOR}.gate_proj.weight", "wc D", "bf16", "compressed"),
    Row("attn.compressor.ape", f"{_COMPRESSOR}.position_bias", "m wc", "fp32", "compressed"),
    Row("attn.compressor.norm.weight", f"{_COMPRESSOR}.kv_norm.weight", "c", "bf16", "compressed"),
    Row("attn.indexer.wq_b.weight", f"{_INDEXER}.q_b_proj.weight", "Hici q", "fp8", "csa"),
    Row("attn.indexer.weights_proj.weight", f"{_INDEXER}.scorer.weights_proj.weight", "Hi D", "bf16", "csa"),
    Row("attn.indexer.compressor.wkv.weight", f"{_INDEXER}.kv_proj.weight", "2ci D", "bf16", "csa"),
    Row("attn.indexer.compressor.wgate.weight", f"{_INDEXER}.gate_proj.weight", "2ci D", "bf16", "csa"),
    Row("attn.indexer.compressor.ape", f"{_INDEXER}.position_bias", "m 2ci", "fp32", "csa"),
    Row("attn.indexer.compressor.norm.weight", f"{_INDEXER}.kv_norm.weight", "ci", "bf16", "csa"),
    Row("ffn_norm.weight", "post_attention_layernorm.weight", "D", "bf16"),
    Row("hc_ffn.fn", "ffn_hc.fn", "mix nD", "fp32", released="hc_ffn_fn"),
    Row("hc_ffn.base", "ffn_hc.base", "mix", "fp32", released="hc_ffn_base"),
    Row("hc_ffn.scale", "ffn_hc.scale", "three", "fp32", released="hc_ffn_scale"),
    Row("ffn.gate.weight", "mlp.gate.weight", "E D", "bf16"),
    Row("ffn.gate.bias", "mlp.gate.e_score_correction_bias", "E", "fp32", "learned"),
    Row("ffn.gate.tid2eid", "mlp.gate.tid2eid", "V k", "int64", "hash"),
    Row("ffn.experts.w13", "mlp.experts.gate_up_proj", "E 2I D", "fp4",
        released="ffn.experts.{e}.w1.weight ffn.experts.{e}.w3.weight"),
    Row("ffn.experts.w2", "mlp.experts.down_proj", "E D I", "fp4", released="ffn.experts.{e}.w2.weight"),
    Row("ffn.shared_experts.w13.weight",
        "mlp.shared_experts.gate_proj.weight mlp.shared_experts.up_proj.weight", "2I D", "fp8",
        released="ffn.shared_experts.w1.weight ffn.shared_experts.w3.weight"),
    Row("ffn.shared_experts.w2.weight", "mlp.shared_experts.down_proj.weight", "D I", "fp8"),
)  # fmt: skip

# Hugging Face has no MTP layer and ignores keys that begin with mtp.: they keep the names given here.
_MTP = (
    Row("e_proj.weight", "e_proj.weight", "D D", "fp8"),
    Row("h_proj.weight", "h_proj.weight", "D D", "fp8"),
    Row("enorm.weight", "enorm.weight", "D", "bf16"),
    Row("hnorm.weight", "hnorm.weight", "D", "bf16"),
    Row("norm.weight", "norm.weight", "D", "bf16"),
    Row("hc_head.fn", "hc_head.hc_fn", "n nD", "fp32", released="hc_head_fn"),
    Row("hc_head.base", "hc_head.hc_base", "n", "fp32", released="hc_head_base"),
    Row("hc_head.scale", "hc_head.hc_scale", "one", "fp32", released="hc_head_scale"),
)

# transformers' own save_pretrained writes released names under a prefix, with two exceptions. Read, never written.
_TRANSFORMERS = (
    (r"^(mtp\..*|head\.weight)$", r"\1"),
    (r"^embed\.", "model.embed_tokens."),
    (r"^hc_head_", "model.hc_head.hc_"),
    (r"^", "model."),
)

# It also loses the kv_ of kv_norm, in its own names as in these, and puts it back when it reads.
MISSPELLED = (
    (r"^(model\.layers\.\d+\.attn\.)norm\.", r"\1kv_norm."),
    (r"^(model\.layers\.\d+\.self_attn\.(?:compressor\.(?:indexer\.)?)?)norm\.", r"\1kv_norm."),
)

# One key of each layout that no other layout has.
MARKS: dict[Layout, str] = {
    "dsv4c": r"layers\.\d+\.hc_attn\.fn",
    "released": r"layers\.\d+\.hc_attn_fn",
    "hf": r"model\.layers\.\d+\.attn_hc\.fn",
    "transformers": r"model\.layers\.\d+\.hc_attn_fn",
}


def named_layout(name: str, among: Iterable[Layout] = tuple(MARKS)) -> Layout:
    """The layout of this name, or a WeightsError that lists those there are."""
    for layout in among:
        if layout == name:
            return layout
    raise WeightsError(f"there is no layout {name!r}", where="layout", allowed=", ".join(among), do="choose one of these")


@dataclass(frozen=True)
class Part:
    """A piece of one of our tensors: expert ``e`` (or all of an unstacked tensor), half ``h`` of its ``rows`` (or
    all).
    """

    row: Row
    prefix: str  # "" | "layers.N." | "mtp.0."
    shape: tuple[int, ...]
    stacked: bool
    e: int
    h: int | None

    def place(self, layout: Layout) -> tuple[str, Select]:
        """The key that holds this part, and where in that key's tensor it lies."""
        cell = {"dsv4c": self.row.ours, "hf": self.row.hf}.get(layout, self.row.released or self.row.ours)
        names = cell.split()
        name = names[self.h or 0] if len(names) == 2 else names[0]
        select: Select = (self.e,) if self.stacked and "{e}" not in name else ()
        if self.h is not None and len(names) == 1:
            select += (slice(self.h * self.shape[0], (self.h + 1) * self.shape[0]),)
        key = self.prefix + name.replace("{e}", str(self.e))
        if layout == "hf" and self.prefix.startswith("layers."):
            key = "model." + key
        if layout == "transformers":
            pattern, new = next((p, n) for p, n in _TRANSFORMERS if re.search(p, key))
            key = re.sub(pattern, new, key, count=1)
        return key, select


@dataclass(frozen=True)
class Tensor:
    """One of our tensors, in order of the model; ``parts`` follow one another in its memory."""

    name: str
    shape: tuple[int, ...]
    storage: Storage
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Entry:
    """One key of a stored layout: its shape when it is not quantised, and the parts it consists of, in memory
    order.
    """

    key: str
    shape: tuple[int, ...]
    storage: Storage
    ours: str
    parts: tuple[Part, ...]


def tensors(config: ModelConfig) -> Iterator[Tensor]:
    """Every parameter and persistent buffer of a model of this config, with our names and shapes."""
    kinds = config.layer_kinds
    sizes = _sizes(config, kinds[0])
    for row in _TOP:
        yield _tensor(row, "", sizes)
    for i, kind in enumerate(kinds):
        sizes = _sizes(config, kind)
        holds = {"always", kind.attention, kind.router} | ({"compressed"} if kind.ratio else set())
        mtp = i - config.num_hidden_layers
        for row in _BLOCK if mtp < 0 else _BLOCK + _MTP:
            if row.when in holds:
                yield _tensor(row, f"layers.{i}." if mtp < 0 else f"mtp.{mtp}.", sizes)


def entries(config: ModelConfig, layout: Layout) -> Iterator[Entry]:
    """Every key that a file of this layout holds, without the scales of quantised tensors."""
    for tensor in tensors(config):
        run: list[Part] = []
        for part in tensor.parts:
            if run and run[0].place(layout)[0] != part.place(layout)[0]:
                yield _entry(tensor, run, layout)
                run = []
            run.append(part)
        yield _entry(tensor, run, layout)


def _tensor(row: Row, prefix: str, sizes: dict[str, int]) -> Tensor:
    shape = tuple(sizes[name] for name in row.shape.split())
    cells = (row.ours, row.released, row.hf)
    stacked = any("{e}" in cell for cell in cells)
    halved = any(len(cell.split()) == 2 for cell in cells)
    rows, *rest = shape[1:] if stacked else shape
    piece = (rows // 2 if halved else rows, *rest)
    parts = tuple(
        Part(row, prefix, piece, stacked, e, h)
        for e in range(shape[0] if stacked else 1)
        for h in ((0, 1) if halved else (None,))
    )
    return Tensor(prefix + row.ours, shape, row.storage, parts)


def _entry(tensor: Tensor, run: list[Part], layout: Layout) -> Entry:
    key, select = run[0].place(layout)
    shape = run[0].shape if len(run) == 1 and not select else tensor.shape
    return Entry(key, shape, tensor.storage, tensor.name, tuple(run))


def _sizes(c: ModelConfig, kind: LayerKind) -> dict[str, int]:
    """The letters of the specification, and the products that shapes are made of, for one kind of layer."""
    n, H, D, ci = c.hc_mult, c.num_attention_heads, c.hidden_size, c.index_head_dim
    width = c.head_dim * (2 if kind.attention == "csa" else 1)  # CSA windows overlap: two halves a channel
    return {
        "V": c.vocab_size, "D": D, "n": n, "nD": n * D, "mix": (2 + n) * n, "one": 1, "three": 3,
        "H": H, "c": c.head_dim, "Hc": H * c.head_dim, "q": c.q_lora_rank,
        "Gg": c.o_groups * c.o_lora_rank, "Hc/G": H * c.head_dim // c.o_groups,
        "m": kind.ratio, "wc": width, "Hi": c.index_n_heads, "ci": ci, "2ci": 2 * ci, "Hici": c.index_n_heads * ci,
        "E": c.n_routed_experts, "k": c.num_experts_per_tok,
        "I": c.moe_intermediate_size, "2I": 2 * c.moe_intermediate_size,
    }  # fmt: skip
