"""`eesd-chat`: talk to a model whose deeper layers need not fit into memory.

Three ways in: a terminal (several turns), `-p TEXT` (one question, stdin is not touched), or piped stdin, which as a
whole is one question. The answer goes to stdout, everything else to stderr. Argument parsing imports nothing heavy.
"""

from __future__ import annotations

import difflib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from cli.common import INTERRUPTED, Rate, Size, is_terminal, program_name, reports_errors, weights_option
from cli.prompt_line import PromptLine
from cli.render import ProgressDisplay
from cli.session import ChatEngine, Session, complain, note
from eesd_lite.controller import any_controller
from eesd_lite.errors import USER_ERRORS, EesdError
from eesd_lite.params import SamplingParams
from eesd_lite.progress import Progress
from eesd_lite.templates import FALLBACKS
from eesd_lite.units import format_size

COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation (the system prompt stays)",
    "/stats": "figures of the whole session, and what the controller believes",
    "/quit": "leave (as Ctrl-D does)",
}
_HELP = (
    "Alt-Enter starts a new line, Enter sends; a pasted text is one question. Ctrl-C stops an answer or empties the "
    "line. Begin with a space to send a text that starts with '/'."
)


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """All arguments; None leaves a choice to the engine."""

    model: str
    params: SamplingParams
    prompt: str | None = None
    system: str | None = None
    device_memory: int | None = None
    resident_layers: int | None = None
    exit_layer: int | None = None
    controller: str = "calibrated"
    head: str | None = None
    drafter: str = "head"
    force_head: bool = False
    weights: str | None = None
    context: int | None = None
    threads: int | None = None
    template: str | None = None
    throttle: int | None = None


OpenEngine = Callable[[ChatSettings, Progress], ChatEngine]


def open_engine(settings: ChatSettings, progress: Progress) -> ChatEngine:
    """The real engine. This is where torch is imported."""
    from eesd_lite import Engine

    return Engine.from_pretrained(
        settings.model,
        device_memory=settings.device_memory,
        resident_layers=settings.resident_layers,
        exit_layer=settings.exit_layer,
        head=settings.head,
        drafter=settings.drafter,
        force_head=settings.force_head,
        weights=settings.weights,
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
    if question is None and not is_terminal(sys.stdin):
        question = _read_stdin()
        if not question.strip():
            note("standard input is empty: nothing to answer")
            return 0
    progress = ProgressDisplay()
    with progress.showing(f"loading {settings.model}"):
        engine = open_engine(settings, progress)
    try:
        session = Session(engine, settings.params, progress, system=settings.system)
        for line in engine.notices:
            note(line)
        if question is not None:
            session.answer(question)
            return INTERRUPTED if session.interrupted else 0
        click.echo(header(settings, engine), err=True)
        return _talk(session)
    finally:
        engine.close()


def _talk(session: Session) -> int:
    """Questions and answers until the user leaves."""
    reader = PromptLine()
    leaving = False
    while True:
        try:
            text = reader.read()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            if leaving:
                return INTERRUPTED
            leaving = True
            click.echo("(Ctrl-C again, or Ctrl-D, leaves)", err=True)
            continue
        leaving = False
        if not text.strip():
            continue
        if text.startswith("/"):
            if _command(session, text):
                return 0
            continue
        try:
            session.answer(text)
        except USER_ERRORS as error:
            complain(error)


def _command(session: Session, text: str) -> bool:
    """Carry out a slash command; True when it is time to leave."""
    name = text.split()[0].lower()
    if name == "/quit":
        return True
    if name == "/help":
        width = max(map(len, COMMANDS))
        lines = [f"{command:{width}}  {what}" for command, what in COMMANDS.items()] + [_HELP]
    elif name == "/reset":
        session.reset()
        lines = ["the conversation is forgotten"]
    elif name == "/stats":
        lines = session.totals()
    else:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.4)
        lines = [f"no command {name}; did you mean {near[0]}?" if near else f"no command {name}; /help lists them"]
    click.echo("\n".join(lines), err=True)
    return False


