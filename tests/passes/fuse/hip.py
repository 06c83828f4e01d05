"""Inductor's code generation for an AMD GPU that is not there (performance.md, section 4.1): kernels, launches and bytes.

A function is traced on fake CPU tensors, its graph moved to a fake GPU, and compiled with everything mocked that would ask
the driver; kernels are recorded instead of compiled.  Our operators are calls of their own there, so that their bytes are
those of their arguments and results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._inductor.async_compile
import torch._inductor.config
import torch._inductor.graph
import torch.utils._triton
from torch import Tensor
from torch._inductor import metrics
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from dsv4c.passes.fuse import Fusion, fuse

UNITS = {"gfx942": (304, 65536), "gfx950": (256, 163840)}


@dataclass(frozen=True)
class Generated:
    """What was generated: Triton kernels, calls of operators, bytes read and written, and the source."""

    kernels: int
    calls: tuple[str, ...]
    bytes: int
    source: str

    @property
    def launches(self) -> int:
        return self.kernels + len(self.calls)


def generated(
    function: Callable[..., Any], args: tuple[Any, ...], arch: str = "gfx942", fusion: Fusion | None = None
) -> Generated:
    """``function`` of these arguments; tensors among them give shapes and dtypes only (``torch.empty`` on meta will do).

    With a fusion, what is compiled is the graph that it leaves.
    """
    with FakeTensorMode() as mode:
        fakes = [
            torch.empty(a.shape, dtype=a.dtype, requires_grad=a.requires_grad) if isinstance(a, Tensor) else a for a in args
        ]
        tensors = [f for f in fakes if isinstance(f, Tensor)]

        def flat(*given: Tensor) -> Any:
            rest = iter(given)
            found = function(*(next(rest) if isinstance(f, Tensor) else f for f in fakes))
            return tuple(found) if isinstance(found, (tuple, list)) else (found,)

        graph = make_fx(flat, decomposition_table=select_decomp_table(), tracing_mode="real")(*tensors)
        if fusion is not None:
            fuse(fusion, graph)
    return _generated(graph, tensors, mode, arch)


def _generated(graph: GraphModule, tensors: list[Tensor], mode: FakeTensorMode, arch: str) -> Generated:
    sources: list[str] = []
    with _no_gpu_needed(arch), mode:
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
        graph.graph.eliminate_dead_code()
        graph.recompile()
        moved = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda:0") for t in tensors]
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*moved)
        metrics.reset()
        torch._logging.set_logs(inductor_metrics=True)
        with mock.patch.object(torch._inductor.graph.GraphLowering, "save_output_code", staticmethod(sources.append)):
            compile_fx_inner(graph, moved)
    source = sources[-1]
    body = source[source.index("def call(") :] if "def call(" in source else source
    calls = tuple(re.findall(r"(?:extern_kernels\.\w+|torch\.ops\.\w+\.\w+\.\w+)(?=\()", body))
    return Generated(metrics.generated_kernel_count, calls, metrics.num_bytes_accessed, source)


@contextmanager
def _no_gpu_needed(arch: str) -> Iterator[None]:
    units, lds = UNITS[arch]
    properties = SimpleNamespace(
        gcnArchName=arch, name=arch, warp_size=64, multi_processor_count=units, shared_memory_per_block=lds,
        shared_memory_per_multiprocessor=lds, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536 * 2,
        major=9, minor=4, total_memory=192 << 30, L2_cache_size=4 << 20, shared_memory_per_block_optin=lds,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": properties,
        "get_device_capability": (9, 4), "_lazy_init": None, "is_initialized": True, "synchronize": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None, "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }  # fmt: skip
    low = ("getDevice", "setDevice", "maybeExchangeDevice", "exchangeDevice", "getDeviceCount", "getCurrentRawStream")
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.async_compile import AsyncCompile
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    active = SimpleNamespace(
        get_current_target=lambda: GPUTarget("hip", arch, 64), get_current_device=lambda: 0,
        get_active_torch_device=lambda: 0, get_device_interface=lambda: torch.cuda, get_current_stream=lambda *_: 0,
        set_current_device=lambda *_: None,
    )  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.version, "hip", "7.0.0"))
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, mock.Mock(return_value=answer)))
        for interface in (CudaInterface, CudaInterface.Worker):  # holds torch's functions as they were on import
            for name, answer in answers.items():
                if name in interface.__dict__:
                    stack.enter_context(mock.patch.object(interface, name, staticmethod(mock.Mock(return_value=answer))))
        for name in low:
            stack.enter_context(mock.patch.object(torch._C, f"_cuda_{name}", mock.Mock(return_value=0), create=True))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getArchFlags", mock.Mock(return_value=arch), create=True))
        stack.enter_context(mock.patch.object(AsyncCompile, "triton", mock.Mock(return_value=mock.Mock())))
        stack.enter_context(torch._inductor.config.patch(force_disable_caches=True, compile_threads=1))
        before = driver.__dict__.get("_active")
        driver.set_active(active)
        _forget_what_there_is()
        try:
            yield
        finally:
            driver.__dict__["_active"] = before
            _forget_what_there_is()


def _forget_what_there_is() -> None:
    """torch remembers whether there is a Triton that works."""
    for function in vars(torch.utils._triton).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
