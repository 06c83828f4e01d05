"""Does a weight folder fit a model?  Everything that is wrong with it, at once, from the headers alone.

Asked before any tensor is read, by loading, by converting and by ``dsv4c weights check``. Then the two small tables
that decide routing are looked at: a bias or a table that is absent or nonsense would silently send tokens to other
experts (B14).
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsv4c.config import ModelConfig
from dsv4c.errors import WeightsError
from dsv4c.weights.keymap import Entry, Layout, entries, named_layout
from dsv4c.weights.quant import fp4_scale_shape, fp8_scale_shape
from dsv4c.weights.stream import EXACT_SCALES, FP4_CODES, FP8_CODES, Header, Source

_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
_INTEGER = frozenset({"I64", "I32"})
_SCALES = EXACT_SCALES | {"F32", "BF16"}
_SHOWN = 5


@dataclass
class CheckReport:
    """What :func:`check` found. ``problems``: kind -> one line for each key that is wrong."""

    folder: str
    layout: Layout
    tensors: int
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    wrong_dtype: list[str] = field(default_factory=list)
    bad_values: list[str] = field(default_factory=list)
    not_loaded: list[str] = field(default_factory=list)  # missing, and allowed to be: not a problem

    @property
    def problems(self) -> dict[str, list[str]]:
        return {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "misshapen": self.misshapen,
            "of a wrong dtype": self.wrong_dtype,
            "with impossible values": self.bad_values,
        }

    @property
    def ok(self) -> bool:
        return not any(self.problems.values())

    def summary(self) -> str:
        """One line for each kind of problem: how many, and the first few."""
        return "; ".join(
            f"{len(lines)} {kind} ({', '.join(lines[:_SHOWN])}{', ...' if len(lines) > _SHOWN else ''})"
            for kind, lines in self.problems.items()
            if lines
        )

    def raise_if_bad(self) -> None:
        if self.ok:
            return
        do = "compare with `dsv4c weights inspect`; is this the config of these weights?"
        if self.missing and all(key.startswith("mtp.") for key in self.missing):
            do = "weights without an MTP layer: allow_missing=('mtp.*',) keeps its initial values, without_mtp drops it"
        raise WeightsError(
            f"the weights do not fit the model: {self.summary()}",
            where=f"{self.folder} ({self.layout} layout, {self.tensors} tensors)",
            allowed="every key of the model, in its shape, and no other",
            do=do,
        )

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok} | dataclasses.asdict(self)


def check(
    folder: str | Path | Source,
    config: ModelConfig,
    *,
    layout: str | None = None,
    allow_missing: Iterable[str] = (),
    allow_unexpected: Iterable[str] = (),
) -> CheckReport:
    """Compare every key, shape and stored dtype of a folder with what a model of ``config`` needs.

    ``allow_missing`` and ``allow_unexpected`` are glob patterns over the keys of the layout. A router's bias or expert
    table may only be missing together with its router: a model that keeps its initial bias would route elsewhere
    (B14). Raises :class:`dsv4c.errors.WeightsError` only for a folder that cannot be read at all.
    """
    source = folder if isinstance(folder, Source) else Source(folder)
    stored = source.layout() if layout is None else named_layout(layout)
    report = CheckReport(str(source.path), stored, len(source.headers))
    may_miss, may_extra = tuple(allow_missing), tuple(allow_unexpected)
    used: set[str] = set()
    tables: list[Entry] = []
    for entry in entries(config, stored):
        header = source.headers.get(entry.key)
        if header is None:
            routes = entry.ours.endswith(("gate.bias", "gate.tid2eid")) and _router_of(entry, source)
            allowed = _matches(entry.key, may_miss) and not routes
            (report.not_loaded if allowed else report.missing).append(entry.key)
            continue
        scale = source.scale_key(entry.key)
        used |= {entry.key} | ({scale} if scale and header.dtype in FP8_CODES | FP4_CODES else set())
        fits = _fits(entry, header, scale, source, report)
        if fits and entry.ours.endswith(("gate.bias", "gate.tid2eid")):
            tables.append(entry)
    report.unexpected = sorted(key for key in source.headers if key not in used and not _matches(key, may_extra))
    if report.ok:
        report.bad_values = [line for entry in tables for line in _bad_values(entry, source, config)]
    return report


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _router_of(entry: Entry, source: Source) -> bool:
    return entry.key.rsplit(".", 1)[0] + ".weight" in source


def _fits(entry: Entry, header: Header, scale: str | None, source: Source, report: CheckReport) -> bool:
    """Whether a stored tensor can become what the entry says; what is wrong goes into the report."""
    before = len(report.misshapen) + len(report.wrong_dtype)
    quantised = entry.storage in ("fp8", "fp4")
    shape, scale_shape = entry.shape, None
    if entry.storage == "int64":
        _expect_dtype(entry.key, header, _INTEGER, report)
    elif quantised and header.dtype in FP8_CODES:
        scale_shape = fp8_scale_shape(shape)
    elif quantised and header.dtype in FP4_CODES and shape[-1] % 2 == 0:
        shape, scale_shape = (*shape[:-1], shape[-1] // 2), fp4_scale_shape(shape)
    else:
        _expect_dtype(entry.key, header, _PLAIN, report)
    _expect_shape(entry.key, header, shape, report)
    if scale_shape is not None:
        if scale is None:
            wanted = entry.key.removesuffix(".weight") + ".scale"
            report.wrong_dtype.append(f"{entry.key} is {header.dtype} without {wanted}")
        else:
            _expect_dtype(scale, source.headers[scale], _SCALES, report)
            _expect_shape(scale, source.headers[scale], scale_shape, report)
    return before == len(report.misshapen) + len(report.wrong_dtype)


def _expect_dtype(key: str, header: Header, allowed: frozenset[str], report: CheckReport) -> None:
    if header.dtype not in allowed:
        report.wrong_dtype.append(f"{key} is {header.dtype}, not {' or '.join(sorted(allowed))}")


def _expect_shape(key: str, header: Header, shape: tuple[int, ...], report: CheckReport) -> None:
    if header.shape != shape:
        report.misshapen.append(f"{key} is {list(header.shape)}, not {list(shape)}")


def _bad_values(entry: Entry, source: Source, config: ModelConfig) -> Iterator[str]:
    table = source.read(entry.key)
    if entry.storage != "int64":
        bad = torch.nonzero(~torch.isfinite(table.float())).flatten()
        if bad.numel():
            yield f"{entry.key}[{int(bad[0])}] is {float(table[int(bad[0])])}"
        return
    outside = torch.nonzero((table < 0) | (table >= config.n_routed_experts))
    if outside.numel():
        row, column = outside[0].tolist()
        yield f"{entry.key}[{row}, {column}] is expert {int(table[row, column])} of {config.n_routed_experts}"
        return
    ordered = table.sort(dim=-1).values
    twice = torch.nonzero((ordered[:, 1:] == ordered[:, :-1]).any(dim=-1)).flatten()
    if twice.numel():
        row = int(twice[0])
        yield f"{entry.key}[{row}] sends a token to one expert twice: {table[row].tolist()}"