def header(settings: ChatSettings, engine: ChatEngine) -> str:
    """One line: the model, where its layers are, what drafts."""
    plan = engine.plan
    layers = len(plan.tiers)
    streamed = layers - plan.resident_layers
    where = f"{layers} layers in memory" if not streamed else f"{plan.resident_layers} of {layers} layers in memory"
    used = format_size(plan.total_bytes)
    if settings.device_memory is not None:
        used += f" of {format_size(settings.device_memory)}"
    parts = [settings.model, f"{where} ({used})"]
    if streamed:
        parts.append(f"{format_size(plan.sweep_bytes)} read per sweep")
    sources = [f"exit head after layer {plan.exit_layer}"] if plan.exit_layer else []
    sources += ["repeated text"] if settings.drafter != "head" else []
    drafts = f"{' and '.join(sources)}, {settings.controller}" if sources else "plain decoding"
    return f"{', '.join(parts)}, {drafts}. /help lists commands."


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

    @click.command("eesd-chat", epilog=_EPILOG)
    @click.argument("model", required=False)
    @click.option("-p", "--prompt", metavar="TEXT", help="Answer this one question and exit; stdin is not read.")
    @click.option("--system", metavar="TEXT", help="System prompt.")
    @click.option("--device-memory", type=Size(), help="Memory for weights and cache, as 64MiB, 8GB or auto.")
    @click.option("--resident-layers", type=click.IntRange(min=0), metavar="N", help="Keep N layers in memory.")
    @click.option("--exit-layer", type=click.IntRange(min=1), metavar="N", help="Draft with the layers before N.")
    @click.option(
        "--controller",
        default="calibrated",
        show_default=True,
        metavar="NAME",
        callback=_controller,
        help="How much to draft: calibrated, beta, fixed:K, hf or off.",
    )
    @click.option("--head", metavar="PATH|off|instant", help="Exit head file; instant: make one now.")
    @click.option(
        "--drafter",
        type=click.Choice(["head", "ngram", "both"]),
        default="head",
        show_default=True,
        help="Draft with the exit head, from repeated text (needs no head), or both.",
    )
    @click.option("--force-head", is_flag=True, help="Take a head made for another model (can only cost speed).")
    @weights_option
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
    @click.option("--no-color", is_flag=True, help="No colours; so does the variable NO_COLOR.")
    @reports_errors
    def eesd_chat(**options: Any) -> None:
        """Talk to MODEL: a recipe's name, a folder, or a Hugging Face Hub id.

        Without -p and with a pipe or file as standard input, all of it is one question.
        """
        sys.exit(run(_settings(options), open_engine))

    return eesd_chat


def _settings(options: dict[str, Any]) -> ChatSettings:
    """Everything that can be wrong with the arguments themselves is found here."""
    if not options["model"]:
        from models import RECIPES

        raise click.UsageError(
            f"which model? Known by name: {', '.join(sorted(RECIPES))}; a folder or Hub id works too"
        )
    if options["device_memory"] is not None and options["resident_layers"] is not None:
        raise click.UsageError("--device-memory and --resident-layers exclude each other")
    if options["prompt"] is not None and not options["prompt"].strip():
        raise click.UsageError("the text after -p is empty")
    if options.pop("no_color"):
        import os

        os.environ["NO_COLOR"] = "1"
    sampling = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed", "stop")
    try:
        params = SamplingParams(**{name: options.pop(name) for name in sampling})
    except EesdError as error:
        raise click.UsageError(str(error)) from error
    return ChatSettings(params=params, **options)


def _controller(context: click.Context, parameter: click.Parameter, value: str) -> str:
    try:
        any_controller(value)
    except EesdError as error:
        raise click.BadParameter(str(error)) from error
    return value


_EPILOG = "Example: eesd-chat smollm2-135m --device-memory 96MiB"


def main() -> None:
    """The installed program `eesd-chat`."""
    make_command()(prog_name="eesd-chat")


if __name__ == "__main__":
    main()
