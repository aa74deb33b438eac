"""Runs the chat templates of checkpoints in a Jinja sandbox with limits on time and on the size of values.

A template can be stopped only between two steps of Python, so every single step must be short, which holds if its
values are small. So each result is measured; where a step can multiply (`*`, `%`, `replace`, `join`, ...) its result is
bounded before (template_functions.py); and the compiled template checks the clock at every statement, at every
comparison, and at every item of a filter that gives its items one by one. Lists and dictionaries are immutable and hold
plain values only, so a measured size stays valid. Macros have no `varargs` and no `kwargs`: Jinja's runtime makes these
where nothing measures them. No file is read: `include`, `import` and `extends` have no loader.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, CompilerExit, Frame, MacroRef, operators
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..core.errors import TemplateError
from .template_functions import (
    FILTERS,
    GLOBALS,
    ITEM_SIZE,
    MAX_CHARACTERS,
    READABLE,
    check_difference,
    check_item,
    check_key,
    check_size,
    method_arguments,
    percent_format_size,
    power_size,
    repetition_size,
    value_size,
)

MAX_SECONDS = 1.0  # of processor time for one rendering at most
SMALL_SIZE = MAX_CHARACTERS // 100  # larger values are checked as soon as they are made
MAX_WORK = 64 * MAX_CHARACTERS  # of all values of a rendering together
MAX_TEMPLATE_TOKENS = 10_000  # Jinja tokens of a template at most: Python compiles the result in one step

# Exceptions of a faulty template, or of one that does not fit the messages.
FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


class _RenderBudget(threading.local):
    """What the rendering in this thread has used so far."""

    steps = 0
    work = 0
    deadline = 0.0

    def start(self) -> None:
        self.steps, self.work, self.deadline = 0, 0, time.thread_time() + MAX_SECONDS

    def check(self) -> None:
        if self.work > MAX_WORK:
            raise TemplateError(f"the chat template makes values of more than {MAX_WORK:,} characters in all")
        if time.thread_time() > self.deadline:
            raise TemplateError(f"the chat template takes longer than {MAX_SECONDS:g} second")


class _LimitedCodeGenerator(CodeGenerator):
    """Compiles templates so that they check the clock at every statement and measure the values they make."""

    def blockvisit(self, nodes: Any, frame: Frame) -> None:
        try:
            self.writeline("pass")
            for node in nodes:
                self.writeline("environment.count_step()")
                self.visit(node, frame)
        except CompilerExit:
            pass

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self.write("environment.measure(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("environment.measure({")
        for pair in node.items:
            self.write("environment.check_key(")
            self.visit(pair.key, frame)
            self.write("): ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("})")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        self.write("environment.measure(" if node.ctx == "load" else "")
        super().visit_Tuple(node, frame)
        self.write(")" if node.ctx == "load" else "")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:  # noqa: N802
        """Each comparison of `a < b < c` is a step."""
        self.write(f" {operators[node.op]} (environment.count_step() or ")
        self.visit(node.expr, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if not isinstance(node.arg, nodes.Slice):
            return super().visit_Getitem(node, frame)
        self.write("environment.count_slice(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> tuple[Frame, MacroRef]:
        inner, macro = super().macro_body(node, frame)
        if macro.accesses_varargs or macro.accesses_kwargs:
            self.fail("a macro reads varargs or kwargs; it may read its named parameters only", node.lineno)
        return inner, macro

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        """The test of `for ... if ...` runs for many items in one step, so it begins with a comparison, which ticks."""
        if node.test is not None:
            comparison = nodes.Compare(nodes.Const(0), [nodes.Operand("eq", nodes.Const(0))])
            node.test = nodes.And(comparison, node.test)
        super().visit_For(node, frame)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  (as the library declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Macro) -> str:
        return caller()


class _TokenLimit(Extension):
    """Limits the number of a template's tokens to MAX_TEMPLATE_TOKENS."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for count, token in enumerate(stream, 1):
            if count > MAX_TEMPLATE_TOKENS:
                raise TemplateError(
                    f"the chat template has more than {MAX_TEMPLATE_TOKENS:,} names, operators and other tokens"
                )
            yield token


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it (filters, `raise_exception`, `strftime_now`, `break`), with limits."""

    code_generator_class = _LimitedCodeGenerator
    check_key = staticmethod(check_key)
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        self._budget = _RenderBudget()
        extensions = [_TokenLimit, _GenerationTag, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False, cache_size=0)
        self.finalize = self._write
        self.filters = {name: self._limit_function(function) for name, function in FILTERS.items()}
        self.tests = {name: self._limit_function(cast(Callable[..., Any], test)) for name, test in self.tests.items()}
        self.globals = {"range": self.globals["range"], **GLOBALS}

    def start_clock(self) -> None:
        """Start the clock of one rendering or compilation in this thread."""
        self._budget.start()

    def count_step(self) -> None:
        """Count a step; every 16th step checks the clock, because the check takes longer than most steps."""
        meter = self._budget
        meter.steps = steps = meter.steps + 1
        if not steps % 16:
            meter.check()

    def add_work(self, size: int) -> None:
        """Count a step that keeps `size` characters outside of the template's values, or copies a part of one."""
        self._budget.work += size
        if size > SMALL_SIZE:
            self._budget.check()
        self.count_step()

    def measure(self, value: Any) -> Any:
        """Measure a value that a step has made, and return it. Raises TemplateError beyond a limit."""
        meter = self._budget
        meter.steps = steps = meter.steps + 1
        size = len(value) if type(value) is str else value_size(value)
        meter.work += size
        if size > SMALL_SIZE or not steps % 16:
            check_size(size)
            meter.check()
        return value

    @jinja2.pass_context  # so that Jinja does not compute constant expressions while it compiles
    def _write(self, _: Context, value: Any) -> str:
        """The text that `{{ value }}` writes, measured too, because the texts of a list are written with escapes."""
        return cast(str, self.measure(value if isinstance(value, str) else str(self.measure(value))))

    def count_slice(self, value: Any) -> Any:
        """Count a slice, which is a copy, and return it. Its items are a part of what was measured."""
        self.add_work(len(value) * (1 if isinstance(value, str) else ITEM_SIZE))
        return value

    def concatenate(self, parts: Sequence[Any]) -> str:
        check_size(value_size(parts))
        return cast(str, self.measure("".join(map(str, parts))))

    def concat(self, parts: Sequence[str]) -> str:  # type: ignore[override]  # what blocks and macros wrote
        check_size(sum(map(len, parts)))
        return cast(str, self.measure("".join(parts)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            check_size(percent_format_size(left, right))
        elif operator == "*":
            check_size(max(repetition_size(left, right), repetition_size(right, left)))
        elif operator == "**":
            check_size(power_size(left, right))
        elif operator == "-":
            check_difference(left)
            check_difference(right)
        return self.measure(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.count_step()
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return isinstance(obj, READABLE) and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, function: Any, /, *args: Any, **options: Any) -> Any:
        method = getattr(function, "__wrapped__", function)
        if isinstance(method, BuiltinMethodType | MethodType):
            args = method_arguments(method.__self__, method.__name__, args, options)
        return self.measure(super().call(context, function, *args, **options))

    def _limit_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call_with_limits(*args: Any, **options: Any) -> Any:
            self.count_step()
            value = self.measure(function(*args, **options))
            return self._limit_items(value) if isinstance(value, GeneratorType) else value

        return call_with_limits

    def _limit_items(self, items: Iterator[Any]) -> Iterator[Any]:
        """The items of a filter that runs only when they are read, each counted as a step."""
        for item in items:
            self.count_step()
            check_item(item)
            yield item
