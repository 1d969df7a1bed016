"""Sizes as people write them."""

from types import SimpleNamespace

import psutil
import pytest

from eesd_lite.errors import BudgetError
from eesd_lite.units import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 1024**3),
        ("8GB", 8 * 1000**3),
        (" 500mb", 500_000_000),
        ("1.5 KiB", 1536),
        ("0.1gb", 100_000_000),
        (".5k", 500),
        ("64MiB", 64 << 20),
        ("2t", 2 * 1000**4),
        ("3Gi", 3 << 30),
        ("4096", 4096),
        ("17 B", 17),
        (4096, 4096),
        (0, 0),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_a_size_is_read_in_the_unit_that_is_written(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "eight", "8 apples", "-1GB", "1e9", "1,5GB", "8iB", "GB", "٣GB", -1, 1.5, True, None]
)
def test_what_is_not_a_size_is_refused_in_one_line(text: object) -> None:
    with pytest.raises(BudgetError) as error:
        parse_size(text)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_auto_leaves_a_share_of_the_free_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000, total=4000))
    assert parse_size(" Auto ") == 800


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (98_000_000, "93.5 MiB"),
        (7 << 30, "7.00 GiB"),
        (1023 << 20, "1.00 GiB"),
        (500 << 40, "500 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_a_size_is_shown_with_three_digits(size: int, text: str) -> None:
    assert format_size(size) == text


def test_reading_a_shown_size_comes_close_to_the_size() -> None:
    for size in (1, 1000, 123_456, 64 << 20, 13_000_000_000, 7 * 10**12):
        assert parse_size(format_size(size)) == pytest.approx(size, rel=0.01)
