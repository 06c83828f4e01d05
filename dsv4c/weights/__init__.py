"""Weight files: key maps between layouts, low-precision decoding, streaming.

``keymap`` says which tensor is which, ``quant`` decodes and encodes numbers, ``stream`` reads and ``shards`` writes
files; ``check`` compares a folder with a model, ``model_io`` loads and saves one, ``convert`` goes from folder to
folder.
"""

from __future__ import annotations

from dsv4c.weights.check import CheckReport, check
from dsv4c.weights.convert import convert
from dsv4c.weights.model_io import from_pretrained, load_weights, save_weights

__all__ = ["CheckReport", "check", "convert", "from_pretrained", "load_weights", "save_pretrained", "save_weights"]

save_pretrained = save_weights  # the name that the model's own method asks for
