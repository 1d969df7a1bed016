"""Sampling settings are checked once, where they are made."""

from typing import Any

import pytest

from eesd_lite.errors import PromptError
from eesd_lite.params import SamplingParams


def test_the_defaults_are_greedy_and_filter_nothing() -> None:
    params = SamplingParams()
    assert params.greedy
    assert (params.top_k, params.top_p, params.repetition_penalty, params.stop) == (0, 1.0, 1.0, ())


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 1e-5])
def test_a_tiny_temperature_counts_as_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).greedy


def test_an_ordinary_temperature_samples() -> None:
    assert not SamplingParams(temperature=0.8).greedy


def test_one_stop_string_may_be_given_bare() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 1.5},
        {"max_new_tokens": True},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": 1e30},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": float("inf")},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e30},
        {"seed": -1},
        {"seed": 2**64},
        {"stop": ("",)},
        {"stop": (3,)},
    ],
)
def test_a_setting_that_means_nothing_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(PromptError) as error:
        SamplingParams(**wrong)
    name = next(iter(wrong))
    assert name.split("_")[0] in str(error.value)
    assert "\n" not in str(error.value)


def test_settings_cannot_be_changed_after_the_check() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().seed = 3  # type: ignore[misc]
