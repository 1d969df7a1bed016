"""What a decoder layer and an exit head consist of: the names of their tensors and the shapes that config.json implies.

The one source of it for the pre-flight check, the head files and the trainer. Plain Python.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from eesd_lite.config import ModelConfig
from eesd_lite.families import ATTENTION_PROJECTIONS, MLP_PROJECTIONS


def layer_prefix(index: int) -> str:
    """`model.layers.7`"""
    return f"model.layers.{index}"


@dataclass(frozen=True)
class HeadShape:
    """What fixes a head's tensors: the target's layer shape."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    biases: tuple[str, ...] = ()  # projections that have one, such as q_proj
    qk_norm: bool = False

    @classmethod
    def from_config(cls, config: ModelConfig) -> HeadShape:
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of one decoder layer of the target, by Hugging Face's names inside it."""
        hidden, inner = self.hidden_size, self.intermediate_size
        heads, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (heads, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, heads),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        for block, names in (("self_attn", ATTENTION_PROJECTIONS), ("mlp", MLP_PROJECTIONS)):
            places = [f"{block}.{name}" for name in names if name in self.biases]
            shapes |= {f"{place}.bias": shapes[f"{place}.weight"][:1] for place in places}
        if self.qk_norm:
            shapes |= {f"self_attn.{name}.weight": (self.head_dim,) for name in ("q_norm", "k_norm")}
        return shapes

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of a head file: the layer's, prefixed, and the head's own."""
        hidden = self.hidden_size
        return {f"layer.{name}": shape for name, shape in self.layer_shapes().items()} | {
            "affine.weight": (hidden, hidden),
            "affine.bias": (hidden,),
            "norm.weight": (hidden,),
        }

    def parameter_count(self) -> int:
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())
