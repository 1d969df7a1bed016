"""Which head an engine takes: given, belonging to the model, random, made on the spot, or none with a notice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eesd_lite import SamplingParams
from eesd_lite.config import ModelConfig
from eesd_lite.errors import HeadError
from eesd_lite.head_choice import ChosenHead, choose_head, random_head
from eesd_lite.head_file import folder_fingerprint, save_head
from eesd_lite.head_list import HEADS_FOLDER, available_heads
from eesd_lite.prepare import ModelSource
from eesd_lite.progress import no_progress
from models import RECIPES
from tests.puppets import ids_of, plain_ids
from tests.tiny import Tiny, TinySpec, build

PROMPT = list(b"Which head")


@pytest.fixture
def tiny(tmp_path: Path, cache_home: Path) -> Tiny:
    return build(tmp_path / "model", TinySpec(layers=5))


def write_head(tiny: Tiny, path: Path, exit_layer: int, *, fingerprint: str | None = None, seed: int = 0) -> Path:
    config = ModelConfig.from_folder(tiny.folder)
    tensors = {name: tensor + seed for name, tensor in random_head(config, exit_layer).tensors.items()}
    fingerprint = folder_fingerprint(tiny.folder, config) if fingerprint is None else fingerprint
    save_head(path, tensors, config=config, exit_layer=exit_layer, fingerprint=fingerprint, summary={})
    return path


def source_of(tiny: Tiny, **changes: Any) -> ModelSource:
    return replace(ModelSource(tiny.folder, None, "owner/model"), **changes)


def choose(tiny: Tiny, head: str | Path | None = None, exit_layer: int | None = None, **options: Any) -> ChosenHead:
    options = {"force": False, "progress": no_progress, **options}
    source = options.pop("source", source_of(tiny))
    return choose_head(source, ModelConfig.from_folder(tiny.folder), head, exit_layer, **options)


def test_off_means_none_whatever_lies_around(tiny: Tiny) -> None:
    write_head(tiny, tiny.folder / HEADS_FOLDER / "exit-02.safetensors", 2)
    assert choose(tiny, "off") == ChosenHead(None, None)


def test_without_any_head_there_is_a_notice_and_no_error(tiny: Tiny) -> None:
    found = choose(tiny)
    assert found.head is None and found.exit_layer is None
    assert (
        "no exit head" in found.notices[0] and "--head instant" in found.notices[0] and "eesd train" in found.notices[0]
    )


def test_asking_for_an_exit_layer_that_has_no_head_is_an_error(tiny: Tiny) -> None:
    with pytest.raises(HeadError, match="none for layer 2"):
        choose(tiny, exit_layer=2)
    write_head(tiny, tiny.folder / HEADS_FOLDER / "a.safetensors", 1)
    write_head(tiny, tiny.folder / HEADS_FOLDER / "b.safetensors", 3)
    with pytest.raises(HeadError, match="no head for exit layer 2; there are heads for 1, 3"):
        choose(tiny, exit_layer=2)


def test_heads_beside_the_model_and_made_on_this_machine_are_found(tiny: Tiny, cache_home: Path) -> None:
    beside = write_head(tiny, tiny.folder / HEADS_FOLDER / "exit-03.safetensors", 3)
    made = write_head(tiny, cache_home / "heads" / "owner--model" / "exit-01.safetensors", 1)
    (tiny.folder / HEADS_FOLDER / "broken.safetensors").write_bytes(b"no head")
    (tiny.folder / HEADS_FOLDER / "readme.txt").write_text("no head either")
    assert available_heads(source_of(tiny)) == {1: made, 3: beside}
    assert choose(tiny).exit_layer == 3, "without a recipe's word, the deepest"
    assert choose(tiny, exit_layer=1).exit_layer == 1


def test_a_recipe_ships_heads_and_says_which_is_the_default(tiny: Tiny) -> None:
    recipe = next(iter(RECIPES.values()))
    found = available_heads(source_of(tiny, recipe=recipe))
    assert set(found) == {head.exit_layer for head in recipe.heads}
    assert recipe.default_exit_layer in found


def test_a_given_file_decides_the_exit_layer_and_may_not_be_contradicted(tiny: Tiny, tmp_path: Path) -> None:
    path = write_head(tiny, tmp_path / "mine.safetensors", 2)
    assert choose(tiny, path).exit_layer == 2 and choose(tiny, str(path), 2).exit_layer == 2
    with pytest.raises(HeadError, match="made for exit layer 2, but 3 was asked for"):
        choose(tiny, path, 3)


def test_a_folder_of_heads_may_be_named_and_one_of_them_asked_for(tiny: Tiny, tmp_path: Path) -> None:
    for exit_layer in (1, 3):
        write_head(tiny, tmp_path / "heads" / f"exit-{exit_layer}.safetensors", exit_layer)
    assert choose(tiny, tmp_path / "heads").exit_layer == 3
    assert choose(tiny, str(tmp_path / "heads"), 1).exit_layer == 1
    with pytest.raises(HeadError, match="no head for exit layer 2; there are heads for 1, 3"):
        choose(tiny, tmp_path / "heads", 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(HeadError, match="no head files in this folder"):
        choose(tiny, tmp_path / "empty")


@pytest.mark.parametrize("head", ["/no/such/head.safetensors", "instnat"])
def test_a_file_that_is_not_there_is_an_error_that_lists_the_words(tiny: Tiny, head: str) -> None:
    with pytest.raises(
        HeadError, match="no such head file; --head takes a file, a folder of them, off, instant or random"
    ):
        choose(tiny, head)


def test_a_head_of_another_model_is_refused_unless_forced(tiny: Tiny, tmp_path: Path) -> None:
    path = write_head(tiny, tmp_path / "theirs.safetensors", 2, fingerprint="b" * 64)
    with pytest.raises(HeadError, match="another target"):
        choose(tiny, path)
    assert choose(tiny, path, force=True).exit_layer == 2


def test_instant_makes_a_head_where_later_runs_find_it(
    tiny: Tiny, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eesd_lite.distill import instant

    def make(source: ModelSource, exit_layer: int, progress: object) -> Path:
        return write_head(tiny, cache_home / "heads" / "owner--model" / "exit.safetensors", exit_layer)

    monkeypatch.setattr(instant, "make_instant_head", make)
    assert choose(tiny, "instant").exit_layer == 1, "a third of five layers"
    assert choose(tiny, "instant", 3).exit_layer == 3
    assert choose(tiny).exit_layer == 3


def test_a_random_head_is_the_same_every_time(tiny: Tiny) -> None:
    config = ModelConfig.from_folder(tiny.folder)
    first, second = random_head(config, 2), random_head(config, 2)
    assert all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())
    for layer in (0, 5, -1):
        with pytest.raises(HeadError, match="the model allows 1 to 4"):
            random_head(config, layer)


def test_a_head_from_a_file_drafts_and_changes_nothing(tiny: Tiny, tmp_path: Path) -> None:
    path = write_head(tiny, tmp_path / "mine.safetensors", 2)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with tiny.engine(head=path, controller="fixed:3") as engine:
        assert engine.plan.exit_layer == 2
        assert ids_of(engine, PROMPT, params) == plain_ids(engine, PROMPT, params)
        assert engine.stats.drafted > 0


def test_a_head_that_does_not_fit_the_budget_is_left_out_with_a_note(tiny: Tiny, tmp_path: Path) -> None:
    path = write_head(tiny, tmp_path / "mine.safetensors", 4)
    with tiny.engine(head="off", resident_layers=0) as engine:
        plain = engine.plan.total_bytes
    with tiny.engine(head=path, device_memory=plain) as engine:
        assert engine.head is None and engine.plan.exit_layer is None
        assert any("speculation off" in notice for notice in engine.notices)
        assert len(ids_of(engine, PROMPT, SamplingParams(max_new_tokens=3, ignore_eos=True))) == 3
