"""`eesd plan` as people call it: text, JSON, refusals in one line, and no torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from click.testing import CliRunner

from cli.main import eesd
from cli.plan_table import plan_lines
from eesd_lite.placement import Plan

SMALL = Plan(
    tiers=("device", "device", "host-stream", "host-compute", "disk"),
    resident_layers=2,
    exit_layer=1,
    context=8,
    ring_slots=2,
    items=(("embedding", 5000), ("scratch", 300), ("resident layers", 200)),
    total_bytes=5500,
    sweep_bytes=200,
    layer_bytes=(100,) * 5,
    host_items=(("layers to stream", 100),),
    host_total_bytes=100,
)


def test_a_plan_is_shown_layer_by_layer_and_item_by_item() -> None:
    assert plan_lines(SMALL) == [
        "layers   0  DDsc.",
        "        D  2 on the device, 200 B",
        "        s  1 in host memory, streamed, 100 B",
        "        c  1 in host memory, computed there, 100 B",
        "        .  1 on disk, 100 B",
        "device:",
        "                    planned  bytes",
        "  embedding        4.88 KiB   5000",
        "  scratch             300 B    300",
        "  resident layers     200 B    200",
        "  together         5.37 KiB   5500",
        "host:",
        "                    planned  bytes",
        "  layers to stream    100 B    100",
        "  together            100 B    100",
    ]


def test_what_is_allocated_stands_beside_what_was_planned() -> None:
    lines = plan_lines(SMALL, {"device": {"embedding": 5000, "resident layers": 226}, "host": {"layers to stream": 99}})
    assert [" ".join(line.split()) for line in lines[5:11]] == [
        "device:",
        "planned bytes allocated",
        "embedding 4.88 KiB 5000 5000",
        "scratch 300 B 300 while it computes",
        "resident layers 200 B 200 226",
        "together, lasting 5.08 KiB 5200 5226 (+0.50%)",
    ]
    assert lines[-1].endswith("99 (-1.00%)")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(eesd, ["plan", *arguments], prog_name="eesd")
    return result.exit_code, result.stdout, result.stderr


def test_a_shape_and_a_preset_give_a_plan() -> None:
    code, out, err = run("--shape", "llama-2-70b", "--preset", "24gb")
    assert (code, err) == (0, "")
    assert "layers  40  DDssssssssssssssssssssssssssssssssssssss" in out
    assert "at most 3.33 tokens/s at tau 2.3, 1.45 without drafting" in out
    assert "exit layers that could draft within these budgets: 1 to 42" in out


def test_json_says_the_same_for_programs() -> None:
    code, out, _ = run(
        "--shape", "llama-2-13b", "--device-memory", "4GiB", "--host-memory", " 1500mb", "--json", "--tau", "3",
        "--link-rate", "10GB/s",
    )  # fmt: skip
    found = json.loads(out)
    assert code == 0 and set(found["tier_bytes"]) == {"device", "host-stream", "disk"}
    assert found["device_memory"] == 4 << 30 and found["host_memory"] == 1_500_000_000
    assert found["plan"]["total_bytes"] <= 4 << 30 and found["plan"]["host_total_bytes"] <= 1_500_000_000
    assert found["tokens_per_second"] == pytest.approx(3 / found["sweep"]["seconds"])


def test_bits_of_the_head_and_its_tokens_change_what_is_counted_and_leave_room_for_layers() -> None:
    def items(*more: str) -> tuple[dict[str, int], int]:
        plan = json.loads(run("--shape", "llama-2-13b", "--preset", "8gb", "--json", *more)[1])["plan"]
        return plan["items"], plan["resident_layers"]

    weights = 4 * 5120 * 5120 + 3 * 5120 * 13824 + 5120 * 5120  # a layer and the affine map
    (whole, layers), (rounded, more) = items(), items("--head-bits", "4", "--draft-vocab", "all")
    assert whole["exit head"] == 2 * (weights + 4 * 5120) and "draft vocabulary" not in whole
    assert rounded["exit head"] == -(-(weights // 2 + weights // 64 * 4 + 2 * 4 * 5120) // 4096) * 4096
    assert rounded["draft vocabulary"] == 32000 * (5120 // 2 + 5120 // 64 * 4)
    assert items("--draft-vocab", "4096")[0]["draft vocabulary"] == 4096 * 5120 * 2
    assert more > layers


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "give either MODEL or --shape NAME"),
        (("x", "--shape", "llama-2-7b"), 2, "give either MODEL or --shape NAME"),
        (("--shape", "llama-9"), 1, "no shape named 'llama-9'; known: smollm2-135m,"),
        (("--shape", "llama-2-7b", "--device", "cpu", "--preset", "8gb"), 2, "--device cuda"),
        (("--shape", "llama-2-7b", "--device-memory", "8 apples"), 2, "cannot read the size '8 apples'"),
        (("--shape", "llama-2-7b", "--device-memory", "0"), 1, "too small"),
        (("--shape", "llama-2-70b", "--device-memory", "1MB"), 1, "(2757860800 bytes) too small"),
        (("--shape", "llama-2-7b", "--tau", "0.5"), 2, "0.5 is not in the range"),
        (("./nowhere",), 1, "no folder nowhere"),
        (("--shape", "llama-2-7b", "--head-bits", "5"), 2, "'5' is not one of 16, 8 and 4"),
        (("--shape", "llama-2-7b", "--draft-vocab", "15"), 2, "'15' is neither all nor a number of tokens from 16 on"),
        (("--shape", "llama-2-7b", "--draft-vocab", "most"), 2, "'most' is neither all nor a number of tokens"),
        (("--shape", "llama-2-7b", "--head-bits", "16", "--draft-vocab", "all"), 1, "set head_bits 8 or 4 with it"),
        (("--shape", "llama-2-7b", "--draft-vocab", "32001"), 1, "from 16 to the model's 32000 tokens, not 32001"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], code: int, words: str) -> None:
    found, out, err = run(*arguments)
    assert (found, out) == (code, "") and words in err and "Traceback" not in err


def test_auto_asks_the_machine_and_leaves_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 << 30, total=16 << 30))
    code, out, _ = run("--shape", "llama-2-7b", "--device-memory", " AUTO", "--json")
    assert code == 0 and json.loads(out)["device_memory"] == 8 << 30


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA says")
def test_auto_for_a_device_that_is_not_there_is_said() -> None:
    code, _, err = run("--shape", "llama-2-7b", "--device", "cuda", "--device-memory", "auto")
    assert code == 1 and "torch sees none; give a size such as 8GiB" in err


def test_one_of_several_weight_files_can_be_named(tiny_folder: Path) -> None:
    shutil.copy(tiny_folder / "model.safetensors", tiny_folder / "other.safetensors")
    code, _, err = run(str(tiny_folder))
    assert code == 1 and "--weights FILE" in err
    assert run(str(tiny_folder), "--weights", "other.safetensors")[0] == 0


def test_an_exact_fit_fits_and_one_byte_less_does_not() -> None:
    fixed = ("--shape", "llama-2-7b", "--exit-layer", "4", "--json", "--device-memory")
    first = json.loads(run(*fixed, "4GiB")[1])["plan"]
    exact = json.loads(run(*fixed, str(first["total_bytes"]))[1])["plan"]
    assert exact["tiers"] == first["tiers"]
    less = json.loads(run(*fixed, str(first["total_bytes"] - 1))[1])["plan"]
    assert less["resident_layers"] < first["resident_layers"] or less["ring_slots"] < first["ring_slots"]


@pytest.mark.parametrize("arguments", [("--shape", "qwen2.5-72b", "--preset", "16gb"), ("{folder}",)])
def test_planning_imports_no_torch(arguments: tuple[str, ...], tiny_folder: Path) -> None:
    words = [argument.format(folder=tiny_folder) for argument in arguments]
    code = (
        "import sys; from cli.main import eesd\n"
        f"try: eesd({['plan', *words]!r}, prog_name='eesd')\n"
        "except SystemExit as end: print(end.code, [m for m in ('torch', 'transformers', 'numba') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.stdout.splitlines()[-1] == "0 []", result.stderr


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    from tests.tiny import TinySpec, build

    return build(tmp_path / "model", TinySpec(layers=3)).folder


AUTO = ("--shape", "llama-2-70b", "--preset", "24gb", "--exit-layer", "auto", "--agreement", "26=0.53,40=0.53,53=0.73")


def test_auto_shows_what_every_exit_promises_and_plans_for_the_best() -> None:
    code, out, err = run(*AUTO)
    assert (code, err) == (0, "")
    assert "llama-2-70b: 80 layers, context 2048, drafts at exit layer 26" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith("  ") and line.strip()}
    assert rows["plain"][:4] == ["plain", "-", "47", "0.600"]
    assert rows["*"][1:4] == ["26", "0.424", "42"] and rows["53"][2:] == ["-"] * 7
    assert "  exit 53: needs 4.24 GiB more" in out
    assert (
        "  by --disk-rate 3000000000 --layer-time 100 --token-time 500 --link-rate 25000000000 --host-rate 20000000000"
        in out
    )


def test_auto_as_json_follows_the_rates() -> None:
    found = json.loads(run(*AUTO, "--json")[1])
    assert found["exits"]["chosen"] == found["plan"]["exit_layer"] == 26
    assert [row["exit_layer"] for row in found["exits"]["rows"]] == [None, 26, 40, 53]
    assert found["exits"]["rates"]["link"] == 25 * 10**9
    # Where a pass through resident layers costs little, the deeper head's better guesses win.
    better = [*AUTO[:-1], "26=0.53,40=0.6"]
    assert json.loads(run(*better, "--json", "--layer-time", "0")[1])["exits"]["chosen"] == 40
    slow = json.loads(run(*better, "--json", "--layer-time", "0", "--device-rate", "30GB", "--row", "0.5")[1])
    assert slow["exits"]["chosen"] is None and slow["exits"]["rates"]["row"] == 0.5  # rows as dear as on a CPU


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--shape", "llama-2-7b", "--exit-layer", "auto"), 1, "there are none; see eesd train or --agreement"),
        (("--shape", "llama-2-7b", "--exit-layer", "deep"), 2, "neither auto nor a number of layers"),
        (("--shape", "llama-2-7b", "--exit-layer", "auto", "--agreement", "8"), 2, "write for example 13=0.53"),
        (("--shape", "llama-2-7b", "--exit-layer", "auto", "--agreement", "8=2"), 2, "an agreement is from 0 to 1"),
        (
            ("--shape", "llama-2-7b", "--exit-layer", "auto", "--agreement", "8=0.5,8=0.6"),
            2,
            "exit layer 8 is named twice",
        ),
        (
            ("--shape", "llama-2-7b", "--exit-layer", "auto", "--agreement", "32=0.5"),
            1,
            "has 32 layers, exits are 1 to 31",
        ),
        (
            ("--shape", "llama-2-7b", "--exit-layer", "32"),
            1,
            "exit layer 32: this model has 32 layers, exits are 1 to 31",
        ),
        (
            ("--shape", "llama-2-7b", "--exit-layer", "8,auto"),
            2,
            "'auto' is no number of layers from 1 on; write 20, 10,20",
        ),
        (("--shape", "llama-2-7b", "--exit-layer", "8,"), 2, "'' is no number of layers from 1 on"),
        (
            ("--shape", "llama-2-7b", "--resident-layers", "33"),
            1,
            "33 resident layers were asked for; this model has 32",
        ),
        (("--shape", "llama-2-7b", "--exit-layer", "8", "--row", "nan"), 2, "nan is not in the range 0<=x<=1"),
        (("--shape", "llama-2-7b", "--tau", "nan"), 2, "nan is not in the range x>=1"),
        (("--shape", "llama-2-7b", "--agreement", "8=0.5"), 2, "--agreement goes with --exit-layer auto"),
        (("--shape", "llama-2-7b", "--head", "x"), 2, "--head goes with MODEL"),
        (("{folder}", "--head", "no-such-file"), 1, "no-such-file: no such head file"),
        (("{folder}", "--head", "{folder}"), 1, "no head files in this folder"),
    ],
)
def test_mistakes_about_exits_are_one_line(
    tiny_folder: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    found, out, err = run(*(argument.format(folder=tiny_folder) for argument in arguments))
    assert (found, out) == (code, "") and words in err and "Traceback" not in err
