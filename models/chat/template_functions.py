"""The filters, methods and functions that a chat template may call, each with a limit on the size of its result. The
size of a result is bounded from the arguments before it is computed; the bound may be too high, never too low."""

import json
import re
from collections.abc import Callable, Collection, Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import filters, nodes
from jinja2.ext import Extension
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from ..core.errors import TemplateError

MAX_CHARACTERS = 1_000_000  # of a value, or of the rendered text, at most; an item of a list counts as ITEM_SIZE
ITEM_SIZE = 8
MAX_INTEGER_BITS = 8192
KEY_SIZE = 64  # of an item that `unique` remembers, in the work of a rendering

MAX_SEARCH_LENGTH = (
    100  # characters of a set to strip, or of a text searched from the end: those searches take quadratic time
)

_TEXTS = (str, bytes)
_ITEMS: tuple[type[Collection[Any]], ...] = (
    list,
    tuple,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)


def value_size(value: Any) -> int:
    """The size of a value when all of it is written as text. Counting stops soon after MAX_CHARACTERS."""
    total, rest = 0, [value]
    while rest and total <= MAX_CHARACTERS:
        each = rest.pop()
        if isinstance(each, _TEXTS):
            total += len(each)
        elif isinstance(each, int):
            total += 1 + each.bit_length() // 3 if each.bit_length() <= MAX_INTEGER_BITS else MAX_CHARACTERS + 1
        elif isinstance(each, dict):
            total += 2 * ITEM_SIZE * len(each)
            if total <= MAX_CHARACTERS:
                rest.extend((*each.keys(), *each.values()))
        elif isinstance(each, _ITEMS):
            total += ITEM_SIZE * len(each)
            if total <= MAX_CHARACTERS:
                rest.extend(each)
        else:
            total += 1
    return total


def check_size(size: int) -> None:
    """TemplateError if a value of this size exceeds the limit of a template."""
    if size > MAX_CHARACTERS:
        raise TemplateError(f"the chat template makes a value of more than {MAX_CHARACTERS:,} characters")


def repetition_size(sequence: Any, times: Any) -> int:
    if isinstance(sequence, (*_TEXTS, list, tuple)) and isinstance(times, int):
        return value_size(sequence) * max(times, 0)
    return 0


def power_size(base: Any, exponent: Any) -> int:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_INTEGER_BITS:
        return MAX_CHARACTERS + 1
    return 1


def percent_format_size(template: str, values: Any) -> int:
    """An upper bound of the size of `template % values`: every number in the template may be a width."""
    if re.search(r"%[-+ #0]*+[0-9]*+\.?+\*", template):
        raise TemplateError("the chat template formats with a computed width, which is not allowed")
    return len(template) + _sum_widths(template) + template.count("%") * value_size(values)


def _brace_format_size(template: str, values: Any) -> int:
    """An upper bound of the size of `template.format(values)`."""
    if re.search(r"\{[^{}]++\{", template):
        raise TemplateError("the chat template formats with a computed width, which is not allowed")
    return len(template) + _sum_widths(template) + template.count("{") * value_size(values)


def _sum_widths(template: str) -> int:
    return sum(int(digits[:9]) for digits in re.findall(r"[0-9]+", template))


def _replacement_size(text: str, old: str, new: str) -> int:
    return len(text) + text.count(old) * len(new)


# Methods whose result is at most a small multiple of their input, and those whose size is checked below.
_STRING_METHODS = """
    capitalize casefold center count endswith find format format_map index isalnum isalpha isascii isdecimal isdigit
    isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition removeprefix
    removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title
    upper zfill
"""
_WIDENING = frozenset(("center", "ljust", "rjust", "zfill"))
_SEARCHING = frozenset(("lstrip", "rstrip", "strip", "rfind", "rindex", "rpartition", "rsplit"))
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_STRING_METHODS.split()),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
}


