"""The model computes what transformers' deepseek_v4 computes, with the same weights, forward and backward, in fp32.

Weights go through the project's key map, in both directions, and once through files that the other side wrote. ``pytest -s``
prints the largest differences.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4c import DeepseekV4, ModelConfig
from dsv4c.config_layouts import write_hf
from dsv4c.weights.keymap import entries, tensors
from tests.parity.models import Batch, distance, gradient_error, randomize, tiny, tokens

transformers = pytest.importorskip("transformers")
HF = transformers.DeepseekV4ForCausalLM

LOGITS, GRADIENT = 2e-5, 1e-4
LENGTHS = (3, 4, 7, 8, 9, 31, 32, 33, 40)
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "a hash router on a CSA layer": {"num_hash_layers": 3},
    "top-k of every entry": {"index_topk": 16},
    "a clamp of 0.5": {"swiglu_limit": 0.5},
}


def to_hf(config: ModelConfig, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under our names as tensors under Hugging Face's; the MTP layer has no place there."""
    result = {}
    for entry in entries(config, "hf"):
        if not entry.key.startswith("mtp."):
            parts = [ours[entry.ours][part.place("dsv4c")[1]].flatten() for part in entry.parts]
            result[entry.key] = torch.cat(parts).reshape(entry.shape)
    return result


def from_hf(config: ModelConfig, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The other way round."""
    result = {}
    for tensor in tensors(config):
        if not tensor.name.startswith("mtp."):
            places = [part.place("hf") for part in tensor.parts]
            result[tensor.name] = torch.cat([theirs[k][s].flatten() for k, s in places]).reshape(tensor.shape)
    return result


def hf_model(config: ModelConfig) -> Any:
    settings = transformers.DeepseekV4Config(**write_hf(config), attn_implementation="eager")
    return HF(settings).float().eval()


def pair_from_ours(seed: int = 0, **changes: Any) -> tuple[DeepseekV4, Any]:
    """Our model at random, and theirs with its weights."""
    ours = tiny(seed, indexer_kl_coef=0.0, **changes)
    theirs = hf_model(ours.config)
    theirs.load_state_dict(to_hf(ours.config, ours.state_dict()), strict=True)
    return ours, theirs


def pair_from_theirs(seed: int = 1, **changes: Any) -> tuple[DeepseekV4, Any]:
    """Their model at random, and ours with its weights."""
    ours = tiny(seed + 7, indexer_kl_coef=0.0, **changes)
    theirs = hf_model(ours.config)
    randomize(theirs, seed)
    state = ours.state_dict() | from_hf(ours.config, theirs.state_dict())
    ours.load_state_dict(state, strict=True)
    return ours, theirs


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """By name; zeros for what the loss does not reach."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, [p.requires_grad_() for p in parameters], allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)}


@dataclass(frozen=True)
class Difference:
    """The largest differences: of ``logits``; of LM gradients, ``judged`` by :func:`gradient_error`; and of LM gradients
    without that function's allowance for scales, ``worst``, and where that is.
    """

    logits: float
    judged: float
    worst: float
    name: str


def compare(ours: DeepseekV4, theirs: Any, batch: Batch) -> Difference:
    for p in ours.parameters():
        p.requires_grad_()  # the indexer too: it must stay unreached, not only frozen
    logits, expected = ours(batch.input_ids).logits, theirs(batch.input_ids).logits
    assert logits.dtype == torch.float32
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), batch.targets.flatten())
    wanted = gradients(theirs, loss)
    buffers = {name: torch.zeros_like(b) for name, b in ours.named_buffers()}
    found = to_hf(ours.config, gradients(ours, ours(*batch).losses["lm"]) | buffers)
    assert wanted.keys() <= found.keys()
    judged, worst = [], []
    for name, gradient in wanted.items():
        assert bool(gradient.any()) == bool(found[name].any()), f"{name}: only one of the two is reached"
        if gradient.any():
            worst.append((distance(found[name], gradient), name))
            judged.append(gradient_error(found, wanted, name))
    return Difference(float((logits - expected).abs().max().detach()), max(judged), *max(worst))


@pytest.fixture(scope="module")
def record() -> Iterator[dict[str, Difference]]:
    """Collects what was measured and prints it at the end."""
    measured: dict[str, Difference] = {}
    yield measured
    print(f"\n{'':50} {'logits':>8} {'judged':>8} {'worst':>8}")
    for what, d in measured.items():
        print(f"{what:50} {d.logits:8.1e} {d.judged:8.1e} {d.worst:8.1e} {d.name}")
    largest = {field: max(getattr(d, field) for d in measured.values()) for field in ("logits", "judged", "worst")}
    print(f"{'largest':50} {largest['logits']:8.1e} {largest['judged']:8.1e} {largest['worst']:8.1e}")


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[DeepseekV4, Any]]:
    made = {f"ours to theirs, {name}": pair_from_ours(**changes) for name, changes in VARIANTS.items()}
    return made | {f"theirs to ours, {name}": pair_from_theirs(**changes) for name, changes in VARIANTS.items()}


@pytest.mark.parametrize("n_tokens", LENGTHS)
@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("way", ["ours to theirs", "theirs to ours"])
def test_logits_and_every_gradient_are_those_of_transformers(pairs, record, way, variant, n_tokens):
    found = record[f"{way}, {variant}, S={n_tokens}"] = compare(
        *pairs[f"{way}, {variant}"], tokens(n_tokens, seed=n_tokens + 700)
    )
    assert found.logits <= LOGITS
    assert found.judged <= GRADIENT


def test_transformers_reads_what_we_write(tmp_path: Path, record):
    ours = tiny(3, indexer_kl_coef=0.0)
    ours.save_pretrained(tmp_path, layout="hf")
    theirs = HF.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    found = record["file written by us, S=33"] = compare(ours, theirs, tokens(33))
    assert found.logits <= LOGITS and found.judged <= GRADIENT


def test_we_read_what_transformers_writes(tmp_path: Path, record):
    config = tiny(indexer_kl_coef=0.0, num_nextn_predict_layers=0, compress_ratios=(0, 0, 4, 8, 4)).config
    theirs = hf_model(config)
    randomize(theirs, 5)
    theirs.save_pretrained(tmp_path)
    assert "deepseek_v4" in json.loads((tmp_path / "config.json").read_text())["model_type"]
    ours = DeepseekV4.from_pretrained(tmp_path)
    found = record["file written by transformers, S=33"] = compare(ours, theirs, tokens(33))
    assert found.logits <= LOGITS and found.judged <= GRADIENT


def test_the_key_map_there_and_back_is_the_identity():
    model = tiny()
    state = {name: t for name, t in model.state_dict().items() if not name.startswith("mtp.")}
    back = from_hf(model.config, to_hf(model.config, state))
    assert back.keys() == state.keys() and all(torch.equal(back[name], t) for name, t in state.items())


@pytest.mark.parametrize(
    "name", ["layers.2.attn.compressor.ape", "layers.0.hc_ffn.base", "layers.3.attn.attn_sink", "layers.4.ffn.gate.weight"]
)
def test_the_comparison_sees_a_change_of_one_percent_in_one_tensor(name):
    ours, theirs = pair_from_ours()
    with torch.no_grad():
        ours.get_parameter(name).mul_(1.01)
    found = compare(ours, theirs, tokens(33))
    assert found.logits > LOGITS and found.judged > GRADIENT
