"""Compiles one Triton kernel for a named AMD GPU, which need not be there, and reads the resources from its assembly.

Everything here is static: registers, local memory, occupancy and instruction counts by class, and, for a kernel with loops
whose trip counts the caller knows, the number of instructions that its waves issue (performance.md, section 4.3).
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsv4c.errors import LowerError


@dataclass(frozen=True)
class Target:
    """What of a GPU limits a kernel: local memory in bytes per workgroup and per compute unit, lanes, waves per SIMD."""

    arch: str
    lds: int
    wave: int = 64
    waves_per_simd: int = 8
    simds: int = 4
    max_warps: int = 16


TARGETS = {t.arch: t for t in (Target("gfx942", 65536), Target("gfx950", 163840))}

# The first pattern that a mnemonic matches names its class; what none matches (s_endpgm aside) is counted as "other".
CLASSES: tuple[tuple[str, str], ...] = (
    ("mfma", r"v_(mfma|smfmac)_"),
    ("valu", r"v_"),
    ("barrier", r"s_barrier"),
    ("waitcnt", r"s_waitcnt"),
    ("smem", r"s_(load|buffer_load|store|dcache|scratch)_"),
    ("salu", r"s_"),
    ("atomic", r"(global|buffer|flat)_atomic"),
    ("global_load_x4", r"(global|buffer|flat)_load_(lds_)?dwordx4"),
    ("global_load_x2", r"(global|buffer|flat)_load_(lds_)?dwordx[23]"),
    ("global_load_x1", r"(global|buffer|flat)_load_(lds_)?dword$"),
    ("global_load_narrow", r"(global|buffer|flat)_load_"),
    ("global_store_x4", r"(global|buffer|flat)_store_dwordx4"),
    ("global_store_x2", r"(global|buffer|flat)_store_dwordx[23]"),
    ("global_store_x1", r"(global|buffer|flat)_store_dword$"),
    ("global_store_narrow", r"(global|buffer|flat)_store_"),
    ("ds", r"ds_"),
    ("scratch", r"scratch_"),
)


@dataclass(frozen=True)
class Loop:
    """A loop of the assembly: its label, the label of the loop around it ("" for none), and its own instructions by class.

    Instructions of an inner loop are the inner loop's alone.
    """

    label: str
    parent: str
    instructions: dict[str, int]


@dataclass(frozen=True)
class Compiled:
    """A kernel as compiled for one target.

    ``lds`` and ``scratch`` in bytes (scratch per lane), registers per lane, ``occupancy`` in waves per SIMD as registers and
    local memory allow.  ``instructions`` counts the whole text once; ``loops`` stand in the order of the text;
    ``sha`` is of the assembly without its debug information, so that it does not depend on where the source lies.
    """

    name: str
    target: str
    num_warps: int
    vgpr: int
    agpr: int
    sgpr: int
    vgpr_spill: int
    sgpr_spill: int
    scratch: int
    lds: int
    occupancy: int
    instructions: dict[str, int]
    loops: tuple[Loop, ...]
    asm: str
    sha: str


def compile_for(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    target: str,
    num_warps: int = 4,
    num_stages: int = 2,
    divisible: Iterable[str] = (),
    fresh: bool = False,
) -> Compiled:
    """``kernel`` compiled for ``target``, with the argument facts that a launch would find.

    ``signature``: Triton's type of every argument that is not a constexpr, e.g. ``{"q": "*bf16", "n": "i32"}``.  Every
    pointer is taken to be aligned to 16 bytes and its tensor to be smaller than 2 GB, as a launch finds for torch's
    allocations at these sizes; ``divisible`` names the integers that are multiples of 16.  ``fresh``: past the cache.
    """
    gpu = TARGETS.get(target.partition(":")[0])  # "gfx942:sramecc+:xnack-": what follows the name changes no limit
    if gpu is None:
        raise LowerError(f"no facts about target {target!r}", allowed=", ".join(TARGETS), do="add it to TARGETS")
    if num_warps > gpu.max_warps:
        raise LowerError(
            f"{num_warps} waves of {gpu.wave} lanes are more than a workgroup holds",
            where=kernel.__name__,
            allowed=f"at most {gpu.max_warps}",
        )
    types = dict(signature) | dict.fromkeys(constexprs, "constexpr")
    missing = [n for n in kernel.arg_names if n not in types] + [n for n in types if n not in kernel.arg_names]
    if missing:
        raise LowerError(f"signature and kernel disagree on {', '.join(missing)}", where=kernel.__name__)
    aligned = {
        (kernel.arg_names.index(n),): [["tt.divisibility", 16]] + [["tt.pointer_range", 32]] * kind.startswith("*")
        for n, kind in types.items()
        if kind.startswith("*") or n in divisible
    }
    source = ASTSource(kernel, {n: types[n] for n in kernel.arg_names}, dict(constexprs), aligned)
    before, triton.knobs.compilation.always_compile = triton.knobs.compilation.always_compile, fresh
    try:
        binary = triton.compile(
            source,
            target=GPUTarget("hip", gpu.arch, gpu.wave),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
    finally:
        triton.knobs.compilation.always_compile = before
    return _read(kernel.__name__, gpu, num_warps, binary.metadata.shared, binary.asm["amdgcn"])


def _read(name: str, gpu: Target, num_warps: int, lds: int, asm: str) -> Compiled:
    def fact(key: str) -> int:
        found = re.search(rf"{key}:?\s+(\d+)", asm)
        assert found is not None, key
        return int(found.group(1))

    code = _code(asm)
    loops, total = _loops(code)
    groups = gpu.lds // lds if lds else gpu.simds * gpu.waves_per_simd
    return Compiled(
        name=name,
        target=gpu.arch,
        num_warps=num_warps,
        vgpr=fact(r"\.vgpr_count"),
        agpr=fact(r"\.agpr_count"),
        sgpr=fact(r"\.sgpr_count"),
        vgpr_spill=fact(r"\.vgpr_spill_count"),
        sgpr_spill=fact(r"\.sgpr_spill_count"),
        scratch=fact(r"\.private_segment_fixed_size"),
        lds=lds,
        occupancy=min(fact(r"; Occupancy"), max(1, groups * num_warps // gpu.simds)),
        instructions=total,
        loops=loops,
        asm=asm,
        sha=hashlib.sha256("\n".join(code).encode()).hexdigest(),
    )


def _code(asm: str) -> list[str]:
    """The lines of the kernel itself, without debug information (which holds the path of the source)."""
    lines = asm.partition("s_endpgm")[0].splitlines()
    rest = asm.partition("s_endpgm")[2].partition(".section")[0].splitlines()  # blocks placed after the first exit
    return [x for x in [*lines, *rest] if not re.match(r"\s*(\.(loc|file|cfi|p2align)\b|\.L(tmp|func))", x)]


def _class(mnemonic: str) -> str:
    return next((name for name, pattern in CLASSES if re.match(pattern, mnemonic)), "other")


def _loops(code: Sequence[str]) -> tuple[tuple[Loop, ...], dict[str, int]]:
    """Loops and the count of everything, from the comments that LLVM leaves at the head of a block."""
    label, around = "", ""
    parents: dict[str, str] = {}
    counts: dict[str, Counter[str]] = {"": Counter()}
    for line in code:
        if start := re.match(r"(?:\.L(BB\w+)|; %bb\.\d+):", line):
            label, around = start.group(1) or "", ""
        if inside := re.search(r"in Loop: Header=(BB\w+)", line):
            around = inside.group(1)
        elif outer := re.search(r"Parent Loop (BB\w+)", line):
            parents[label] = outer.group(1)  # written from the outermost inwards: the last one is the nearest
        elif re.search(r"=>\s*This (Inner )?Loop Header", line):
            around = label
            parents.setdefault(label, "")
        elif op := re.match(r"\t([a-z]\w+)", line):
            counts.setdefault(around, Counter())[_class(_base(op.group(1)))] += 1
    loops = tuple(Loop(name, parent, dict(counts.get(name, {}))) for name, parent in parents.items())
    return loops, dict(sum(counts.values(), Counter()))


def _base(mnemonic: str) -> str:
    """Without the suffix of the encoding."""
    return re.sub(r"_(e32|e64|dpp|sdwa)$", "", mnemonic)


def wave_instructions(compiled: Compiled, programs: int, trip_counts: Sequence[float] | Mapping[str, float] = ()) -> int:
    """Instructions that all waves of a launch issue.

    ``trip_counts``: of every loop in the order of ``compiled.loops`` or by label, the mean number of runs of its body for
    one entry into it.  Straight-line code, and branches not taken, count once.
    """
    if not isinstance(trip_counts, Mapping):
        if len(trip_counts) != len(compiled.loops):
            raise ValueError(f"{compiled.name} has {len(compiled.loops)} loops, {len(trip_counts)} trip counts given")
        trip_counts = {loop.label: n for loop, n in zip(compiled.loops, trip_counts, strict=True)}
    runs = {"": 1.0}
    for loop in compiled.loops:
        runs[loop.label] = runs[loop.parent] * trip_counts[loop.label]
    looped = sum(sum(loop.instructions.values()) for loop in compiled.loops)
    per_wave = sum(compiled.instructions.values()) - looped
    total = per_wave + sum(runs[loop.label] * sum(loop.instructions.values()) for loop in compiled.loops)
    return round(total * compiled.num_warps * programs)


COLUMNS = ("mfma", "valu", "salu", "ds", "barrier", "waitcnt")


def report(rows: Iterable[Compiled], file: TextIO | None = None) -> None:
    """Prints a table of registers, local memory, occupancy and instruction counts, one row a kernel and target."""
    table = Table(title="Triton kernels as compiled", title_justify="left")
    heads = ("kernel", "target", "warps", "vgpr (agpr)", "sgpr", "spill v/s", "scratch", "LDS KB", "occ", "total", *COLUMNS)
    for head in (*heads, "load x4/x2/x1/narrow", "store x4/x2/x1/narrow"):
        table.add_column(head, justify="left" if head in ("kernel", "target") else "right", no_wrap=head == "kernel")
    for c in rows:
        wide = ["/".join(str(c.instructions.get(f"global_{way}_{w}", 0)) for w in ("x4", "x2", "x1", "narrow"))
                for way in ("load", "store")]  # fmt: skip
        table.add_row(
            c.name, c.target, str(c.num_warps), f"{c.vgpr} ({c.agpr})", str(c.sgpr), f"{c.vgpr_spill}/{c.sgpr_spill}",
            str(c.scratch), f"{c.lds / 1024:.1f}", str(c.occupancy), str(sum(c.instructions.values())),
            *(str(c.instructions.get(x, 0)) for x in COLUMNS), *wide,
        )  # fmt: skip
    Console(width=220, file=file or sys.stdout).print(table)