def method_arguments(owner: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a method call, with a generator read into a list. Raises TemplateError if the method is not
    allowed or its result may exceed the limit."""
    kind = next((kind for kind in _METHODS if isinstance(owner, kind)), None)
    if kind is None and isinstance(owner, LoopContext | Extension):
        return args
    if kind is None or name not in _METHODS[kind]:
        raise TemplateError(f"the chat template calls {type(owner).__name__}.{name}, which is not allowed here")
    if kind is str:
        if name == "join" and args:
            args = (list(args[0]), *args[1:])
            check_size(len(args[0]) * len(owner) + value_size(args[0]))
        elif name == "replace" and len(args) > 1:
            check_size(_replacement_size(owner, args[0], args[1]))
        elif name in _WIDENING:
            check_size(max((value for value in args if isinstance(value, int)), default=0))
        elif name in _SEARCHING:
            _check_search((*args, *options.values()))
        elif name in ("format", "format_map"):
            check_size(_brace_format_size(owner, (args, options)))
    return args


def _check_search(args: tuple[Any, ...]) -> None:
    if any(isinstance(value, str) and len(value) > MAX_SEARCH_LENGTH for value in args):
        raise TemplateError(
            f"the chat template strips, or searches from the end for, more than {MAX_SEARCH_LENGTH} characters"
        )


class _Key:
    """A dictionary key that counts comparisons. A template can make thousands of numbers of one hash; each insertion
    compares a key with all earlier keys of its hash."""

    __slots__ = ("_environment", "_value")

    def __init__(self, environment: Any, value: Any) -> None:
        self._environment, self._value = environment, value

    def __hash__(self) -> int:
        return hash(self._value)

    def __eq__(self, other: object) -> bool:
        self._environment.count_step()
        return isinstance(other, _Key) and bool(self._value == other._value)


@jinja2.pass_environment
def _unique(environment: Any, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Iterator[Any]:
    """Jinja's `unique` that counts its comparisons and what it remembers."""
    read_key = filters.make_attrgetter(
        environment, attribute, postprocess=None if case_sensitive else filters.ignore_case
    )
    seen = set[_Key]()
    for item in value:
        key = _Key(environment, read_key(item))
        if key not in seen:
            environment.add_work(KEY_SIZE)
            seen.add(key)
            yield item


def _read_pairs(environment: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `dict` with pairs read into a list, after their keys were compared with a count."""
    if len(args) != 1 or isinstance(args[0], dict):
        return args
    pairs: list[tuple[Any, Any]] = []
    seen = set[_Key]()
    for key, value in args[0]:
        seen.add(_Key(environment, key))
        pairs.append((key, value))
    return (pairs,)


@jinja2.pass_environment
def _dict(environment: Any, /, *args: Any, **values: Any) -> dict[Any, Any]:
    return dict(*_read_pairs(environment, args), **values)


def _raise_exception(message: Any) -> None:
    raise TemplateError(f"the chat template refuses the messages: {str(message)[:1000]}")


def _strftime_now(format: Any) -> str:
    if len(str(format)) > 200:
        raise TemplateError("the chat template writes the date in a format of more than 200 characters")
    return datetime.now().strftime(str(format))  # local time, as templates expect


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    if (indent if isinstance(indent, int) else len(indent or "")) > 100:
        raise TemplateError("the chat template indents JSON by more than 100 characters")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None and separators is None:
        return encoder.encode(value)
    parts, size = [], 0
    for part in encoder.iterencode(value):
        size += len(part)
        check_size(size)
        parts.append(part)
    return "".join(parts)


@jinja2.pass_eval_context
def _join(context: nodes.EvalContext, value: Any, d: Any = "", attribute: Any = None) -> str:
    items = list(value)
    check_size(len(items) * value_size(d) + value_size(items))
    return filters.sync_do_join(context, items, d, attribute)


@jinja2.pass_eval_context
def _replace(context: nodes.EvalContext, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    check_size(_replacement_size(str(s), str(old), str(new)))
    return filters.do_replace(context, s, old, new, count)


def _center(value: Any, width: int = 80) -> str:
    check_size(width)
    return filters.do_center(value, width)


def _indent(s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    check_size(value_size(s) + (len(str(s).splitlines()) + 1) * (width if isinstance(width, int) else len(str(width))))
    return filters.do_indent(s, width, first, blank)


def _trim(value: Any, chars: str | None = None) -> str:
    _check_search((chars,))
    return filters.do_trim(value, chars)


def _format(value: Any, *args: Any, **options: Any) -> str:
    check_size(percent_format_size(str(value), (args, options)))
    return filters.do_format(value, *args, **options)


def _round(value: Any, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > 300:
        raise TemplateError("the chat template rounds to more than 300 digits")
    return filters.do_round(value, precision, method)


# Jinja's own filters, without those that no chat template uses and those that are replaced above.
_ALLOWED_FILTERS = (
    "abs capitalize count d default dictsort e escape first float groupby int items last length list lower map max min "
    "reject rejectattr reverse safe select selectattr sort string title truncate upper wordcount"
)
FILTERS: dict[str, Callable[..., Any]] = {
    **{name: filters.FILTERS[name] for name in _ALLOWED_FILTERS.split()},
    "center": _center,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "tojson": _tojson,
    "trim": _trim,
    "unique": _unique,
}


class _Namespace(Namespace):
    """The result of `namespace()`: the only mutable value of a template, so its contents are never written out."""

    def __init__(*args: Any, **values: Any) -> None:  # without `self`, so that a value may have that name
        for name in dict(*args[1:], **values):
            _check_name(name)
        Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace holds no names that begin with an underscore: {name!r}")


@jinja2.pass_environment
def _namespace(environment: Any, /, *args: Any, **values: Any) -> _Namespace:
    return _Namespace(*_read_pairs(environment, args), **values)


GLOBALS: dict[str, Callable[..., Any]] = {
    "namespace": _namespace,
    "dict": _dict,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
