"""Recipes are consistent, their shipped files are there, and a broken one says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import models
from models import RECIPES, Calibration, FrequentIds, RecipeError, find_recipe


def test_every_recipe_is_registered_under_its_own_name() -> None:
    assert {name: entry.name for name, entry in RECIPES.items()} == {name: name for name in RECIPES}


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(RecipeError, match="no recipe named 'smollm'.*smollm2-135m"):
        find_recipe("smollm")


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_shipped_file_is_there_and_has_the_stated_shape(name: str) -> None:
    chosen = find_recipe(name)
    rows = chosen.calibration_rows()
    assert len(rows) == chosen.calibration.rows
    assert {len(row) for row in rows} == {chosen.calibration.row_tokens}
    for head in chosen.heads:
        assert chosen.head(head.exit_layer) == Path(models.__file__).parent / head.path


def test_shipped_data_stays_under_forty_megabytes() -> None:
    data = Path(models.__file__).parent / "data"
    assert sum(path.stat().st_size for path in data.rglob("*") if path.is_file()) < 40_000_000


def test_an_exit_layer_without_a_head_is_none() -> None:
    assert find_recipe("smollm2-135m").head(7) is None


def test_calibration_ids_are_little_endian_words_in_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ids.bin").write_bytes(bytes([1, 0, 0, 1, 255, 191, 7, 0]))
    monkeypatch.setattr("models.recipe.data_file", lambda path: tmp_path / path)
    chosen = replace(find_recipe("smollm2-135m"), calibration=Calibration(path="ids.bin", rows=2, row_tokens=2))
    assert chosen.calibration_rows() == [[1, 256], [49151, 7]]


def test_a_truncated_calibration_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ids.bin").write_bytes(b"\0" * 7)
    monkeypatch.setattr("models.recipe.data_file", lambda path: tmp_path / path)
    chosen = replace(find_recipe("smollm2-135m"), calibration=Calibration(path="ids.bin", rows=2, row_tokens=2))
    with pytest.raises(RecipeError, match="ids.bin has 7 bytes, expected 8"):
        chosen.calibration_rows()


def test_a_missing_shipped_file_is_named() -> None:
    with pytest.raises(RecipeError, match="nothing.bin is missing; install the package again"):
        models.data_file("data/nothing.bin")


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("name", "Smol LM", "lower-case"),
        ("default_exit_layer", 7, "default exit layer 7 is not in"),
        ("heads", (models.HeadFile(9, "a"), models.HeadFile(6, "b")), "ascending"),
    ],
)
def test_a_contradictory_recipe_is_refused(field: str, value: object, complaint: str) -> None:
    with pytest.raises(RecipeError, match=complaint):
        replace(find_recipe("smollm2-135m"), **{field: value})


def test_a_checksum_that_is_none_is_refused() -> None:
    chosen = find_recipe("smollm2-135m")
    with pytest.raises(RecipeError, match="64 hexadecimal digits"):
        replace(chosen, origin=replace(chosen.origin, sha256="abc"))


@pytest.mark.parametrize("name", sorted(name for name, entry in RECIPES.items() if entry.frequent is not None))
def test_shipped_ids_by_frequency_are_different_ones(name: str) -> None:
    ids = find_recipe(name).ids_by_frequency()
    assert len(ids) == len(set(ids)) > 1000


def test_ids_by_frequency_are_those_of_the_file_or_counted_in_the_calibration_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ids.bin").write_bytes(bytes([7, 0, 255, 191, 7, 0, 2, 0]))
    monkeypatch.setattr("models.recipe.data_file", lambda path: tmp_path / path)
    chosen = replace(find_recipe("smollm2-135m"), calibration=Calibration(path="ids.bin", rows=2, row_tokens=2))
    assert replace(chosen, frequent=None).ids_by_frequency() == [7, 2, 49151]
    assert replace(chosen, frequent=FrequentIds("ids.bin", 4)).ids_by_frequency() == [7, 49151, 7, 2]
    with pytest.raises(RecipeError, match="ids.bin has 8 bytes, expected 10"):
        replace(chosen, frequent=FrequentIds("ids.bin", 5)).ids_by_frequency()
