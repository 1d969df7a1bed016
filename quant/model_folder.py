"""A model folder, opened as far as headers and settings go: which tensors there are, and what each module is.

`quant.checkpoint` adds the reading of tensors. Standard library only (and torch where the weights are pickles), so that
looking at a folder costs a moment.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from quant.block_module import refuse_eight_bit, stored_kind
from quant.config import read_quant_config
from quant.errors import CheckpointError, in_one_line, shown
from quant.folder_index import FolderIndex, index_folder
from quant.gptq_module import GPTQModule, gptq_module
from quant.overrides import Claim, Overrides
from quant.safetensors_index import TensorInfo


class ModelFolder:
    """One folder, opened. Raises CheckpointError (one line, with the files) for whatever cannot be read.

    `weights` names the file or index to read where the folder holds several. With `tolerant`, damaged and missing files
    are left in `index.problems` for the caller, who reports them together with what else is wrong.
    """

    def __init__(self, folder: Path, weights: str | None = None, *, tolerant: bool = False) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder")
        self.quant_config = read_quant_config(self.folder)
        stated = self.quant_config.base_name if self.quant_config is not None else None
        self.index: FolderIndex = index_folder(self.folder, weights, stated)
        self.tensors: dict[str, TensorInfo] = self.index.tensors
        refuse_eight_bit(self.folder, {}, self.tensors)
        if self.index.problems and not tolerant:
            first = self.index.problems[0]
            raise CheckpointError(
                first if len(self.index.problems) == 1 else in_one_line(self.folder, self.index.problems)
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided where the files leave a choice or contradict each other."""
        settings = self.quant_config.notes if self.quant_config is not None else ()
        return (*self.index.notes, *settings, *self._claims[1])

    @cached_property
    def _claims(self) -> tuple[dict[str, Claim], tuple[str, ...]]:
        suffixes = (".qweight", ".weight")
        names = [name.rpartition(".")[0] for name in self.tensors if name.endswith(suffixes)]
        return (Overrides() if self.quant_config is None else self.quant_config.overrides).claims(names)

    @property
    def claims(self) -> dict[str, Claim]:
        """What the settings say of single modules, by module; only to be confirmed by the tensors."""
        return self._claims[0]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def is_quantized(self, module: str) -> bool:
        """Whether `module` (such as model.layers.0.mlp.up_proj) is stored as a GPTQ matrix."""
        return f"{module}.qweight" in self.tensors

    def stored_blocks(self, module: str) -> str | None:
        """nf4 or fp4 where `module` is stored in bitsandbytes' 4-bit form, else None."""
        return stored_kind(self.tensors, module)

    def info(self, name: str) -> TensorInfo:
        """Header entry of a tensor; CheckpointError when the folder lacks it."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder}: tensor '{shown(name)}' is missing")
        return self.tensors[name]

    def module(self, name: str) -> GPTQModule:
        """What the quantized module `name` is, from headers; CheckpointError when its tensors contradict each other."""
        try:
            return gptq_module(self.tensors, name, self.quant_config, self.claims.get(name, Claim()))
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder}: {error}") from None
