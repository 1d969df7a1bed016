"""Runs inside GPTQModel's own environment (7.7.0): its code quantizes, saves, loads and computes.

    python peer_gptqmodel.py make JOBS.json REPORT.json       checkpoints, its logits, and a float64 reference
    python peer_gptqmodel.py logits JOBS.json REPORT.json       its logits for folders that others wrote

Its worker pool wants two CPU workers, which a machine with two cores does not get by default: GPTQMODEL_CPU_WORKERS.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling costs minutes and changes nothing that is compared

import gptqmodel
import torch
import transformers
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM


def make(job: dict[str, Any]) -> dict[str, Any]:
    """One checkpoint with GPTQModel's quantizer and writer, then its logits."""
    source, out = Path(job["source"]), Path(job["out"])
    config = QuantizeConfig(
        bits=job["bits"],
        group_size=job["group_size"],
        desc_act=job["desc_act"],
        static_groups=job["static_groups"],
        sym=job["sym"],
        format="gptq" if job["version"] == 1 else "gptq_v2",
        offload_to_disk=False,
        **{"act_group_aware": False, **job["extra"].get("settings", {})},
    )
    model = GPTQModel.load(str(source), config, device="cpu", dtype=torch.float16)
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in job["calibration"]]
    model.quantize(rows, batch_size=4, backend=BACKEND.TORCH)
    model.save(str(out), max_shard_size=job["extra"].get("max_shard_size", "4GB"))
    loaded = load(out)
    tensors = {"token_ids": torch.tensor(job["token_ids"]), "peer_float16": logits(loaded, job["token_ids"])}
    record = {"compute_dtype": describe(loaded), "kernel": kernel(loaded)}
    loaded.model.float()
    tensors["peer_float32"] = logits(loaded, job["token_ids"])
    tensors["reference"] = reference_logits(source, loaded, job["token_ids"])
    save_file(tensors, job["logits"])
    return record


def load(folder: Path) -> Any:
    """GPTQModel's loader, its plain torch product; that kernel refuses to load in float32."""
    return GPTQModel.load(str(folder), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)


def quantized_layers(loaded: Any) -> dict[str, torch.nn.Module]:
    return {name: module for name, module in loaded.model.named_modules() if hasattr(module, "qweight")}


def describe(loaded: Any) -> str:
    layer = next(iter(quantized_layers(loaded).values()))
    weights, embedding = layer.scales.dtype, loaded.model.get_input_embeddings().weight.dtype
    return f"activations {embedding}, scales {weights}".replace("torch.", "")


def kernel(loaded: Any) -> str:
    layer = next(iter(quantized_layers(loaded).values()))
    return f"{type(layer).__module__}.{type(layer).__name__}"


@torch.inference_mode()
def logits(loaded: Any, ids: list[int]) -> torch.Tensor:
    return loaded.model(torch.tensor([ids])).logits[0].float().contiguous()


@torch.inference_mode()
def reference_logits(source: Path, loaded: Any, ids: list[int]) -> torch.Tensor:
    """float64: every matrix is GPTQModel's own dequantization, its scales widened first."""
    config = AutoConfig.from_pretrained(source)
    config._attn_implementation = "eager"
    exact = AutoModelForCausalLM.from_config(config).to(torch.float64).eval()
    weights = {name: value.double() for name, value in loaded.model.state_dict().items() if name in exact.state_dict()}
    for name, layer in quantized_layers(loaded).items():
        layer.scales = layer.scales.double()
        layer.clear_weight_cache()
        weights[f"{name}.weight"] = layer.dequantize_weight().t().double()
    exact.load_state_dict(weights)
    return exact(torch.tensor([ids])).logits[0].contiguous()


def compute(job: dict[str, Any]) -> dict[str, Any]:
    """Logits for a folder that somebody else wrote."""
    loaded = load(Path(job["folder"]))
    tensors, record = (
        {"peer_float16": logits(loaded, job["token_ids"])},
        {"compute_dtype": describe(loaded), "kernel": kernel(loaded)},
    )
    loaded.model.float()
    save_file({**tensors, "peer_float32": logits(loaded, job["token_ids"])}, job["logits"])
    return record


def main() -> None:
    work = {"make": make, "logits": compute}[sys.argv[1]]
    report: dict[str, Any] = {
        "versions": {
            "gptqmodel": gptqmodel.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "results": {},
    }
    for job in json.loads(Path(sys.argv[2]).read_text()):
        try:
            report["results"][job["name"]] = work(job)
        except Exception as error:  # one that the peer cannot do must not cost the others
            report["results"][job["name"]] = {"error": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        print(job["name"], report["results"][job["name"]], flush=True)
    Path(sys.argv[3]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
