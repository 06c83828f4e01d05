"""A small model with random values everywhere, so that no tensor can stand in for another."""

from __future__ import annotations

import pytest
import torch

from dsv4c.config import ModelConfig
from dsv4c.model.transformer import DeepseekV4


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return ModelConfig.preset("tiny")


@pytest.fixture(scope="session")
def model(config: ModelConfig) -> DeepseekV4:
    torch.manual_seed(0)
    model = DeepseekV4(config)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn_like(tensor))
    return model
