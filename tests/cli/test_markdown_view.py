"""Markdown while it streams, on an emulated terminal: nothing is lost, however the text arrives and whatever it is."""

from __future__ import annotations

import random
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.answer_view import Event
from cli.markdown_view import MarkdownView, keeps_all, rows_of
from eesd_lite.emitter import TokenEvent

pyte = pytest.importorskip("pyte")

EVENT: Event = TokenEvent(0, "", False, None)
SAMPLE = """# Rivers of Europe

Here are **three** rivers, with `code` and a [link](http://x.org/y). This line is quite long and goes on until it wraps.
Second line of it, with *emphasis*.

1. The *Danube*
2. The Rhine
   - a sub item

```python
def f(x):
    return x + 1  # comment
```
After it: 日本語 and \U0001f642.

| river | km |
|---|---|
| Danube | 2850 |

The end"""


class Screen:
    """A terminal of so many columns and rows, with everything that scrolled off it."""

    def __init__(self, columns: int, rows: int) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000)
        self.stream = pyte.Stream(self.screen)
        self.columns, self.rows = columns, rows

    def show(self, text: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Stream a text in pieces of these sizes (again and again); the lines that a reader sees at the end."""
        with monkeypatch.context() as patch:
            patch.setattr("cli.markdown_view.write", lambda part: self.stream.feed(part.replace("\n", "\r\n")))
            view = MarkdownView(lambda: (self.columns, self.rows))
            place = turn = 0
            while place < len(text):
                size = sizes[turn % len(sizes)]
                view.show(text[place : place + size], EVENT)
                place, turn = place + size, turn + 1
            view.end()
        rows = [*self.screen.history.top, *(self.screen.buffer[y] for y in range(self.rows))]
        lines = ["".join(row[x].data for x in range(self.columns)).rstrip() for row in rows]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def style_of(self, word: str) -> object:
        """The first cell of the first place where a word stands."""
        for y in range(self.rows):
            line = "".join(self.screen.buffer[y][x].data for x in range(self.columns))
            if word in line:
                return self.screen.buffer[y][line.index(word)]
        raise AssertionError(word)


def test_a_finished_answer_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(80, 40)
    lines = screen.show(SAMPLE, [3], monkeypatch)
    assert lines[:5] == [
        "Rivers of Europe",
        "",
        "Here are three rivers, with code and a link (http://x.org/y). This line is quite",
        "long and goes on until it wraps.",
        "Second line of it, with emphasis.",
    ]
    assert [line for line in lines if "Danube" in line or "sub item" in line][:2] == [
        " 1 The Danube",
        "    • a sub item",
    ]
    assert "```python" in lines and "    return x + 1  # comment" in lines, "code is shown as it is, fences included"
    assert lines[-1] == "The end"
    assert screen.style_of("three").bold and screen.style_of("Rivers").bold  # type: ignore[attr-defined]
    assert screen.style_of("return").fg != "default" and screen.style_of("Second").fg == "default"  # type: ignore[attr-defined]


@pytest.mark.parametrize("columns", [80, 33, 20])
def test_how_an_answer_is_cut_into_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    rng = random.Random(0)
    whole = Screen(columns, 40).show(SAMPLE, [len(SAMPLE)], monkeypatch)
    for _ in range(10):
        assert Screen(columns, 40).show(SAMPLE, [rng.randint(1, 9) for _ in range(20)], monkeypatch) == whole


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(
            [*"ab1*_`#->|~[]()<&! \n\n\t", "word ", "```", "```py\n", "- ", "1. ", "**", "| a |", "\n\n", "日本",
             "\U0001f642", "e\u0301", "\x1b[2J", "<b>", "&amp;", "    ", "http://x.y"]
        ),
        max_size=60,
    ).map("".join),
    size=st.integers(1, 7),
    columns=st.integers(12, 60),
    rows=st.integers(4, 30),
)  # fmt: skip
def test_no_letter_is_ever_lost_or_doubled(text: str, size: int, columns: int, rows: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        lines = Screen(columns, rows).show(text, [size], monkeypatch)
    letters = re.sub(r"\x1b", "^[", text)
    shown = unicodedata.normalize("NFD", "".join(lines))  # the emulator joins accents with their letters
    # Letters of the text in their order, and no more of them than there are (a language behind ``` is shown too).
    wanted = [c for c in letters if c.isascii() and c.isalpha()]
    assert [c for c in shown if c.isascii() and c.isalpha()] == wanted


def test_a_block_higher_than_the_screen_stays_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(f"line {n} with **stars**" for n in range(12)) + "\n\nafter **it**\n"
    lines = Screen(40, 6).show(text, [5], monkeypatch)
    assert lines == [*(f"line {n} with **stars**" for n in range(12)), "", "after it"]


@pytest.mark.parametrize(
    "text",
    [
        "a <b>tag</b> here",
        "fish &amp; chips",
        "[x]: http://y.z/w",
        "```html\n<p>hi</p>\n```",
        "def f(x):\n    return x",
        "The __init__ method, 2*3*4, 2**3**4 and C:\\new_file_name",
        "roses are red\n  violets are blue",
        "![alt](http://x/y.png)",
    ],
)
def test_what_markdown_would_hide_is_shown(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    assert Screen(60, 20).show(text, [2], monkeypatch) == text.split("\n")


def test_line_ends_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Screen(60, 20).show("one\ntwo\nthree\n", [4], monkeypatch) == ["one", "two", "three"]


def test_rows_are_counted_as_a_terminal_wraps() -> None:
    assert rows_of("a\n", 10) == rows_of("\n", 10) == rows_of("x" * 10 + "\n", 10) == 1
    assert rows_of("x" * 11 + "\nab\n", 10) == 3
    assert rows_of("日" * 5 + "\n", 9) == 2, "a wide character does not stand on two rows"
    assert rows_of("e\u0301" * 10 + "\n", 10) is None and rows_of("e\u0301x\n", 10) == 1


def test_everything_but_marks_is_compared_in_order() -> None:
    assert keeps_all("**ab** c1$", "ab c 1 $") and not keeps_all("a b", "b a") and not keeps_all("a$b", "ab")
