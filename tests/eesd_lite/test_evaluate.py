"""Perplexity and KLD: against values computed by hand, against transformers, and through both forwards."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eesd_lite.engine import Engine
from eesd_lite.errors import EesdError, ModelError, PromptError
from eesd_lite.evaluate import TransformersScorer, dequantized_state, evaluate, read_ids, read_text, windows
from eesd_lite.evaluate_folders import EvalSettings, evaluate_folders
from eesd_lite.progress import no_progress
from quant.checkpoint import Checkpoint
from tests.eesd_lite.tiny_model import four_bit, sixteen_bit

IDS = [list(range(3, 40)), list(range(60, 20, -3))]


class Table:
    """The same logits after every token."""

    def __init__(self, logits: Sequence[float]) -> None:
        self.logits = torch.tensor(logits)

    def blocks(self, ids: Sequence[int], rows: int) -> Iterator[Tensor]:
        for start in range(0, len(ids), rows):
            yield self.logits.repeat(min(rows, len(ids) - start), 1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """4 bit, and the 16-bit folder that it was made from."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return four_bit(folder), folder.parent / "tiny-16bit"


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary() -> None:
    found = evaluate(Table([0.0] * 50), [list(range(40)), [1, 2, 3]])
    assert found.perplexity == pytest.approx(50.0)
    assert found.tokens == 39 + 2 and found.kld is None and found.reference_perplexity is None


def test_kld_and_perplexity_equal_the_values_computed_by_hand() -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    found = evaluate(Table([math.log(x) for x in q]), [[0, 1, 2]], reference=Table([math.log(x) for x in p]))
    expected = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)
    assert found.kld == pytest.approx(expected, rel=1e-5)
    assert found.kld_max == found.kld_median == pytest.approx(expected, rel=1e-5)
    assert found.nll == pytest.approx(-(math.log(0.25) + math.log(0.5)) / 2, rel=1e-5)
    assert found.reference_nll == pytest.approx(-math.log(0.25), rel=1e-5)
    assert found.agreement == 0.0


def test_the_direction_is_reference_to_model() -> None:
    narrow, wide = Table([0.0, -math.inf]), Table([0.0, 0.0])
    assert evaluate(wide, [[0, 0]], reference=narrow).kld == pytest.approx(math.log(2))
    assert evaluate(narrow, [[0, 0]], reference=wide).kld == math.inf


def test_the_result_does_not_depend_on_how_positions_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(0)).tolist()
    whole = evaluate(Table(logits), [list(range(25))], reference=Table([0.0] * 30))
    monkeypatch.setattr("eesd_lite.evaluate.BLOCK_ROWS", 7)
    pieces = evaluate(Table(logits), [list(range(25))], reference=Table([0.0] * 30))
    assert pieces.nll == pytest.approx(whole.nll) and pieces.kld == pytest.approx(whole.kld)


def test_sequences_too_short_to_predict_anything_are_refused() -> None:
    with pytest.raises(PromptError, match="two tokens"):
        evaluate(Table([0.0]), [[1], []])


def test_windows_cover_a_text_once_and_each_begins_with_the_bos() -> None:
    assert windows(range(5), window=2) == [[0, 1], [2, 3]]
    assert windows(range(5), first=[9], window=3) == [[9, 0, 1], [9, 2, 3], [9, 4]]
    with pytest.raises(PromptError):
        windows(range(5), first=[9], window=2)


def test_ids_are_read_from_lists_or_objects_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text('[1, 2]\n\n{"ids": [3]}\n')
    assert read_ids(path, 10) == [[1, 2], [3]]
    for wrong in ("[1, 10]", "[-1]", '["a"]', '{"tokens": []}', "oops", "[true]"):
        path.write_text(f"[0]\n{wrong}\n")
        with pytest.raises(PromptError, match="line 2"):
            read_ids(path, 10)


def test_a_text_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name in ("gone.txt", "latin.txt"):
        with pytest.raises(PromptError, match=name):
            read_text(tmp_path / name, list)


def test_the_float32_forward_gives_the_loss_that_transformers_gives(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = sixteen_bit(tmp_path / "tiny")
    ours = evaluate(TransformersScorer.from_folder(folder), IDS[:1])
    with torch.inference_mode():
        ids = torch.tensor(IDS[:1])
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids, labels=ids).loss
    assert ours.nll == pytest.approx(float(theirs), rel=1e-5)  # float32 sums in two orders


def test_a_gptq_folder_is_evaluated_on_its_dequantized_weights(folders: tuple[Path, Path]) -> None:
    quantized, original = folders
    state = dequantized_state(Checkpoint(quantized), torch.float32)
    assert state.keys() == dequantized_state(Checkpoint(original), torch.float32).keys()
    name = "model.layers.1.mlp.down_proj"
    assert torch.equal(state[f"{name}.weight"], Checkpoint(quantized).dequantized(name))
    reference = TransformersScorer.from_folder(original)
    found = evaluate(TransformersScorer.from_folder(quantized), IDS, reference=reference)
    same = evaluate(reference, IDS, reference=reference)
    assert same.kld == 0.0 and same.agreement == 1.0
    assert found.kld is not None and 0.0 < found.kld < 1.0


