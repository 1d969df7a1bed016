import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from eesd_lite.distill.head_module import ExitHead, Packing


def module(tiny, compute: torch.dtype = torch.float32) -> ExitHead:  # type: ignore[no-untyped-def]
    parts = tiny.parts()
    return ExitHead(tiny.shape, parts.reaches[1], eps=parts.rms_norm_eps, compute=compute).load(tiny.head())


def run(head: ExitHead, states: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    packing = Packing.of(lengths)
    return head(states, packing.positions, packing.to_grid, packing.from_grid)


@torch.no_grad()
def test_the_head_equals_transformers_own_layer_affine_and_norm(tiny) -> None:  # type: ignore[no-untyped-def]
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        attn_implementation="eager",
    )
    tensors = tiny.head()
    layer = LlamaDecoderLayer(config, 0).eval()
    layer.load_state_dict({n.removeprefix("layer."): t for n, t in tensors.items() if n.startswith("layer.")})
    states = torch.randn(1, 23, 64, generator=torch.Generator().manual_seed(5))
    positions = torch.arange(23)[None]
    mask = torch.full((23, 23), float("-inf")).triu(1)[None, None]
    output = layer(
        states,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=LlamaRotaryEmbedding(config)(states, positions),
    )
    output = output[0] if isinstance(output, tuple) else output
    norm = LlamaRMSNorm(64, 1e-5)
    wanted = norm(output @ tensors["affine.weight"].T + tensors["affine.bias"])
    found = run(module(tiny), states[0], [23])
    # float32 sums in another order
    assert torch.allclose(found, wanted.reshape(23, 64), atol=2e-5), (found - wanted).abs().max()


@torch.no_grad()
def test_packed_sequences_do_not_see_each_other_nor_the_padding(tiny) -> None:  # type: ignore[no-untyped-def]
    head = module(tiny)
    states = torch.randn(60, 64, generator=torch.Generator().manual_seed(6))
    together = run(head, states, [20, 33, 7])
    apart = torch.cat([run(head, part, [len(part)]) for part in states.split([20, 33, 7])])
    assert torch.allclose(together, apart, atol=1e-5)
    changed = states.clone()
    changed[19] += 1.0  # the last token of the first sequence: nobody else may notice
    again = run(head, changed, [20, 33, 7])
    assert torch.equal(again[:19], together[:19]) and torch.equal(again[20:], together[20:])


def test_names_are_those_of_the_head_file_and_load_and_tensors_are_inverse(tiny) -> None:  # type: ignore[no-untyped-def]
    head = module(tiny)
    assert {n: tuple(t.shape) for n, t in head.tensors().items()} == tiny.shape.tensor_shapes()
    assert all(torch.equal(t, tiny.head()[n]) for n, t in head.tensors().items())
    with pytest.raises(RuntimeError, match=r"affine\.bias"):
        head.load({n: t for n, t in tiny.head().items() if n != "affine.bias"})


def test_bfloat16_products_stay_close_and_masters_stay_float32(tiny) -> None:  # type: ignore[no-untyped-def]
    states = torch.randn(53, 64, generator=torch.Generator().manual_seed(7))
    exact, rounded = module(tiny), module(tiny, torch.bfloat16)
    wanted, found = run(exact, states, [20, 33]), run(rounded, states, [20, 33])
    assert found.dtype == torch.float32
    assert float(((found - wanted).norm() / wanted.norm()).detach()) < 0.02  # a few roundings of 2^-9 each
    found.square().sum().backward()
    assert {p.grad.dtype for p in rounded.parameters() if p.grad is not None} == {torch.float32}
    assert all(p.grad is not None for p in rounded.parameters())
