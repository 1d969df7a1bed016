from dataclasses import fields, replace

from eesd_lite.config import ModelConfig
from eesd_lite.distill.estimate import Rates, estimate, layer_parameters
from eesd_lite.distill.settings import TrainSettings

SMOLLM2 = ModelConfig(
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
)
LLAMA_70B = replace(
    SMOLLM2,
    vocab_size=32000,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
)


def test_a_70b_head_is_1_7_gib_and_its_optimizer_six_times_that() -> None:
    found = estimate(LLAMA_70B, exits=1, tokens=1_000_000, seen_tokens=4_000_000)
    assert found.head_bytes == 1_845_559_296  # 2 bytes for each of 922.8 million weights, 1.72 GiB
    assert found.checkpoint_bytes == 6 * found.head_bytes
    assert found.memory_bytes > 9 * found.head_bytes
    assert found.states_bytes == 1_000_000 * (4 + 2 * 8192 * 2) + 8 * (1_000_000 // 384)


def test_a_smollm2_head_in_numbers() -> None:
    assert layer_parameters(SMOLLM2) == 3_540_096
    found = estimate(SMOLLM2, exits=4, tokens=1_000_000, seen_tokens=4_000_000)
    assert found.head_parameters == 3_540_096 + 576 * 576 + 2 * 576
    assert found.states_bytes == 1_000_000 * (4 + 10 * 576) + 8 * 2604
    assert found.disk_bytes == found.states_bytes + 4 * (found.checkpoint_bytes + found.head_bytes)


def test_all_figures_are_integers_and_grow_with_the_work() -> None:
    small = estimate(SMOLLM2, exits=1, tokens=100_000, seen_tokens=400_000)
    large = estimate(SMOLLM2, exits=2, tokens=200_000, seen_tokens=1_600_000)
    assert all(isinstance(getattr(small, field.name), int) for field in fields(small))
    assert large.text_seconds == 2 * small.text_seconds
    assert large.seconds > 2 * small.seconds and large.disk_bytes > small.disk_bytes


def test_a_sampled_vocabulary_and_a_faster_machine_take_less_time() -> None:
    whole = estimate(SMOLLM2, exits=1, tokens=100_000, seen_tokens=400_000, settings=TrainSettings(vocabulary=0))
    sampled = estimate(SMOLLM2, exits=1, tokens=100_000, seen_tokens=400_000, settings=TrainSettings(vocabulary=8192))
    faster = estimate(SMOLLM2, exits=1, tokens=100_000, seen_tokens=400_000, rates=Rates(training=10**12))
    assert sampled.training_seconds < whole.training_seconds and faster.training_seconds < whole.training_seconds
