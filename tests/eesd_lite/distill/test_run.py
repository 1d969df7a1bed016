import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from cli.main import eesd
from eesd_lite.distill import run
from eesd_lite.distill.run import HeadReport, TrainRequest, head_name, train_heads
from eesd_lite.distill.settings import TrainSettings
from eesd_lite.distill.state_cache import StateCache
from eesd_lite.distill.teacher import DenseTarget, cache_texts
from eesd_lite.errors import HeadError, PrepareError
from eesd_lite.head_file import folder_fingerprint, load_head, save_head
from quant.checkpoint import Checkpoint
from tests.eesd_lite.tiny_tokenizers import byte_level

SETTINGS = TrainSettings(steps=12, batch_tokens=300, compute="float32", kl_share=0.5, eval_points=2)


@pytest.fixture
def target(tiny, tmp_path: Path) -> Path:  # type: ignore[no-untyped-def]
    """A 16-bit model folder of the tiny shape, random weights."""
    folder = tmp_path / "target"
    folder.mkdir()
    config = tiny.config
    generator = torch.Generator().manual_seed(8)
    weights = {
        "model.embed_tokens.weight": torch.randn(200, 64, generator=generator),
        "model.norm.weight": torch.ones(64),
    }
    for layer in range(config.num_hidden_layers):
        for name, tensor in tiny.head(layer).items():
            if name.startswith("layer."):
                weights[f"model.layers.{layer}.{name.removeprefix('layer.')}"] = tensor
    save_file({name: tensor.half() for name, tensor in weights.items()}, folder / "model.safetensors")
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    values = {name: getattr(config, name) for name in [*names.split(), "head_dim", "rms_norm_eps"]}
    values |= {"model_type": "llama", "tie_word_embeddings": True, "max_position_embeddings": 128}
    (folder / "config.json").write_text(json.dumps(values))
    return byte_level(folder)


def sequences(count: int = 60) -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(0, 200, (20 + i % 13,), generator=generator).tolist() for i in range(count)]


@pytest.fixture
def states(target: Path, tmp_path: Path) -> Path:
    cache_texts(target, tmp_path / "states", sequences(), exit_layers=(1, 3))
    return tmp_path / "states"


