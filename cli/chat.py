"""`eesd-chat`: talk to a model whose deeper layers need not fit into memory.

Three ways in: a terminal (several turns), `-p TEXT` (one question, stdin is not touched), or piped stdin, which as a
whole is one question. The answer goes to stdout, everything else to stderr. Argument parsing imports nothing heavy.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from cli.chat_config import apply_config, config_path
from cli.chat_file import NamedSession, read_chat, session_names
from cli.chat_settings import ChatSettings
from cli.common import (
    INTERRUPTED,
    ExitLayer,
    Rate,
    Size,
    draft_vocab_option,
    drafter_option,
    head_bits_option,
    is_terminal,
    program_name,
    quantize_option,
    reports_errors,
    weights_option,
)
from cli.interrupts import Terminated, raising_terminated
from cli.render import ProgressDisplay
from cli.session import ChatEngine, note
from cli.start import start
from cli.talk import Chat, OpenEngine, open_chat, talk
from eesd_lite.controller import any_controller
from eesd_lite.errors import EesdError
from eesd_lite.params import SamplingParams
from eesd_lite.progress import Progress
from eesd_lite.templates import FALLBACKS
from eesd_lite.tiers import HOST_MODES

_CONTROLLERS = ("calibrated", "beta", "tree", "fixed:4", "hf", "off")


def open_engine(settings: ChatSettings, progress: Progress) -> ChatEngine:
    """The real engine. This is where torch is imported."""
    from eesd_lite import Engine

    return Engine.from_pretrained(
        settings.model,
        device=settings.device,
        device_memory=settings.device_memory,
        host_memory=settings.host_memory,
        host_mode=settings.host_mode,
        plan_file=settings.plan_file,
        resident_layers=settings.resident_layers,
        exit_layer=settings.exit_layer,
        head=settings.head,
        drafter=settings.drafter,
        force_head=settings.force_head,
        weights=settings.weights,
        quantize=settings.quantize,
        draft_vocab=settings.draft_vocab,
        head_bits=settings.head_bits,
        controller=settings.controller,
        context=settings.context,
        threads=settings.threads,
        throttle=settings.throttle,
        template=settings.template,
        progress=progress,
    )


def run(settings: ChatSettings, open_engine: OpenEngine = open_engine) -> int:
    """The program after its arguments; returns the exit code."""
    question = settings.prompt
    if question is None and not settings.plan and not is_terminal(sys.stdin):
        question = _read_stdin()
        if not question.strip():
            note("standard input is empty: nothing to answer")
            return 0
    progress = ProgressDisplay()
    try:
        with raising_terminated():
            chat = open_chat(settings, progress, open_engine)
            try:
                return _use(chat, question)
            finally:
                progress.stop()
                chat.leave()
    except Terminated as ended:
        with suppress(OSError):  # a terminal that was closed shows nothing any more
            note("asked to end" + (f"; session {settings.session!r} is saved" if settings.session else ""))
        return ended.exit_code


def _use(chat: Chat, question: str | None) -> int:
    if chat.settings.plan:
        click.echo("\n".join(chat.plan_lines()))
        return 0
    if question is None:
        return talk(chat)
    chat.answer(question)
    return INTERRUPTED if chat.session.interrupted else 0


def _read_stdin() -> str:
    """All of a pipe or file as one question; says so if that takes a while."""
    if sys.stdin is None or sys.stdin.closed:
        return ""
    name = program_name()
    hint = threading.Timer(
        1.0, lambda: click.echo(f"{name}: reading the question from standard input, up to its end", err=True)
    )
    hint.daemon = True
    hint.start()
    try:
        return sys.stdin.read().removeprefix("\ufeff").rstrip("\r\n")
    finally:
        hint.cancel()


def make_command(open_engine: OpenEngine = open_engine) -> click.Command:
    """The click command; tests pass an engine of their own."""

    @click.command("eesd-chat", epilog=_EPILOG, context_settings={"auto_envvar_prefix": "EESD_CHAT"})
    @click.argument("model", required=False, shell_complete=_complete_model)
    @click.option("-p", "--prompt", metavar="TEXT", help="Answer this one question and exit; stdin is not read.")
    @click.option("--system", metavar="TEXT", help="System prompt.")
    @click.option(
        "--session",
        metavar="NAME",
        shell_complete=_complete_session,
        help="Keep the conversation, and go on with it next time.",
    )
    @click.option("--device", default="cpu", show_default=True, metavar="NAME", help="Where to compute: cpu or cuda.")
    @click.option("--device-memory", type=Size(), help="Memory for weights and cache, as 64MiB, 8GB or auto.")
    @click.option("--host-memory", type=Size(), help="With cuda: memory for layers that do not fit the device.")
    @click.option(
        "--host-mode",
        type=click.Choice(list(HOST_MODES)),
        default="auto",
        show_default=True,
        help="What happens to layers in host memory.",
    )
    @click.option("--plan-file", metavar="FILE", help="Repeat the placement in this file, or write it there.")
    @click.option("--resident-layers", type=click.IntRange(min=0), metavar="N", help="Keep N layers in memory.")
    @click.option("--exit-layer", type=ExitLayer(), metavar="N|N,M|auto",
                  help="Draft with the layers before N; N,M: by turns; auto: where it promises most.")  # fmt: skip
    @click.option(
        "--controller",
        default="calibrated",
        show_default=True,
        metavar="NAME",
        callback=_controller,
        shell_complete=lambda context, parameter, incomplete: [c for c in _CONTROLLERS if c.startswith(incomplete)],
        help="How much to draft: calibrated, beta, fixed:K, hf or off; tree and tree:NODES draft branches.",
    )
    @click.option("--head", metavar="PATH|off|instant", help="Exit head file or folder; instant: make one now.")
    @drafter_option
    @draft_vocab_option
    @head_bits_option
    @click.option("--force-head", is_flag=True, help="Take a head made for another model (can only cost speed).")
    @weights_option
    @quantize_option
    @click.option("--temperature", type=float, default=0.7, show_default=True, help="0 is greedy.")
    @click.option("--top-k", type=int, default=50, show_default=True, help="0: no limit.")
    @click.option("--top-p", type=float, default=1.0, show_default=True, help="1: no limit.")
    @click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="1: none.")
    @click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same answer.")
    @click.option("--max-new-tokens", type=int, default=512, show_default=True, help="Longest answer.")
    @click.option("--context", type=click.IntRange(min=1), metavar="TOKENS", help="Room for the conversation.")
    @click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads.")
    @click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text; repeatable.")
    @click.option("--template", type=click.Choice(list(FALLBACKS)), help="Chat layout, instead of the model's own.")
    @click.option("--throttle", type=Rate(), help="Read offloaded layers no faster than this, as 200MB/s.")
    @click.option("--json", is_flag=True, help="One JSON object per answer: text, ids, finish reason, statistics.")
    @click.option("--plan", is_flag=True, help="Say which bytes go where, and exit.")
    @click.option("--plain", is_flag=True, help="Show Markdown as it is written.")
    @click.option("--no-color", is_flag=True, help="No colours; so does the variable NO_COLOR.")
    @reports_errors
    def eesd_chat(**options: Any) -> None:
        """Talk to MODEL: a recipe's name, a folder, or a Hugging Face Hub id.

        Without -p and with a pipe or file as standard input, all of it is one question. The answer goes to standard
        output, everything else to standard error.
        """
        sys.exit(run(_settings(click.get_current_context(), options), open_engine))

    return eesd_chat


def _settings(context: click.Context, options: dict[str, Any]) -> ChatSettings:
    """Everything that can be wrong with the arguments themselves is found here."""
    explicit = apply_config(context, options)
    if not options["model"] and options["session"]:
        path = NamedSession(options["session"]).path
        options["model"] = read_chat(path).model if path.exists() else None
    if not options["model"]:
        from cli.model_list import model_lines

        click.echo("\n".join(model_lines()), err=True)
        raise click.UsageError("which model?")
    for name, other in (("device_memory", "resident_layers"), ("resident_layers", "device_memory")):
        if name in explicit and other not in explicit:
            options[other] = None  # what was typed now is meant, not what the file says
    if options["device_memory"] is not None and options["resident_layers"] is not None:
        raise click.UsageError("--device-memory and --resident-layers exclude each other")
    if options["prompt"] is not None and not options["prompt"].strip():
        raise click.UsageError("the text after -p is empty")
    if options.pop("no_color"):
        os.environ["NO_COLOR"] = "1"
    options["markdown"] = not options.pop("plain")
    sampling = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed", "stop")
    try:
        params = SamplingParams(**{name: options.pop(name) for name in sampling})
    except EesdError as error:
        raise click.UsageError(str(error)) from error
    explicit |= {"markdown"} if "plain" in explicit else set()
    return ChatSettings(params=params, explicit=explicit, **options)


def _controller(context: click.Context, parameter: click.Parameter, value: str) -> str:
    try:
        any_controller(value)
    except EesdError as error:
        raise click.BadParameter(str(error)) from error
    return value


def _complete_model(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from cli.model_list import model_names

    names = [CompletionItem(name) for name in model_names() if name.startswith(incomplete)]
    return [*names, CompletionItem(incomplete, type="dir")]


def _complete_session(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in session_names() if name.startswith(incomplete)]


def _config_name() -> str:
    return str(config_path()).replace(f"{Path.home()}{os.sep}", f"~{os.sep}", 1)


_EPILOG = f"""Example: eesd-chat smollm2-135m --device-memory 96MiB

Settings: an option on the command line comes first, then the variable EESD_CHAT_<OPTION> (as EESD_CHAT_TOP_K=20), then
what --session has kept, then the model's section in {_config_name()}, then the rest of that file, then the defaults."""


def main() -> None:
    """The installed program `eesd-chat`."""
    start(make_command(), "eesd-chat")


if __name__ == "__main__":
    main()