def test_both_forwards_give_the_same_figures(folders: tuple[Path, Path], tmp_path: Path, cache_home: Path) -> None:
    quantized, original = folders
    path = tmp_path / "ids.jsonl"
    path.write_text("\n".join(map(str, IDS)))
    asked = {"model": str(quantized), "reference": str(original), "ids": path}
    independent = evaluate_folders(EvalSettings(**asked), no_progress)
    ours = evaluate_folders(EvalSettings(**asked, engine=True, dtype="float32"), no_progress)
    assert ours["forward"] == "engine" and independent["forward"] == "transformers"
    assert ours["tokens"] == independent["tokens"]
    assert ours["nll"] == pytest.approx(independent["nll"], rel=1e-5)
    assert ours["kld"] == pytest.approx(independent["kld"], rel=1e-3)  # a difference of nearly equal numbers


def test_with_a_memory_budget_model_and_reference_are_streamed_and_the_figures_stay(
    folders: tuple[Path, Path], tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text("\n".join(map(str, IDS)))
    asked = {"model": str(folders[0]), "reference": str(folders[1]), "ids": path, "engine": True, "dtype": "float32"}
    opened: list[Engine] = []
    plain = Engine.from_pretrained

    def recorded(*arguments: Any, **options: Any) -> Engine:
        opened.append(plain(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(Engine, "from_pretrained", recorded)
    small = {"head": "off", "controller": "off", "context": 64, "dtype": "float32", "resident_layers": 1}
    budget = max(recorded(folder, **small).plan.total_bytes for folder in folders)
    whole = evaluate_folders(EvalSettings(**asked), no_progress)
    bounded = evaluate_folders(EvalSettings(**asked, device_memory=budget), no_progress)
    assert whole["reference_forward"] == "transformers" and bounded["reference_forward"] == "engine"
    assert len(opened) == 2 + 1 + 2
    assert all(engine.plan.total_bytes <= budget and engine.plan.sweep_bytes > 0 for engine in opened[-2:])
    assert bounded["nll"] == whole["nll"]
    assert bounded["reference_nll"] == pytest.approx(whole["reference_nll"], rel=1e-5)
    assert bounded["kld"] == pytest.approx(whole["kld"], rel=1e-3)  # a difference of nearly equal numbers
    for engine in opened:
        engine.close()
    with pytest.raises(EesdError, match="--device-memory needs --engine"):
        EvalSettings(model="x", device_memory=budget)


def test_without_a_text_the_shipped_prompts_are_used_and_a_text_is_cut_into_windows(
    folders: tuple[Path, Path], tmp_path: Path, cache_home: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    prompts = evaluate_folders(EvalSettings(model=str(folders[0]), limit_windows=2), no_progress)
    assert prompts["sequences"] == 2 and prompts["text"] == "shipped prompts"
    found = evaluate_folders(EvalSettings(model=str(folders[0]), text=text, window=32, limit_windows=3), no_progress)
    assert found["tokens"] == 3 * 31


def test_a_reference_with_another_vocabulary_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    import json

    other = sixteen_bit(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 16}))
    with pytest.raises(ModelError, match="not the same model"):
        evaluate_folders(EvalSettings(model=str(folders[0]), reference=str(other)), no_progress)


def test_a_text_with_tokens_that_the_model_lacks_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    import json

    folder = shutil.copytree(folders[1], tmp_path / "narrow")
    config = json.loads((folder / "config.json").read_text())
    rows = 80  # letters have higher ids in a byte-level tokenizer
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    tensors = load_file(folder / "model.safetensors")
    whole = config["vocab_size"]
    save_file({n: t[:rows].clone() if len(t) == whole else t for n, t in tensors.items()}, folder / "model.safetensors")
    text = tmp_path / "text.txt"
    text.write_text("\u00ff")
    with pytest.raises(PromptError, match="outside the model's vocabulary of 80"):
        evaluate_folders(EvalSettings(model=str(folder), text=text, engine=True), no_progress)


@pytest.mark.parametrize("place", ["model", "reference"])
def test_a_folder_that_the_engine_refuses_is_refused_as_model_and_as_reference(
    folders: tuple[Path, Path], tmp_path: Path, place: str
) -> None:
    broken = sixteen_bit(tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.ones(5)}, broken / "model.safetensors")
    both = {"model": str(folders[0]), "reference": str(folders[1])} | {place: str(broken)}
    with pytest.raises(ModelError, match=r"broken: 'model.norm.weight' has shape \(5,\)"):
        evaluate_folders(EvalSettings(**both), no_progress)


@pytest.mark.parametrize("logits", [[0.0, math.nan], [0.0, -math.inf]])
def test_a_perplexity_that_is_not_finite_is_an_error(logits: list[float]) -> None:
    sound, broken = Table([0.0, 0.0]), Table(logits)
    with pytest.raises(ModelError, match="perplexity of the model is not finite within the first 2 tokens"):
        evaluate(broken, [[0, 0, 1]])
    with pytest.raises(ModelError, match="perplexity of the reference is not finite"):
        evaluate(sound, [[0, 1]], reference=broken)


def test_text_and_ids_exclude_each_other() -> None:
    with pytest.raises(EesdError, match="exclude"):
        EvalSettings(model="m", text=Path("a"), ids=Path("b"))
