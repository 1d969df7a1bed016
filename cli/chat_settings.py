"""What `eesd-chat` was asked for, and the settings that can change while it runs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eesd_lite.controller import any_controller
from eesd_lite.errors import EesdError, PromptError
from eesd_lite.params import SamplingParams

_NUMBERS: dict[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "repetition_penalty": float,
    "seed": int,
    "max_new_tokens": int,
}
SETTABLE = (*_NUMBERS, "stop", "controller", "markdown")
_SWITCH = {"on": True, "yes": True, "true": True, "1": True, "off": False, "no": False, "false": False, "0": False}


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """All arguments; None leaves a choice to the engine. `explicit` are those that were given, not defaults."""

    model: str
    params: SamplingParams
    prompt: str | None = None
    system: str | None = None
    session: str | None = None
    device: str = "cpu"
    device_memory: int | None = None
    host_memory: int | None = None
    host_mode: str = "auto"
    plan_file: str | None = None
    resident_layers: int | None = None
    exit_layer: int | str | tuple[int, ...] | None = None
    controller: str = "calibrated"
    head: str | None = None
    drafter: str = "head"
    draft_vocab: int | str | None = None
    head_bits: int | None = None
    force_head: bool = False
    weights: str | None = None
    quantize: str | None = None
    context: int | None = None
    threads: int | None = None
    template: str | None = None
    throttle: int | None = None
    markdown: bool = True
    json: bool = False
    plan: bool = False
    explicit: frozenset[str] = field(default_factory=frozenset)

    def value(self, name: str) -> Any:
        """One of SETTABLE."""
        return getattr(self.params, name) if hasattr(self.params, name) else getattr(self, name)

    def changed(self, name: str, value: Any) -> ChatSettings:
        """With another value, checked; EesdError says what is wrong with it."""
        if name in _NUMBERS or name == "stop":
            return replace(self, params=replace(self.params, **{name: value}))
        if name == "controller":
            any_controller(value)
        elif not isinstance(value, bool):
            raise PromptError(f"{name} is on or off, not {value!r}")
        return replace(self, **{name: value})


def setting_name(text: str) -> str:
    """A setting as a user types it; PromptError says the nearest one."""
    name = text.lower().lstrip("-").replace("-", "_")
    if name in SETTABLE:
        return name
    near = difflib.get_close_matches(name, SETTABLE, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(SETTABLE)}"
    raise PromptError(f"no setting {text!r}; {hint}")


def parse_setting(name: str, text: str) -> Any:
    """The value of a setting as a user types it."""
    text = text.strip()
    if name == "stop":
        return () if text in ("", "off") else (text,)
    if name == "controller":
        return text
    if name == "markdown":
        if text.lower() not in _SWITCH:
            raise PromptError(f"{name} is on or off, not {text!r}")
        return _SWITCH[text.lower()]
    kind = _NUMBERS[name]
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise PromptError(f"{name} must be {what}, not {text!r}") from None


def with_saved(settings: ChatSettings, saved: Mapping[str, Any]) -> ChatSettings:
    """Settings of a saved session, except where an argument says otherwise; what is not right there is left out."""
    for name, value in saved.items():
        if name in SETTABLE and name not in settings.explicit:
            try:
                settings = settings.changed(name, tuple(value) if isinstance(value, list) else value)
            except (EesdError, TypeError, ValueError, AttributeError):
                continue
    return settings
