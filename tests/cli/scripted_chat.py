"""`eesd-chat` with a scripted engine: python -m tests.cli.scripted_chat FOLDER [arguments of eesd-chat].

FOLDER holds a tiny tokenizer and script.json: the answers, and how slow or faulty the engine is. Every prompt and what
was emitted for it is appended to FOLDER/turns.jsonl, for tests to compare with what was shown. No torch anywhere.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cli.chat import make_command
from cli.chat_settings import ChatSettings
from eesd_lite.emitter import Emitter, TokenEvent
from eesd_lite.errors import ModelError, StreamError
from eesd_lite.params import SamplingParams
from eesd_lite.progress import Progress
from eesd_lite.stats import Stats
from eesd_lite.text import TextCodec
from eesd_lite.tiers import DEVICE, DISK, Plan


@dataclass(frozen=True)
class Script:
    """`answers` are given in turn, the last one again and again."""

    answers: list[str] = field(default_factory=lambda: ["Hello world"])
    load_seconds: float = 0.0
    prefill_seconds: float = 0.0
    token_seconds: float = 0.0
    fail_after: int | None = None  # tokens
    end: int = 2  # the token after every answer
    context: int = 512
    notices: list[str] = field(default_factory=list)
    drafting: bool = False  # every third token is drafted, every third one a correction of " wrong"
    broken_models: list[str] = field(default_factory=list)  # names that cannot be opened


class ScriptedEngine:
    """The part of Engine that the chat uses; what it says does not depend on the prompt."""

    def __init__(self, folder: Path, script: Script, template: str | None, controller: str) -> None:
        self.text = TextCodec.from_folder(folder, template=template)
        self.stats = Stats()
        self.notices = tuple(script.notices)
        self.plan = Plan(
            tiers=(DEVICE,) * 2 + (DISK,) * 2, resident_layers=2, exit_layer=2, context=script.context, ring_slots=2,
            items=(("resident layers", 2 << 20), ("KV cache", 1 << 20)), total_bytes=3 << 20, sweep_bytes=1 << 20,
        )  # fmt: skip
        self.controller_spec = controller
        self.cached_ids: tuple[int, ...] = ()
        self._folder, self._script, self._asked = folder, script, 0

    def generate(self, prompt: Sequence[int], params: SamplingParams, progress: Progress) -> Iterator[TokenEvent]:
        answer = self._script.answers[min(self._asked, len(self._script.answers) - 1)]
        self._asked += 1
        emitter = Emitter(params, self.text.eos_token_ids, self.text.stream())
        try:
            for layer in range(4):
                progress(f"reading {len(prompt)} tokens, layer", layer + 1, 4)
                time.sleep(self._script.prefill_seconds / 4)
            for count, token in enumerate([*self.text.encode(answer, add_bos=False), self._script.end]):
                time.sleep(self._script.token_seconds)
                if count == self._script.fail_after:
                    raise StreamError("layer 3 could not be read")
                if count == params.max_new_tokens:
                    yield from emitter.finish("length")
                if emitter.finished:
                    break
                kind = count % 3 if self._script.drafting else 0
                rejected = self.text.encode(" wrong", add_bos=False) if kind == 2 else ()
                yield from emitter.push(token, kind == 1, tuple(rejected))
        finally:
            self.stats.emitted += len(emitter.emitted_ids)
            self.stats.verify_offloaded_bytes += 1 << 20
            self.cached_ids = (*prompt, *emitter.emitted_ids)
            turn = {"prompt": list(prompt), "emitted": emitter.emitted_ids, "params": vars(params)}
            with (self._folder / "turns.jsonl").open("a") as file:
                file.write(json.dumps(turn) + "\n")

    def set_controller(self, spec: str) -> None:
        self.controller_spec = spec

    def save_prefix(self, path: Path) -> None:
        path.write_text(json.dumps(self.cached_ids))

    def load_prefix(self, path: Path) -> int:
        self.cached_ids = tuple(json.loads(path.read_text())) if path.exists() else ()
        return len(self.cached_ids)

    def reset(self) -> None:
        self._asked, self.cached_ids = 0, ()

    def close(self) -> None:
        (self._folder / "closed").touch()


def main() -> None:
    folder = Path(sys.argv.pop(1))
    script = Script(**json.loads((folder / "script.json").read_text(encoding="utf-8")))

    def open_engine(settings: ChatSettings, progress: Progress) -> ScriptedEngine:
        if settings.model in script.broken_models:
            raise ModelError(f"{settings.model}: no such model")
        for layer in range(4):
            progress("loading layer", layer, 4)
            time.sleep(script.load_seconds / 4)
        return ScriptedEngine(folder, script, settings.template, settings.controller)

    make_command(open_engine)(prog_name="eesd-chat")


if __name__ == "__main__":
    main()
