"""The only place that sets ``torch.compile`` options.

A model is compiled by regions: each block, the MTP layer and the head are compiled whole (``fullgraph=True``), and Dynamo
reuses a region's code for every other layer of the same kind, because parameters are inputs of the graph.  43 layers
compile in the time of their kinds.
"""

from __future__ import annotations

from typing import Any

import torch

from dsv4c.errors import ConfigError
from dsv4c.model.transformer import DeepseekV4, output_loss
from dsv4c.torch_compat import inductor_options, prepare_compiler

REFUSED = {"fullgraph": "regions are always compiled whole: a graph break would hide part of the model from every pass"}


def compile_model(model: DeepseekV4, *, regional: bool = True, **options: Any) -> DeepseekV4:
    """The same model, its regions compiled when they are first run.

    ``regional=False`` compiles the forward as one region: longer to compile, one graph for the whole model.  ``options`` go
    to ``torch.compile`` (mode, dynamic, backend, options).  Raises ConfigError for an option that would change what a
    region is.
    """
    for name, why in REFUSED.items():
        if name in options:
            raise ConfigError(
                f"{name} cannot be set", where="compile_model", allowed="mode, dynamic, backend, options",
                do=f"leave it out: {why}",
            )  # fmt: skip
    if model.is_compiled:
        raise ConfigError(
            "the model is compiled already", where="compile_model", allowed="one call per model",
            do="use the model as it is, or build another",
        )  # fmt: skip
    prepare_compiler()
    if options.get("backend", "inductor") == "inductor":
        options["options"] = inductor_options(options.get("options"), options.pop("mode", None))
    model.is_compiled = True
    if not regional:
        model.compile(fullgraph=True, **options)
        return model
    for layer in model.blocks:
        layer.compile(fullgraph=True, **options)
    model.output_loss = torch.compile(output_loss, fullgraph=True, **options)
    return model