def test_the_teacher_of_a_quantized_model_is_the_quantized_model(tiny, target: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    teacher = DenseTarget(target, context=40, dtype=torch.float32, quantize="nf4")
    name = "model.layers.1.mlp.up_proj"
    assert torch.equal(teacher.layer(1).up_proj, Checkpoint(target, quantize="nf4").dequantized(name))
    assert not torch.equal(teacher.layer(1).up_proj, Checkpoint(target).dequantized(name))
    cache_texts(target, tmp_path / "states", sequences(), exit_layers=(1,), quantize="nf4")
    request = TrainRequest(
        model=str(target), exit_layers=(1,), out=tmp_path / "out", cache=tmp_path / "states", settings=SETTINGS,
        instant=True, quantize="nf4",
    )  # fmt: skip
    assert train_heads(request)[0].tau >= 1.0
    load_head(tmp_path / "out" / head_name(1), tiny.config, folder_fingerprint(target, tiny.config))
    with pytest.raises(PrepareError, match="states of another model"):
        train_heads(replace(request, quantize=None))


def test_where_a_folder_holds_several_files_the_teacher_is_the_one_that_is_named(
    tiny, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    other = {name: tensor * 1.5 for name, tensor in load_file(target / "model.safetensors").items()}
    (target / "model.safetensors").rename(target / "one.safetensors")
    save_file(other, target / "other.safetensors")
    cache_texts(target, tmp_path / "states", sequences(), exit_layers=(1,), weights="other.safetensors")

    def train(request: TrainRequest, progress: object) -> list[HeadReport]:
        return train_heads(replace(request, cache=tmp_path / "states"))

    monkeypatch.setattr(run, "train_heads", train)
    options = ["--weights", "other.safetensors", "--exit-layers", "1", "--instant", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(eesd, ["train", str(target), *options])
    assert result.exit_code == 0 and "--weights other.safetensors --head" in result.stderr, result.stderr
    made_for = [folder_fingerprint(target, tiny.config, f"{name}.safetensors") for name in ("other", "one")]
    load_head(tmp_path / "out" / head_name(1), tiny.config, made_for[0])
    with pytest.raises(HeadError):
        load_head(tmp_path / "out" / head_name(1), tiny.config, made_for[1])
    assert StateCache(tmp_path / "states").meta.fingerprint == made_for[0]


def test_text_with_tokens_that_the_model_lacks_is_refused(target: Path, tmp_path: Path) -> None:
    data = tmp_path / "text.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"{number} bottles of beer"}) for number in range(60)))
    request = TrainRequest(model=str(target), exit_layers=(1,), out=tmp_path / "out", data=data, instant=True)
    with pytest.raises(PrepareError, match=r"token id 2\d\d is outside the model's vocabulary of 200"):
        train_heads(request)


def test_training_writes_one_loadable_head_per_exit_layer_and_a_report(
    tiny, target: Path, states: Path, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "out"
    request = TrainRequest(model=str(target), exit_layers=(1, 3), out=out, cache=states, settings=SETTINGS)
    stages: list[str] = []
    reports = train_heads(request, lambda stage, done, total: stages.append(stage))
    fingerprint = folder_fingerprint(target, tiny.config)
    for report, exit_layer in zip(reports, (1, 3), strict=True):
        head = load_head(out / head_name(exit_layer), tiny.config, fingerprint)
        assert head.exit_layer == exit_layer == report.exit_layer
        assert report.tau >= 1.0
        assert set(head.prior.beliefs) == {0.0, 0.8}, "controllers begin with what the new head's confidence was worth"
        assert head.summary["trained"] is True and head.summary["tokens"] == report.tokens > 0
        assert head.summary["text_tokens"] == StateCache(states).meta.tokens
        counts = Counter(StateCache(states).tokens.tolist())
        assert head.draft_vocab is not None and sorted(head.draft_vocab.tolist()) == sorted(counts)
        assert counts[int(head.draft_vocab[0])] == max(counts.values())
    assert [entry["exit_layer"] for entry in json.loads((out / "report.json").read_text())] == [1, 3]
    assert any("exit 3: training" in stage for stage in stages)


def test_training_is_finished_by_the_same_call_without_doing_it_again(
    target: Path, states: Path, tmp_path: Path
) -> None:
    request = TrainRequest(model=str(target), exit_layers=(3,), out=tmp_path, cache=states, settings=SETTINGS)
    train_heads(request)
    first = load_file(tmp_path / head_name(3))
    stages: list[str] = []
    train_heads(request, lambda stage, done, total: stages.append(stage))
    again = load_file(tmp_path / head_name(3))
    assert all(torch.equal(again[name], first[name]) for name in first)
    assert not any("training" in stage for stage in stages)


def test_instant_stops_after_the_closed_form(tiny, target: Path, states: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    request = TrainRequest(
        model=str(target), exit_layers=(3,), out=tmp_path / "out", cache=states, instant=True, settings=SETTINGS
    )
    (report,) = train_heads(request)
    head = load_head(report.path, tiny.config)
    assert head.summary["trained"] is False and report.start == report.quality
    assert torch.equal(
        head.tensors["layer.mlp.up_proj.weight"], tiny.head(3)["layer.mlp.up_proj.weight"].half().bfloat16()
    )
    # The last layer follows exit 3 directly, so its copy and an affine map are nearly the target itself.
    assert report.quality.agreement > 0.8
    assert report.tau > 2  # right four times in five: 3.4 tokens a round of four drafts, were rounds independent


def test_a_finished_head_is_trained_further_and_only_by_its_own_model(
    tiny, target: Path, states: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("eesd_lite.distill.run.measure_tau", lambda *_, **__: 0.0)  # judged above
    request = TrainRequest(model=str(target), exit_layers=(3,), out=tmp_path / "a", cache=states, settings=SETTINGS)
    first = train_heads(request)[0]
    onward = replace(request, out=tmp_path / "b", start=tmp_path / "a")
    still = replace(onward, out=tmp_path / "c", settings=replace(SETTINGS, learning_rate=0.0))
    begun, unmoved = train_heads(onward)[0], train_heads(still)[0]
    assert begun.variant == "given" and begun.start.agreement == first.quality.agreement
    old, new, same = (load_head(tmp_path / name / head_name(3), tiny.config).tensors for name in "abc")
    assert all(torch.equal(same[name], old[name]) for name in old), unmoved
    assert not torch.equal(new["affine.weight"], old["affine.weight"])
    with pytest.raises(HeadError, match="no such head file"):
        train_heads(replace(onward, cache=None, out=tmp_path / "d", exit_layers=(1,)))
    assert not (tmp_path / "d").exists()  # said before any text is written
    with pytest.raises(PrepareError, match="the heads to start from would be overwritten"):
        train_heads(replace(onward, out=tmp_path / "a"))
    head = load_head(first.path, tiny.config)
    save_head(first.path, head.tensors, config=tiny.config, exit_layer=3, fingerprint="f" * 64, summary=head.summary)
    with pytest.raises(HeadError, match="made for another target"):
        train_heads(replace(onward, out=tmp_path / "e"))


def test_the_users_own_text_is_cached_once(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) % 200 for letter in text]

    monkeypatch.setattr("eesd_lite.text.TextCodec.from_folder", lambda folder: Letters())
    monkeypatch.setattr("eesd_lite.distill.run.measure_tau", lambda *_, **__: 0.0)  # the engine needs a whole codec
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"sample number {i} " * 3}) for i in range(30)))
    request = TrainRequest(
        model=str(target), exit_layers=(2,), out=tmp_path / "out", data=data, samples=20, settings=SETTINGS
    )
    train_heads(request)
    cache = StateCache(tmp_path / "out" / "states")
    assert cache.meta.sequences == 20
    before = (tmp_path / "out" / "states" / "meta.json").stat().st_mtime_ns
    train_heads(request)
    assert (tmp_path / "out" / "states" / "meta.json").stat().st_mtime_ns == before


def test_states_of_another_model_and_impossible_exit_layers_are_refused(tiny, target: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    foreign = tiny.write_cache(tmp_path / "foreign", exit_layers=(1,))
    request = TrainRequest(model=str(target), exit_layers=(1,), out=tmp_path, cache=foreign.folder, settings=SETTINGS)
    with pytest.raises(PrepareError, match="states of another model"):
        train_heads(request)
    for wrong, complaint in (((4,), "exit layer 4 is not possible"), ((0,), "exit layer 0"), ((1, 1), "each once")):
        with pytest.raises(PrepareError, match=complaint):
            train_heads(replace(request, exit_layers=wrong))
