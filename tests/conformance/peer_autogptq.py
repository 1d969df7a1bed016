"""Runs inside AutoGPTQ's own environment (0.7.1, transformers 4.44.2): its code quantizes, saves, loads and computes.

    python peer_autogptq.py make JOBS.json REPORT.json       checkpoints, its logits, and a float64 reference
    python peer_autogptq.py logits JOBS.json REPORT.json       its logits for folders that others wrote

AutoGPTQ expects a GPU while quantizing; on the CPU two of its names have to be pointed elsewhere (see `on_the_cpu`).
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import auto_gptq
import torch
import transformers
from auto_gptq import BaseQuantizeConfig
from auto_gptq.modeling import _base
from auto_gptq.modeling.auto import GPTQ_CAUSAL_LM_MODEL_MAP
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM


def on_the_cpu() -> None:
    _base.CUDA_0 = torch.device("cpu")
    torch.cuda.synchronize = lambda *_, **__: None


def make(job: dict[str, Any]) -> dict[str, Any]:
    """One checkpoint with AutoGPTQ's quantizer and writer, then its logits."""
    source, out = Path(job["source"]), Path(job["out"])
    out.mkdir(parents=True)
    config = BaseQuantizeConfig(
        bits=job["bits"],
        group_size=job["group_size"],
        desc_act=job["desc_act"],
        static_groups=job["static_groups"],
        sym=job["sym"],
    )
    extra = job["extra"]
    dtype = getattr(torch, extra.get("source_dtype", "float16"))  # also what scales are stored in
    dense = AutoModelForCausalLM.from_pretrained(source, torch_dtype=dtype).eval()
    model = GPTQ_CAUSAL_LM_MODEL_MAP[job["family"]](dense, False, config)
    rows = [torch.tensor([row]) for row in job["calibration"]]
    model.quantize(
        [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows],
        batch_size=4,
        use_triton=False,
        cache_examples_on_gpu=False,
    )
    safe = extra.get("use_safetensors", True)
    model.save_quantized(str(out), use_safetensors=safe)
    loaded = load(out, job["family"], use_safetensors=safe)
    tensors = {"token_ids": torch.tensor(job["token_ids"]), "peer_float32": logits(loaded, job["token_ids"])}
    record = {"compute_dtype": describe(loaded), "kernel": kernel(loaded)}
    tensors["reference"] = reference_logits(source, loaded, job["token_ids"])
    save_file(tensors, job["logits"])
    return record


def load(folder: Path, family: str, use_safetensors: bool = True) -> Any:
    """AutoGPTQ's loader, its plain torch product."""
    return GPTQ_CAUSAL_LM_MODEL_MAP[family].from_quantized(
        str(folder),
        device="cpu",
        torch_dtype=torch.float32,
        use_triton=False,
        disable_exllama=True,
        disable_exllamav2=True,
        inject_fused_attention=False,
        inject_fused_mlp=False,
        use_safetensors=use_safetensors,
    )


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
    """float64: every matrix is what AutoGPTQ's layer makes of the identity, its scales widened first."""
    config = AutoConfig.from_pretrained(source)
    config._attn_implementation = "eager"
    exact = AutoModelForCausalLM.from_config(config).to(torch.float64).eval()
    weights = {name: value.double() for name, value in loaded.model.state_dict().items() if name in exact.state_dict()}
    for name, layer in quantized_layers(loaded).items():
        layer = layer.double()
        bias = layer.bias if layer.bias is not None else torch.zeros(layer.outfeatures, dtype=torch.float64)
        weights[f"{name}.weight"] = (layer(torch.eye(layer.infeatures, dtype=torch.float64)) - bias).t()
    exact.load_state_dict(weights)
    return exact(torch.tensor([ids])).logits[0].contiguous()


def compute(job: dict[str, Any]) -> dict[str, Any]:
    """Logits for a folder that somebody else wrote."""
    family = json.loads((Path(job["folder"]) / "config.json").read_text())["model_type"]
    loaded = load(Path(job["folder"]), family)
    save_file({"peer_float32": logits(loaded, job["token_ids"])}, job["logits"])
    return {"compute_dtype": describe(loaded), "kernel": kernel(loaded)}


def main() -> None:
    on_the_cpu()
    work = {"make": make, "logits": compute}[sys.argv[1]]
    report: dict[str, Any] = {
        "versions": {
            "auto-gptq": auto_gptq.__version__,
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
