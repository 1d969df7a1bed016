"""The other direction: folders from `eesd quantize` load in AutoGPTQ and GPTQModel and give our logits.

Not in CI. EESD_AUTOGPTQ_PYTHON and EESD_GPTQMODEL_PYTHON name the interpreters of the peers' environments (how to build
them, and what was found: docs/conformance.md). Each peer runs once, over all folders that it can load.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from eesd_lite.quantize import quantize_folder
from tests.conformance.test_conformance import FLOAT32, SIXTEEN_BIT, our_logits, relative_error
from tests.conformance.tiny_sources import Size, calibration_ids, probe_ids, write_source

HERE = Path(__file__).parent
PEERS = {"autogptq": "EESD_AUTOGPTQ_PYTHON", "gptqmodel": "EESD_GPTQMODEL_PYTHON"}


@dataclass(frozen=True)
class Ours:
    """One folder that we write."""

    group_size: int
    sym: bool
    desc_act: bool
    layout: str = "gptq"
    tied: bool = False
    family: str = "llama"
    bits: int = 4

    @property
    def name(self) -> str:
        words = [self.family, f"{self.bits}bit", f"g{self.group_size}", "sym" if self.sym else "asym", self.layout]
        return "-".join(words + ["act"] * self.desc_act + ["tied"] * self.tied)

    def suits(self, tool: str) -> bool:
        """AutoGPTQ knows version 1 only, and no Qwen3; GPTQModel trusts asymmetric version 1 only where it wrote it."""
        if tool == "autogptq":
            return self.layout == "gptq" and self.family != "qwen3"
        return self.sym or self.layout == "gptq_v2"


FOLDERS = [
    *(Ours(group, True, act) for group in (32, 128, -1) for act in (False, True)),
    *(Ours(group, False, act, layout) for group, act in ((32, True), (128, False), (-1, True)) for layout in
      ("gptq", "gptq_v2")),
    *(Ours(32, True, False, layout, tied=True) for layout in ("gptq", "auto")),
    Ours(32, False, True, "gptq", tied=True),
    Ours(-1, False, False, "gptq_v2", tied=True),
    *(Ours(32, True, True, family=family) for family in ("mistral", "qwen2", "qwen3")),
    Ours(32, True, False, tied=True, family="qwen2"),
    Ours(32, True, False, bits=8),
    Ours(32, False, True, "gptq_v2", bits=2),
]  # fmt: skip
PAIRS = [(tool, ours) for tool in PEERS for ours in FOLDERS if ours.suits(tool)]
REFUSED = Ours(32, False, True, "gptq")  # by GPTQModel: "sym=False model with format=gptq"

pytestmark = [pytest.mark.peers, pytest.mark.slow]


class Workshop:
    """Folders of ours, and what the peers said about them; everything happens once."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.reports: dict[str, dict[str, Any]] = {}

    def folder(self, ours: Ours) -> tuple[Path, list[int]]:
        folder, seed = self.base / ours.name, sum(ours.name.encode())
        if not folder.exists():
            source = write_source(
                self.base / f"{ours.name}-16bit", ours.family, seed,
                size=Size.for_group(ours.group_size), tied=ours.tied,
            )  # fmt: skip
            quantize_folder(
                source, folder, bits=ours.bits, group_size=ours.group_size, sym=ours.sym, desc_act=ours.desc_act,
                layout=ours.layout, calibration=calibration_ids(seed),
            )  # fmt: skip
        return folder, probe_ids(seed)

    def report(self, tool: str) -> dict[str, Any]:
        python = os.environ.get(PEERS[tool])
        if not python:
            pytest.skip(f"{PEERS[tool]} names no interpreter")
        if tool not in self.reports:
            wanted = [ours for ours in FOLDERS if ours.suits(tool)] + [REFUSED] * (tool == "gptqmodel")
            jobs = []
            for ours in wanted:
                folder, ids = self.folder(ours)
                logits = self.base / f"{ours.name}.{tool}.safetensors"
                jobs.append({"name": ours.name, "folder": str(folder), "token_ids": ids, "logits": str(logits)})
            work, told = self.base / f"{tool}.jobs.json", self.base / f"{tool}.report.json"
            work.write_text(json.dumps(jobs))
            subprocess.run([python, HERE / f"peer_{tool}.py", "logits", work, told], check=True)
            self.reports[tool] = json.loads(told.read_text())
        return self.reports[tool]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("ours"))


@pytest.mark.parametrize(("tool", "ours"), PAIRS, ids=lambda value: value if isinstance(value, str) else value.name)
def test_a_folder_of_ours_gives_the_same_logits_in_the_peer(
    tool: str, ours: Ours, workshop: Workshop, cache_home: Path
) -> None:
    result = workshop.report(tool)["results"][ours.name]
    assert "error" not in result, result
    folder, ids = workshop.folder(ours)
    mine, theirs = our_logits(folder, ids), load_file(workshop.base / f"{ours.name}.{tool}.safetensors")
    errors = {kind: relative_error(mine, logits) for kind, logits in theirs.items()}
    print(f"\n{tool} {ours.name}:", ", ".join(f"{kind} {error:.1e}" for kind, error in sorted(errors.items())))
    assert errors["peer_float32"] <= FLOAT32
    assert errors.get("peer_float16", 0.0) <= SIXTEEN_BIT


def test_gptqmodel_says_that_it_does_not_load_asymmetric_version_1(workshop: Workshop) -> None:
    assert "sym=False" in workshop.report("gptqmodel")["results"][REFUSED.name]["error"]
