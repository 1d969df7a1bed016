"""Run the peers and keep what they wrote: checkpoints, the logits of their own code, and a float64 reference.

By hand, whenever a peer's version or the matrix changes (see docs/conformance.md for building the environments):

    python tests/conformance/make_fixtures.py --autogptq-python AGQ/bin/python --gptqmodel-python GQM/bin/python

Each peer runs with its own interpreter and gets one job file. Tests read the result and need no peer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.conformance import tiny_sources, variants
from tests.conformance.variants import Variant

HERE = Path(__file__).resolve().parent
FIXTURES = HERE / "fixtures"
KEPT = ("*.safetensors", "*.bin", "*.index.json", "config.json", "quantize_config.json")  # one tokenizer serves all


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--autogptq-python", type=Path, help="interpreter of the AutoGPTQ environment")
    parser.add_argument("--gptqmodel-python", type=Path, help="interpreter of the GPTQModel environment")
    parser.add_argument("--only", default="", help="make only variants whose name holds this text")
    args = parser.parse_args()
    manifest_file = FIXTURES / "manifest.json"
    manifest: dict[str, Any] = {"tools": {}, "fixtures": []}
    if manifest_file.exists():
        manifest = json.loads(manifest_file.read_text())
    for tool, python, wanted in (
        ("autogptq", args.autogptq_python, variants.autogptq()),
        ("gptqmodel", args.gptqmodel_python, variants.gptqmodel()),
    ):
        if python is None:
            continue
        chosen = {number: variant for number, variant in enumerate(wanted) if args.only in variant.name}
        report = run_peer(tool, python, chosen)
        keep(manifest, tool, list(chosen.values()), report)
    FIXTURES.mkdir(exist_ok=True)
    manifest["fixtures"].sort(key=lambda entry: entry["name"])
    for tool, facts in manifest["tools"].items():
        facts["fixtures"] = sum(entry["tool"] == tool for entry in manifest["fixtures"])
    manifest_file.write_text(json.dumps(manifest, indent=1) + "\n")
    for tool, facts in manifest["tools"].items():
        print(tool, facts["fixtures"], "fixtures")
    return 0


def run_peer(tool: str, python: Path, chosen: dict[int, Variant]) -> dict[str, Any]:
    """Let the peer make `chosen`, by their place in the matrix, which seeds them.

    Its report has the versions, and of each fixture what it computed in, or why there is none.
    """
    shutil.rmtree(scratch(tool), ignore_errors=True)
    jobs = []
    for number, variant in chosen.items():
        source = scratch(tool) / "sources" / variant.name
        seed = sum(variant.name.encode()) * 1000 + number
        size = tiny_sources.Size.for_group(variant.group_size)
        tiny_sources.write_source(
            source, variant.family, seed, size=size,
            tied="tied" in variant.extra, positive_row="positive_row" in variant.extra,
        )  # fmt: skip
        jobs.append(
            {
                **asdict(variant),
                "name": variant.name,
                "seed": seed,
                "source": str(source.relative_to(scratch(tool))),  # a peer writes this path into config.json
                "out": f"out/{variant.name}",
                "logits": f"out/{variant.name}.logits.safetensors",
                "calibration": tiny_sources.calibration_ids(seed),
                "token_ids": tiny_sources.probe_ids(seed),
            }
        )
    job_file, report_file = scratch(tool) / "jobs.json", scratch(tool) / "report.json"
    job_file.write_text(json.dumps(jobs))
    command = [str(python), str(HERE / f"peer_{tool}.py"), "make", job_file.name, report_file.name]
    subprocess.run(command, check=True, cwd=scratch(tool), env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    return json.loads(report_file.read_text())


def scratch(tool: str) -> Path:
    return Path(tempfile.gettempdir()) / f"eesd-conformance-{os.getuid()}" / tool


def keep(manifest: dict[str, Any], tool: str, chosen: list[Variant], report: dict[str, Any]) -> None:
    """Copy what was made into the fixtures and the manifest; name what was not made and why."""
    command = f"python tests/conformance/make_fixtures.py --{tool}-python PYTHON"
    manifest["tools"][tool] = {"versions": report["versions"], "command": command}
    names = {variant.name for variant in chosen}
    manifest["fixtures"] = [entry for entry in manifest["fixtures"] if entry["name"] not in names]
    for variant in chosen:
        record = report["results"][variant.name]
        folder = FIXTURES / variant.name
        shutil.rmtree(folder, ignore_errors=True)
        if "error" in record:
            print(f"not made: {variant.name}: {record['error']}", file=sys.stderr)
            continue
        folder.mkdir(parents=True)
        for pattern in KEPT:
            for path in sorted((scratch(tool) / "out" / variant.name).glob(pattern)):
                shutil.copyfile(path, folder / path.name)
        logits = f"{variant.name}.logits.safetensors"
        shutil.copyfile(scratch(tool) / "out" / logits, FIXTURES / logits)
        manifest["fixtures"].append({"name": variant.name, **asdict(variant), **record})


if __name__ == "__main__":
    sys.exit(main())
