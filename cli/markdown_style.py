"""What Markdown looks like in a chat: rich's rendering with the terminal's own colours and quiet headings."""

from __future__ import annotations

from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, Markdown
from rich.theme import Theme

THEME = Theme({"markdown.code": "cyan", "markdown.h1": "bold", "markdown.h2": "bold", "markdown.h3": "bold"})


class _QuietHeading(Heading):
    """On the left, without a box."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class ChatMarkdown(Markdown):
    """Addresses of links are shown, code blocks have no background of their own."""

    elements: ClassVar = {**Markdown.elements, "heading_open": _QuietHeading}

    def __init__(self, source: str) -> None:
        super().__init__(source, code_theme="ansi_dark", hyperlinks=False, justify="left")
