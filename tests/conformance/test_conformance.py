"""Checkpoints that AutoGPTQ and GPTQModel wrote, against the logits that their own code computed from them.

`make_fixtures.py` made the files; no peer is needed here. Oracles: the peer's logits in float32, and in float16 where
it computes in 16 bit; a float64 forward over the peer's own dequantization; one over numpy's.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eesd_lite.cache import Rows
from eesd_lite.engine import Engine
from tests.conformance.reference import float64_logits
from tests.conformance.tiny_sources import write_tokenizer

FIXTURES = Path(__file__).parent / "fixtures"
MANIFEST: dict[str, Any] = json.loads((FIXTURES / "manifest.json").read_text())
ENTRIES: list[dict[str, Any]] = MANIFEST["fixtures"]
FLOAT32 = 1e-5  # rounding of one float32 forward, here about 1e-6
FLOAT64 = 1e-7  # transformers passes RMSNorm and softmax through float32, and its versions differ in where
SIXTEEN_BIT = 6e-3  # float16 weights and activations at the worst position; 4e-3 is typical with logits this peaky


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The worst position's."""
    found, expected = found.double(), expected.double()
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


@torch.inference_mode()
def our_logits(folder: Path, ids: list[int]) -> Tensor:
    with Engine.from_pretrained(folder, dtype="float32", threads=1, context=len(ids), head="off") as engine:
        target, rows = engine.target, Rows.chain(0, len(ids))
        return target.logits(target.upper(target.embed(ids), rows))


@pytest.fixture
def model(tmp_path: Path, cache_home: Path) -> Any:
    """`model(entry)`: a copy of the fixture that the engine may open, its file of logits, and its token ids."""

    def get(entry: dict[str, Any]) -> tuple[Path, dict[str, Tensor], list[int]]:
        folder = Path(shutil.copytree(FIXTURES / entry["name"], tmp_path / entry["name"]))
        write_tokenizer(folder)
        known = load_file(FIXTURES / f"{entry['name']}.logits.safetensors")
        return folder, known, known["token_ids"].tolist()

    return get


def test_every_fixture_is_in_the_manifest_and_none_is_missing() -> None:
    counts = Counter(entry["tool"] for entry in ENTRIES)
    assert counts == {tool: facts["fixtures"] for tool, facts in MANIFEST["tools"].items()}
    assert min(counts.values()) >= 24
    assert {entry["name"] for entry in ENTRIES} == {path.name for path in FIXTURES.iterdir() if path.is_dir()}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["name"])
def test_our_float32_logits_are_those_of_the_peer(model: Any, entry: dict[str, Any]) -> None:
    folder, known, ids = model(entry)
    ours, exact = our_logits(folder, ids), known["reference"]
    whole_words = entry["tool"] == "gptqmodel" and not entry["sym"]
    in_numpy = float64_logits(folder, ids, version=entry["version"], whole_words=whole_words)
    errors = {kind: relative_error(ours, logits) for kind, logits in known.items() if kind != "token_ids"}
    errors["numpy"] = relative_error(in_numpy, exact)
    print(f"\n{entry['name']}:", ", ".join(f"{kind} {error:.1e}" for kind, error in sorted(errors.items())))
    assert errors["peer_float32"] <= FLOAT32
    assert errors["reference"] <= FLOAT32
    assert errors["numpy"] <= FLOAT64
    if "peer_float16" in known:  # as far from it as the float64 reference is: the difference is the peer's rounding
        rounding = relative_error(exact, known["peer_float16"])
        assert rounding <= SIXTEEN_BIT and errors["peer_float16"] <= rounding + FLOAT32


@pytest.mark.parametrize("tool", MANIFEST["tools"])
def test_the_comparison_notices_a_wrong_zero_point(model: Any, tool: str) -> None:
    """Negative control: the same file read as the other version is far off."""
    entry = next(entry for entry in ENTRIES if entry["tool"] == tool and not entry["sym"])
    folder, known, ids = model(entry)
    wrong = float64_logits(folder, ids, version=3 - entry["version"])
    assert relative_error(wrong, known["reference"]) > 0.1
