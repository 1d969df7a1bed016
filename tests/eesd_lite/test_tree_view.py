"""`eesd tree`: the picture says what the round was, and mistakes are one line."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from cli.main import eesd
from cli.tree import picture
from eesd_lite import SamplingParams
from eesd_lite.engine import Engine
from eesd_lite.errors import EesdError
from eesd_lite.tree_view import NodeView, RoundView, record_round
from tests.puppets import plain_ids
from tests.tiny import Tiny, TinySpec

SPEC = TinySpec(layers=5)
OPTIONS: dict[str, Any] = {"head": "random", "exit_layer": 2, "resident_layers": 3, "draft_limit": 64}
PROMPT = list(b"Draw me a tree")


def test_a_picture_marks_the_accepted_path_and_adds_the_targets_own_token() -> None:
    nodes = (
        NodeView(" Paris", -1, 1.0, True, True),
        NodeView(".", 0, 0.5, True, True),
        NodeView(",", 0, 0.25, False, False),
        NodeView("\n", 1, 0.125, False, False),
    )
    view = RoundView(2, "is Paris", nodes, (".", " It"), 2, 0.010, 0.020, 0.001, 5_000_000)
    console = Console(file=io.StringIO(), width=120)
    console.print(picture(view))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert [line.rstrip() for line in text.splitlines()] == [
        'round 2, after: ...is Paris"',
        '" Paris"',
        '├── "."  0.500  kept',
        '│   ├── "\\n"  0.125',
        '│   └── " It"  the target\'s own',
        '└── ","  0.250',
        "",
        "3 proposed, 1 kept, 2 tokens emitted",
        "draft 10.0 ms (head at 2 nodes, 2 steps below the exit), verify 20.0 ms (4 rows, 5 MB read), accept 1.0 ms",
    ]


@pytest.mark.parametrize("controller", ["tree:9", "fixed:3", "off"])
def test_the_recorded_round_is_what_the_engine_did(engine_of: Callable[..., Engine], controller: str) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    expected = plain_ids(engine, PROMPT, params)
    engine.set_controller(controller)
    before = engine.stats.snapshot()
    view = record_round(engine, PROMPT, params, 2)
    assert engine.stats.since(before).rounds == 2 and view.number == 2
    place = len(engine.last_round.visible) - len(PROMPT)  # type: ignore[union-attr]
    said = expected[place : place + len(view.emitted)]
    assert list(view.emitted) == [engine.text.decode([token]) or f"<{token}>" for token in said]
    assert [node.text for node in view.nodes if node.accepted][1:] == list(view.emitted[:-1])
    assert view.drafted == {"tree:9": 9, "fixed:3": 3, "off": 0}[controller]
    assert (view.nodes[-1].reach is not None) == (controller == "tree:9")
    assert min(view.draft_seconds, view.verify_seconds, view.accept_seconds) > 0
    assert view.sweep_bytes == engine.plan.sweep_bytes


def test_a_round_beyond_the_answer_and_a_model_that_drafts_nothing_are_errors(engine_of: Callable[..., Engine]) -> None:
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    with pytest.raises(EesdError, match="ended after [0-9] rounds; there is no round 40"):
        record_round(engine_of(SPEC, **OPTIONS, controller="tree:2"), PROMPT, params, 40)
    with pytest.raises(EesdError, match="nothing is drafted here"):
        record_round(engine_of(SPEC), PROMPT, params, 1)


def run(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    monkeypatch.setenv("EESD_HOME", str(tiny.home))
    command = ["tree", str(tiny.folder), "-p", "Hello", "--head", "random", "--exit-layer", "2", *arguments]
    return CliRunner().invoke(eesd, command, prog_name="eesd")


def test_the_program_draws_in_the_terminal_and_into_a_file(
    tiny_of: Callable[[TinySpec], Tiny], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny = tiny_of(SPEC)
    shown = run(tiny, monkeypatch, "--round", "1", "--controller", "tree:5")
    assert shown.exit_code == 0 and "5 proposed" in shown.stdout and "the target's own" in shown.stdout
    assert "\x1b" not in shown.stdout
    path = tmp_path / "round.svg"
    drawn = run(tiny, monkeypatch, "--round", "1", "--svg", str(path))
    assert drawn.exit_code == 0 and drawn.stdout == ""
    svg = path.read_text(encoding="utf-8")
    assert svg.startswith("<svg") and "proposed" in svg and not re.search(r"url\(.?http", svg)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--svg", "/nowhere/x.svg"), "there is no folder /nowhere"),
        (("--controller", "oak"), "there is no controller 'oak'"),
        (("--round", "9999"), "there is no round 9999"),
        (("--head", "/nowhere/head.safetensors"), "/nowhere/head.safetensors"),
    ],
)
def test_mistakes_are_one_line(
    tiny_of: Callable[[TinySpec], Tiny], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    failed = run(tiny_of(SPEC), monkeypatch, *arguments)
    assert failed.exit_code == 1 and failed.stdout == ""
    assert message in failed.stderr.splitlines()[-1] and "Traceback" not in failed.stderr
