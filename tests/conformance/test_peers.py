"""The other direction: folders from `eesd quantize` load in AutoGPTQ and GPTQModel and give our logits.

Not in CI. EESD_AUTOGPTQ_PYTHON and EESD_GPTQMODEL_PYTHON name the interpreters of the peers' environments (how to build
them, and what was found: docs/conformance.md). Each peer runs once, over all folders.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from eesd_lite.quantize import quantize_folder
from tests.conformance.test_conformance import FLOAT32, SIXTEEN_BIT, our_logits, relative_error
from tests.conformance.tiny_sources import Size, calibration_ids, probe_ids, write_source

HERE = Path(__file__).parent
PEERS = {"autogptq": "EESD_AUTOGPTQ_PYTHON", "gptqmodel": "EESD_GPTQMODEL_PYTHON"}
FOLDERS: dict[str, dict[str, Any]] = {
    f"{family}-{'tied' if tied else 'untied'}-g{group}-{'sym' if sym else 'asym'}{'-act' if act else ''}": {
        "family": family, "tied": tied, "group_size": group, "sym": sym, "desc_act": act,
    }
    for family, tied, group, sym, act in (
        ("llama", False, 32, True, False),
        ("llama", False, 32, True, True),
        ("llama", False, 32, False, True),
        ("llama", False, 128, True, False),
        ("llama", False, 128, False, True),
        ("llama", False, -1, True, True),
        ("llama", False, -1, False, False),
        ("llama", True, 32, True, False),
        ("llama", True, 32, False, True),
        ("llama", True, -1, True, False),
        ("mistral", False, 32, True, True),
    )
}  # fmt: skip

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[int]]]:
    """Every folder, quantized by us."""
    base, made = tmp_path_factory.mktemp("ours"), {}
    for seed, (name, how) in enumerate(FOLDERS.items()):
        source = write_source(
            base / f"{name}-16bit", how["family"], seed, size=Size.for_group(how["group_size"]), tied=how["tied"]
        )
        quantize_folder(
            source, base / name, group_size=how["group_size"], sym=how["sym"], desc_act=how["desc_act"],
            calibration=calibration_ids(seed),
        )  # fmt: skip
        made[name] = (base / name, probe_ids(seed))
    return made


@pytest.fixture(scope="module", params=PEERS)
def peer(
    request: pytest.FixtureRequest, folders: dict[str, tuple[Path, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any], Path]:
    """(tool, its report, where its logits are): one run over all folders."""
    tool = request.param
    python = os.environ.get(PEERS[tool])
    if not python:
        pytest.skip(f"{PEERS[tool]} names no interpreter")
    base = tmp_path_factory.mktemp(tool)
    jobs = [
        {"name": name, "folder": str(folder), "token_ids": ids, "logits": str(base / f"{name}.safetensors")}
        for name, (folder, ids) in folders.items()
    ]
    (base / "jobs.json").write_text(json.dumps(jobs))
    script = HERE / f"peer_{tool}.py"
    subprocess.run([python, script, "logits", base / "jobs.json", base / "report.json"], check=True)
    return tool, json.loads((base / "report.json").read_text()), base


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_ours_gives_the_same_logits_in_the_peer(
    name: str, peer: tuple[str, dict[str, Any], Path], folders: dict[str, tuple[Path, list[int]]], cache_home: Path
) -> None:
    tool, report, base = peer
    result = report["results"][name]
    assert "error" not in result, result
    folder, ids = folders[name]
    ours, theirs = our_logits(folder, ids), load_file(base / f"{name}.safetensors")
    errors = {kind: relative_error(ours, logits) for kind, logits in theirs.items()}
    print(f"\n{tool} {name}:", ", ".join(f"{kind} {error:.1e}" for kind, error in sorted(errors.items())))
    assert errors["peer_float32"] <= FLOAT32
    assert errors.get("peer_float16", 0.0) <= SIXTEEN_BIT
