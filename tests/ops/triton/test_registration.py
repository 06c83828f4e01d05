"""The table of kernels: what the dispatcher calls on a GPU, and that Triton is imported no sooner."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from dsv4c.errors import ConfigError
from dsv4c.ops import reference
from dsv4c.ops import triton as kernels
from tests.ops.test_indexer_kl_target import arguments

ROOT = Path(__file__).parents[3]


def test_every_kernel_has_the_name_of_an_operator():
    for name, defined_in, module in kernels.KERNELS:
        assert hasattr(torch.ops.dsv4, name)
        assert hasattr(import_module(f"dsv4c.ops.{defined_in}"), name)
        assert callable(getattr(import_module(f"dsv4c.ops.triton.{module}"), name))


def test_operators_are_registered_without_triton():
    code = "import sys, dsv4c.ops; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.interpret
def test_on_a_gpu_the_kernel_is_called():
    def plain(*_):
        raise AssertionError("plain torch was called")

    kernel = kernels.device_kernel("indexer_kl_target", "indexer_kl_target", plain)
    args = arguments(k=1)
    assert torch.allclose(kernel(*args), reference.indexer_kl_target(*args))


def test_attention_in_fp64_is_refused_on_a_gpu():
    kernel = kernels.device_kernel("sparse_attention", "sparse_attention", lambda *_: "plain")
    with pytest.raises(ConfigError, match="dsv4::sparse_attention has no fp64 kernel for a GPU"):
        kernel(torch.ones(1, dtype=torch.float64))


def test_fp64_is_left_to_plain_torch():
    kernel = kernels.device_kernel("indexer_kl_target", "indexer_kl_target", lambda *_: "plain")
    assert kernel(*arguments(dtype=torch.float64)) == "plain"
