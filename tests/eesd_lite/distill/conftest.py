"""A tiny target for the distillation tests: random weights, a smooth function of the state as its last layers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eesd_lite.config import ModelConfig
from eesd_lite.distill.ridge import TargetParts
from eesd_lite.distill.state_cache import StateCache, StateCacheWriter
from eesd_lite.layer_shapes import HeadShape
from eesd_lite.rope import layer_reaches


class Tiny:
    """Everything the tests need of a target, without a model folder."""

    config = ModelConfig(
        model_type="llama",
        vocab_size=200,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
    )
    shape = HeadShape.from_config(config)
    lengths = (20, 33, 7)  # of the sequences of one batch

    def head(self, seed: int = 0) -> dict[str, Tensor]:
        """Random tensors of a head."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * 0.1
            for name, shape in self.shape.tensor_shapes().items()
        }

    def parts(self, exit_layers: tuple[int, ...] = (1,)) -> TargetParts:
        head = self.head()
        layer = {name: head[f"layer.{name}"] for name in self.shape.layer_shapes()}
        width = self.shape.hidden_size
        return TargetParts(
            shape=self.shape,
            rms_norm_eps=self.config.rms_norm_eps,
            reaches=layer_reaches(self.config, 128),
            layers=dict.fromkeys(exit_layers, layer),
            norm=torch.ones(width),
            lm_head=torch.randn(self.config.vocab_size, width, generator=torch.Generator().manual_seed(1)) * 0.3,
        )

    def write_cache(
        self, folder: Path, *, batches: int = 20, exit_layers: tuple[int, ...] = (1,), fingerprint: str = "f" * 64
    ) -> StateCache:
        """Sequences whose final state is a fixed smooth function of the exit state, so that a head can learn it."""
        generator = torch.Generator().manual_seed(0)
        width, rows = self.shape.hidden_size, sum(self.lengths)
        mix = torch.randn(width, width, generator=torch.Generator().manual_seed(99)) / 8
        with StateCacheWriter(
            folder, hidden_size=width, exit_layers=exit_layers, fingerprint=fingerprint, rope={"rope_theta": 10000.0}
        ) as writer:
            for _ in range(batches):
                states = torch.randn(rows, width, generator=generator)
                tokens = [torch.randint(0, 200, (n,), generator=generator).tolist() for n in self.lengths]
                writer.append(tokens, dict.fromkeys(exit_layers, states), torch.tanh(states @ mix) * 3)
        return StateCache(folder)


@pytest.fixture
def tiny() -> Tiny:
    return Tiny()


@pytest.fixture
def small_cache(tiny: Tiny, tmp_path: Path) -> StateCache:
    return tiny.write_cache(tmp_path / "states")


@pytest.fixture
def one_thread() -> Callable[[], None]:  # type: ignore[misc]
    """Bit-equality across runs is claimed for one thread count; one is the least that can vary."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
