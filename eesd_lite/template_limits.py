"""A sandbox for chat templates that cannot run for ever or take all memory.

Jinja's own sandbox keeps a template from reaching anything outside; here the work of one rendering is counted too: CPU
time at every round of a loop and at every call, elements of every value that is made, characters of the output. Made
for the few kilobytes that real templates are; what it cannot interrupt is one single call of a built-in filter on
values within the limits. Used by `eesd_lite.templates`.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

from jinja2 import Template, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

SECONDS = 5.0  # of CPU time for one rendering; real ones take milliseconds
LARGEST = 16 * 2**20  # elements of one value, characters of the output
ALL_VALUES = 1 << 30  # elements of all values that one rendering makes
_MOST = 100_000  # as a number handed to a filter or method: widths, counts; Jinja's own limit of range()
_MOST_BITS = 1 << 16  # of an integer
_WIDE = re.compile(r"\d{6}|\*")  # a width inside a format
_FORMATS = ("format", "format_map")


class LimitError(Exception):
    """The template takes more time or memory than any chat needs."""


class Budget:
    """What is left of one rendering. `contents`: characters of the messages, which may be long for good reason."""

    def __init__(self, contents: int) -> None:
        self.largest = LARGEST + 4 * contents
        self._left = ALL_VALUES + 64 * contents
        self._deadline = time.thread_time() + SECONDS

    def check_time(self) -> None:
        if time.thread_time() > self._deadline:
            raise LimitError(f"it runs for more than {SECONDS:g} s")

    def check_size(self, size: int) -> None:
        if size > self.largest:
            raise LimitError(f"it makes a text or list of more than {self.largest} elements")

    def spend(self, value: Any) -> Any:
        """`value`, after counting it."""
        if isinstance(value, (str, bytes, list, tuple, dict)):
            self.check_size(len(value))
            self._left -= len(value)
            if self._left < 0:
                raise LimitError("it makes too many long texts or lists")
        elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise LimitError("it makes a number of too many digits")
        return value


class GenerationBlock(Extension):
    """`{% generation %}` marks answers for training; here it only shows its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compile with `bounded_template`, render with `render`; several threads may render at once."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
        self._local = threading.local()
        self.globals.pop("lipsum")
        self.filters = {name: self._counted(name, function) for name, function in self.filters.items()}
        self.filters["eesd_rounds"] = self._rounds
        self.filters["eesd_value"] = lambda value: self.budget.spend(value)

    @property
    def budget(self) -> Budget:
        """Of the rendering in this thread; while a template is compiled, one of its own."""
        found: Budget | None = getattr(self._local, "budget", None)
        return Budget(0) if found is None else found

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = self._counted(name, function)

    def bounded_template(self, source: str) -> Template:
        """The compiled template, every loop and every value of it counted."""
        tree = _Counting().visit(self.parse(source))
        return self.from_string(tree)

    def render(self, template: Template, values: Mapping[str, Any], contents: int) -> str:
        """The output; LimitError where it takes too much, whatever the template raises where it fails."""
        self._local.budget = budget = Budget(contents)
        try:
            pieces, length = [], 0
            for piece in template.generate(dict(values)):
                pieces.append(piece)
                length += len(piece)
                budget.check_size(length)
                budget.check_time()
            return "".join(pieces)
        finally:
            self._local.budget = None

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """See `SandboxedEnvironment.call`, whose names keep clear of the template's keywords."""
        value = getattr(__obj, "__self__", None)
        if isinstance(value, str):
            _check_arguments(__self.budget, getattr(__obj, "__name__", ""), (value, *args), kwargs)
        __self.budget.check_time()
        return __self.budget.spend(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`*`, `**`, `+` and `%`, refused before they make something huge."""
        for value, times in ((left, right), (right, left)):
            if operator == "*" and isinstance(times, int) and isinstance(value, (str, bytes, list, tuple)):
                self.budget.check_size(len(value) * times)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > _MOST_BITS:
                raise LimitError("it makes a number of too many digits")
        if operator == "%" and isinstance(left, str):
            _check_arguments(self.budget, "format", (left,), {})
        return self.budget.spend(super().call_binop(context, operator, left, right))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # with the mark that tells Jinja what to pass first
        def counted(*args: Any, **kwargs: Any) -> Any:
            given = args[1:] if hasattr(function, "jinja_pass_arg") else args
            _check_arguments(self.budget, name, given, kwargs)
            self.budget.check_time()
            return self.budget.spend(function(*args, **kwargs))

        return counted

    def _rounds(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.budget.check_time()
            yield item


class _Counting(NodeTransformer):
    """Puts filters that count around what loops run over, what `~` joins, what blocks hold, and what is shown."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "eesd_rounds")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "eesd_value")

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = _filtered(node.filter, "eesd_value")
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            part if isinstance(part, nodes.TemplateData) else _filtered(part, "eesd_value") for part in node.nodes
        ]
        return node


def _filtered(node: Any, name: str) -> nodes.Filter:
    """`node`: an expression, or None for the text of a block."""
    return nodes.Filter(node, name, [], [], None, None, lineno=1 if node is None else node.lineno)


def _check_arguments(budget: Budget, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """LimitError for a filter or method of a text (args[0]) whose result would be huge."""
    numbers = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, int)]
    if max(map(abs, numbers), default=0) > _MOST or (name in _FORMATS and args and _WIDE.search(str(args[0]))):
        raise LimitError(f"it asks '{name}' for more than {_MOST} elements")
    if not args:
        return
    value, pieces = args[0], [*args[1:], *kwargs.values()]
    longest = max([*map(abs, numbers), *(len(piece) for piece in pieces if isinstance(piece, str))], default=0)
    if isinstance(value, str) and name in ("replace", "expandtabs", "indent", "translate"):
        old = pieces[0] if name == "replace" and pieces and isinstance(pieces[0], str) else None
        places = value.count(old) if old is not None else value.count("\t" if name == "expandtabs" else "\n") + 1
        budget.check_size(len(value) + places * longest)
    if name == "join":
        items = next((item for item in args if isinstance(item, (list, tuple))), ())
        between = max((len(item) for item in args if isinstance(item, str)), default=0)
        budget.check_size(sum(len(item) if isinstance(item, str) else 1 for item in items) + between * len(items))
