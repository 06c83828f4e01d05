"""Triton kernels of the operators, for CUDA and ROCm devices (torch calls both "cuda").

A module of this package is imported when its kernel is first needed: importing the operators does not import Triton.
Importing them does make the kernels of the table what the dispatcher calls for tensors on such a device.  They agree with
the references under Triton's interpreter and compile for gfx942 and gfx950; no GPU has run them yet.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dsv4c.errors import ConfigError

# operator, which stands in dsv4c.ops.<second>, and the module here that holds its kernel under the operator's name
KERNELS = (
    ("sparse_attention", "sparse_attention", "sparse_attention"),
    ("sparse_attention_backward", "sparse_attention", "sparse_attention_backward"),
    ("sparse_attention_derotated", "sparse_attention_derotated", "sparse_attention"),
    ("sparse_attention_derotated_backward", "sparse_attention_derotated", "sparse_attention_backward"),
    ("indexer_topk", "indexer_topk", "indexer_topk"),
    ("indexer_topk_backward", "indexer_topk", "indexer_topk_backward"),
    ("indexer_select", "indexer_select", "indexer_topk"),
    ("indexer_select_backward", "indexer_select", "indexer_topk_backward"),
    ("indexer_kl_target", "indexer_kl_target", "indexer_kl_target"),
    ("indexer_kl", "indexer_kl", "indexer_kl"),
    ("indexer_distillation", "indexer_distillation", "indexer_kl_target"),
    ("rope", "rope", "rope"),
    ("hadamard", "hadamard", "hadamard"),
    ("compress", "compress", "compress"),
    ("compress_backward", "compress", "compress"),
    ("sinkhorn", "sinkhorn", "sinkhorn"),
    ("sinkhorn_backward", "sinkhorn", "sinkhorn"),
    ("hc_pre", "hyper_connection", "hc_pre"),
    ("hc_pre_backward", "hyper_connection", "hc_pre"),
    ("hc_post", "hyper_connection", "hc_post"),
    ("hc_post_backward", "hyper_connection", "hc_post"),
    ("hc_post_pre", "hc_post_pre", "hc_post_pre"),
    ("hc_post_pre_backward", "hc_post_pre", "hc_post_pre"),
    ("route", "route", "route"),
    ("route_backward", "route", "route"),
    ("swiglu_clamp", "swiglu_clamp", "swiglu_clamp"),
    ("swiglu_clamp_backward", "swiglu_clamp", "swiglu_clamp"),
)


def register() -> None:
    """Makes the dispatcher call these kernels for tensors on a GPU."""
    for name, defined_in, module in KERNELS:
        operator = getattr(import_module(f"dsv4c.ops.{defined_in}"), name)
        operator.register_kernel("cuda")(device_kernel(name, module, operator._init_fn))


def device_kernel(name: str, module: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The operator on a GPU: the Triton kernel, or plain torch for fp64, which the kernels do not compute in.

    Raises ConfigError for attention and indexer in fp64: what they do on a CPU is no plain torch.
    """

    def kernel(*args: Any) -> Any:
        if any(isinstance(a, Tensor) and a.dtype == torch.float64 for a in args):
            if name.startswith(("sparse_attention", "indexer_select")):
                raise ConfigError(
                    f"dsv4::{name} has no fp64 kernel for a GPU", where=str(args[0].device), allowed="fp32, bf16, fp16",
                    do="use fp32, or set DSV4_OPS=reference",
                )  # fmt: skip
            return plain(*args)
        return getattr(import_module(f"{__name__}.{module}"), name)(*args)

    return kernel
