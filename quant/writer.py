"""Writer of a GPTQ folder in the layout of AutoGPTQ and GPTQModel: `qweight, qzeros, scales, g_idx[, bias]`.

Version 1 (`gptq`) stores zero points minus one, version 2 (`gptq_v2`) as they are; which tool loads which is in
docs/conformance.md. The caller writes into a temporary folder and renames it when `finish` returns.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from quant.checkpoint import Checkpoint
from quant.folder_index import INDEX_NAME, INDEX_SUFFIX, PICKLES
from quant.gptq import GridSettings
from quant.matrix import QuantizedMatrix
from quant.packing import pack_qweight, pack_qzeros
from quant.safetensors_index import read_json

SHARD_BYTES = 2 * 2**30
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PROJECTION_ENDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class GPTQWriter:
    """Collects tensors, writes a shard whenever SHARD_BYTES are together, and ends with the settings and the index."""

    def __init__(self, folder: Path, source: Checkpoint, settings: GridSettings, *, version: int) -> None:
        self.folder, self.source, self.settings, self.version = folder, source, settings, version
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def copy_small_files(self) -> None:
        """Tokenizer, templates and generation settings travel unchanged; config.json is written by `finish`."""
        for path in sorted(self.source.folder.iterdir()):
            skipped = path.name.endswith((".safetensors", *PICKLES, ".gguf", ".lock", INDEX_SUFFIX)) or path.name in (
                "config.json", "quantize_config.json",
            )  # fmt: skip
            if path.is_file() and not skipped and path.stat().st_size < 64 * 2**20:
                shutil.copyfile(path, self.folder / path.name)

    def add_unquantized(self, *, repeat_embedding: bool = False) -> None:
        """Embeddings, norms and a separate lm_head, in float16 as AutoGPTQ keeps them.

        `repeat_embedding` stores the embedding a second time as the lm_head of a model that ties the two: AutoGPTQ
        writes such folders so, and loads garbage without.
        """
        for name in self.source.tensors:
            module = name.rsplit(".", 1)[0]
            if not module.endswith(_PROJECTION_ENDS) and not name.endswith("rotary_emb.inv_freq"):
                self._add(name, self.source.tensor(name).to(torch.float16))
        if repeat_embedding and LM_HEAD not in self.source:
            self._add(LM_HEAD, self.source.tensor(EMBEDDING).to(torch.float16))

    def add_matrix(self, module: str, matrix: QuantizedMatrix) -> None:
        """One quantized projection, named as in the source model."""
        self._add(f"{module}.qweight", pack_qweight(matrix.codes, matrix.bits))
        self._add(f"{module}.qzeros", pack_qzeros(matrix.zeros, matrix.bits, self.version))
        self._add(f"{module}.scales", matrix.scales.to(torch.float16))
        self._add(f"{module}.g_idx", matrix.g_idx.to(torch.int32))
        if matrix.bias is not None:
            self._add(f"{module}.bias", matrix.bias.to(torch.float16))

    def _add(self, name: str, tensor: Tensor) -> None:
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes
        if self._pending_bytes >= SHARD_BYTES:
            self._flush()

    def _flush(self) -> None:
        save_file(self._pending, self.folder / f"shard-{len(self._shards)}.safetensors", metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def finish(self) -> None:
        """Write what is pending, give the shards their final names, then index and settings."""
        if self._pending:
            self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            final = "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self.folder / f"shard-{number}.safetensors").rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self.folder / INDEX_NAME).write_text(json.dumps(index, indent=2))
        settings = self._settings()
        config = read_json(self.source.folder / "config.json")
        config["quantization_config"] = settings
        config["torch_dtype"] = "float16"
        config.pop("dtype", None)
        (self.folder / "config.json").write_text(json.dumps(config, indent=2))
        (self.folder / "quantize_config.json").write_text(json.dumps(settings, indent=2))

    def _settings(self) -> dict[str, object]:
        return {
            "quant_method": "gptq",
            "bits": self.settings.bits,
            "group_size": self.settings.group_size,
            "desc_act": self.settings.desc_act,
            "sym": self.settings.sym,
            "static_groups": False,
            "true_sequential": True,
            "lm_head": False,
            "damp_percent": self.settings.damp_percent,
            "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2",
        }
