"""Stop strings and half characters through the whole engine: at every alignment to a block, and what comes after.

The target's choice is scripted, so that texts are known; the model underneath runs as always, caches included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from eesd_lite import SamplingParams
from eesd_lite.engine import Engine
from tests.puppets import assert_caches_are_those_of, caches, drafting, ids_of, plain_ids, right
from tests.tiny import TinySpec

OPTIONS: dict[str, Any] = {"head": "random", "exit_layer": 2, "resident_layers": 2}
PROMPT = list(b"Say it")
EngineOf = Callable[..., Engine]


@contextmanager
def scripted(engine: Engine, text: str) -> Iterator[list[int]]:
    """The target says `text` and then its EOS, whatever its logits are. Yields the ids."""
    ids = engine.text.encode(text, add_bos=False)
    script = PROMPT + ids + [min(engine.text.eos_token_ids)] * 40
    engine._choose = lambda sampler: lambda logits, position, history: script[position]  # type: ignore[method-assign]
    try:
        with drafting(engine, right(script)):
            yield ids
    finally:
        del engine._choose


def answer(engine: Engine, **settings: Any) -> tuple[str, list[int], str | None]:
    events = list(engine.generate(PROMPT, SamplingParams(**settings)))
    assert engine.stats.balanced(), engine.stats
    ids = [event.token_id for event in events if event.token_id is not None]
    return "".join(event.text for event in events), ids, events[-1].finish_reason


@pytest.mark.parametrize("length", range(9))
def test_a_stop_string_is_found_at_every_alignment_to_the_block(engine_of: EngineOf, length: int) -> None:
    engine = engine_of(TinySpec(), **OPTIONS)
    engine.set_controller(f"fixed:{length}")
    for before in range(10):
        with scripted(engine, "." * before + "Xyz and more text than that") as ids:
            text, shown, reason = answer(engine, stop=("Xyz",))
            assert (text, reason) == ("." * before, "stop")
            assert shown == ids[:before]
            held = list(engine.cached_ids)
            assert held == (PROMPT + shown)[: len(held)]
            assert_caches_are_those_of(engine, held, caches(engine, len(held)))


@pytest.mark.parametrize("length", [0, 2, 5])
def test_after_a_stop_the_next_turn_equals_a_fresh_run_on_the_visible_history(engine_of: EngineOf, length: int) -> None:
    engine = engine_of(TinySpec(), **OPTIONS)
    engine.set_controller(f"fixed:{length}")
    with scripted(engine, "visible stop! hidden") as ids:
        text, shown, _ = answer(engine, stop=("stop",))
        assert text == "visible " and shown == ids[:8]
    follow_up = PROMPT + shown + list(b"?")
    settings = SamplingParams(max_new_tokens=8, ignore_eos=True)
    assert ids_of(engine, follow_up, settings) == plain_ids(engine, follow_up, settings)


@pytest.mark.parametrize("length", [0, 3, 8])
def test_a_stop_string_that_ends_inside_a_token_is_found(engine_of: EngineOf, length: int) -> None:
    engine = engine_of(TinySpec(), **OPTIONS)
    engine.set_controller(f"fixed:{length}")
    with scripted(engine, "Now stop!") as ids:
        assert ids[4:] == engine.text.encode("stop!", add_bos=False) and len(ids) == 5, "stop! is one token"
        assert answer(engine, stop=("stop",)) == ("Now ", ids[:4], "stop")
        engine.reset()
        assert answer(engine, stop=("w st",))[0] == "No"


@pytest.mark.parametrize("length", range(0, 9, 2))
def test_half_a_character_is_never_shown_and_nothing_is_lost(engine_of: EngineOf, length: int) -> None:
    engine = engine_of(TinySpec(), **OPTIONS)
    engine.set_controller(f"fixed:{length}")
    text = "a\U0001f642\u00fc\u65e5 b\U0001f643"
    with scripted(engine, text) as ids:
        assert len(ids) == 4 + 2 + 3 + 4 + 3
        events = list(engine.generate(PROMPT, SamplingParams()))
        assert "".join(event.text for event in events) == text
        assert not any("\ufffd" in event.text for event in events)
        for cap in range(1, len(ids) + 1):
            cut = "".join(event.text for event in engine.generate(PROMPT, SamplingParams(max_new_tokens=cap)))
            assert cut == engine.text.decode(ids[:cap])


def test_stop_strings_beside_emojis_cut_between_characters(engine_of: EngineOf) -> None:
    engine = engine_of(TinySpec(), **OPTIONS)
    engine.set_controller("fixed:3")
    with scripted(engine, "ab\U0001f642cd\U0001f643ef"):
        assert answer(engine, stop=("\U0001f643",))[0] == "ab\U0001f642cd"
        assert answer(engine, stop=("cd",))[0] == "ab\U0001f642"
        assert answer(engine, stop=("\U0001f642c",))[0] == "ab"


@pytest.mark.parametrize("length", [0, 4])
def test_no_stop_and_the_script_ends_with_eos(engine_of: EngineOf, length: int) -> None:
    engine = engine_of(TinySpec(), **OPTIONS)
    engine.set_controller(f"fixed:{length}")
    with scripted(engine, "the end") as ids:
        text, shown, reason = answer(engine, stop=("not there",))
        assert (text, reason) == ("the end", "eos")
        assert shown == [*ids, min(engine.text.eos_token_ids)]
