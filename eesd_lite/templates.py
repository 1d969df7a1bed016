"""Chat templates: the model's own Jinja template, or one of five named layouts for models that come without.

Templates are code from a download, so they run in Jinja's sandbox and within limits, with the helpers that Hugging Face
templates expect (`raise_exception`, `strftime_now`, `tojson`, the `generation` block). Rendering gives text; making
token ids of it, with message contents kept apart from control tokens, is the business of `eesd_lite.text`, the only
caller.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eesd_lite.errors import ModelError, PromptError
from quant.errors import remedy, shown

if TYPE_CHECKING:
    import jinja2

    from eesd_lite.template_limits import BoundedEnvironment

Message = Mapping[str, str]


class TemplateLimitError(PromptError):
    """The template takes more time or memory than any chat needs (see `eesd_lite.template_limits`)."""


class TemplateRefusal(Exception):
    """The template called raise_exception: these roles, or their order, are not what it supports."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template; `stop` are texts that end an answer where the layout has no control token for it."""

    name: str
    source: str
    stop: tuple[str, ...] = ()

    def render(
        self, messages: Sequence[Message], *, special: Mapping[str, str], add_generation_prompt: bool = True
    ) -> str:
        """The whole conversation as text; TemplateRefusal when the template says no, PromptError when it is broken."""
        environment, template = _compiled(self.source)
        values = {"messages": list(messages), "add_generation_prompt": add_generation_prompt, **special}
        try:
            return environment.render(template, values, sum(len(message["content"]) for message in messages))
        except TemplateRefusal:
            raise
        except Exception as error:  # a template is a program out of a download: it may fail in any way
            raise _failure(error, self.name) from error


def own_template(folder: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    """The template in a model folder: chat_template.jinja, chat_template.json, or in tokenizer_config.json.

    ModelError names a file that cannot be read.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate("own", _text(path))
    found = settings.get("chat_template")
    path = folder / "chat_template.json"
    if not found and path.is_file():
        try:
            found = json.loads(_text(path))
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not readable JSON ({error}); fetch the file again") from None
        found = found.get("chat_template") if isinstance(found, dict) else None
    if isinstance(found, list):  # several named ones; "default" is the one for talking
        entries = [entry for entry in found if isinstance(entry, dict) and isinstance(entry.get("name"), str)]
        named = {entry["name"]: entry.get("template") for entry in entries}
        found = named.get("default") or next(iter(named.values()), None)
    return ChatTemplate("own", found) if isinstance(found, str) and found.strip() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read ({error}); {remedy(error)}") from None


def fallback_template(name: str) -> ChatTemplate:
    """One of the named layouts, or a PromptError that lists them."""
    if name not in FALLBACKS:
        raise PromptError(f"no chat template named {name!r}; known: {', '.join(FALLBACKS)}")
    return FALLBACKS[name]


def _failure(error: Exception, name: str) -> PromptError:
    from eesd_lite.template_limits import LimitError

    others = ", ".join(FALLBACKS)
    if isinstance(error, LimitError):
        return TemplateLimitError(f"the chat template {name!r} is stopped: {error}; try one of {others}")
    reason = "it calls itself without end" if isinstance(error, RecursionError) else str(error)
    reason = shown(" ".join(reason.split()) or type(error).__name__, 200)
    return PromptError(f"the chat template {name!r} fails: {reason}; try one of {others}")


@lru_cache(maxsize=8)
def _compiled(source: str) -> tuple[BoundedEnvironment, jinja2.Template]:
    from eesd_lite.template_limits import BoundedEnvironment

    environment = BoundedEnvironment()
    environment.add_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        return environment, environment.bounded_template(source)
    except Exception as error:  # SyntaxError, RecursionError, ... besides Jinja's own
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ModelError(
            f"the model's chat template cannot be read: {shown(' '.join(reason.split()), 200)}; "
            f"choose one by name: {', '.join(FALLBACKS)}"
        ) from error


def _refuse(message: object) -> None:
    raise TemplateRefusal(str(message))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes for HTML.
    if isinstance(indent, int) and indent > 100:
        raise ValueError(f"tojson with an indent of {indent}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _now(pattern: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(pattern)


# Written without line breaks between the pieces: Jinja would keep the ones after an expression.
_PLAIN = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content + '\n\n' }}"
    "{% elif m.role == 'user' %}{{ 'User: ' + m.content + '\n' }}"
    "{% else %}{{ 'Assistant: ' + m.content + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

_LLAMA2 = (
    "{% set ns = namespace(system='') %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}"
    "{% elif m.role == 'user' %}{{ (bos_token or '') + '[INST] ' + ns.system + m.content + ' [/INST]' }}"
    "{% set ns.system = '' %}"
    "{% else %}{{ ' ' + m.content + ' ' + (eos_token or '') }}{% endif %}"
    "{% endfor %}"
)

_VICUNA = (
    "{% if messages and messages[0].role != 'system' %}"
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
    "{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content + ' ' }}"
    "{% elif m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + m.content + (eos_token or '\n') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)

_ALPACA = (
    "{% if messages and messages[0].role != 'system' %}"
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content + '\n\n' }}"
    "{% elif m.role == 'user' %}{{ '### Instruction:\n' + m.content + '\n\n' }}"
    "{% else %}{{ '### Response:\n' + m.content + (eos_token or '') + '\n\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)

_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The layouts that models without a template were most often trained with. A stop text is the start of the next turn:
# base models never end a turn themselves.
FALLBACKS: dict[str, ChatTemplate] = {
    template.name: template
    for template in (
        ChatTemplate("plain", _PLAIN, stop=("\nUser:",)),
        ChatTemplate("llama2", _LLAMA2, stop=("[INST]",)),
        ChatTemplate("vicuna", _VICUNA, stop=("\nUSER:", " USER:")),
        ChatTemplate("alpaca", _ALPACA, stop=("### Instruction:",)),
        ChatTemplate("chatml", _CHATML, stop=("<|im_end|>", "<|im_start|>")),
    )
}
