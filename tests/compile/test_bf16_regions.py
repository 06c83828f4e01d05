"""Regions compiled in bf16 keep every rule in all the graphs that they go through."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from dsv4c import DeepseekV4, compile_model
from tests.passes.verify.mutation import CONFIGS


@pytest.mark.parametrize("by", ["parameters", "autocast"])
def test_a_region_in_bf16_is_proved_when_captured_when_fused_and_as_it_is_generated(by: str) -> None:
    torch._dynamo.reset()
    model = DeepseekV4(CONFIGS["csa"])
    model = compile_model(model.bfloat16() if by == "parameters" else model)
    ids = torch.arange(48).view(2, 24)
    with torch.autocast("cpu", torch.bfloat16) if by == "autocast" else nullcontext():
        losses = model(ids, ids).losses
    torch.stack(list(losses.values())).sum().backward()
    assert model.compiler is not None
    (layer,) = [region for region in model.compiler.regions if region.name == "csa-learned"]
    if layer.records:  # none where the cache had the region under the same identity
        checked = {record.name: record.matches for record in layer.records if record.kind == "verify"}
        assert set(checked) == {"verify", "verify-fused", "verify-generated"}
        assert checked["verify-fused"]["fp32-islands"] > 20 and checked["verify-fused"]["router-fp32"] == 2
