"""The filters, methods and functions that a chat template may call, each with a limit on the size of its result. The
size of a result is bounded from the arguments before it is computed; the bound may be too high, never too low."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime
from string import Formatter
from types import GeneratorType, NoneType
from typing import Any

import jinja2
from jinja2 import filters, nodes
from jinja2.ext import Extension
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.utils import Namespace

from ..core.errors import TemplateError

MAX_CHARACTERS = 1_000_000  # of a value, or of the rendered text, at most; an item of a list counts as ITEM_SIZE
ITEM_SIZE = 8
MAX_INTEGER_BITS = 8192
MAX_DEPTH = 200  # lists and dictionaries in each other at most: Python hashes and compares them by recursion
MAX_TUPLE_KEY_SIZE = 1000  # of a tuple that is a key of a dictionary: it is hashed again with every use
KEY_SIZE = 64  # of an item that `unique` remembers, in the work of a rendering

MAX_SEARCH_LENGTH = (
    100  # characters of a set to strip, or of a text searched from the end: those searches take quadratic time
)

FIELD_SIZE = 512  # of a field of a format: a float has 309 digits before its point, 24 characters without a format
ESCAPED_SIZE = 10  # characters for one, as `repr` writes it at most
WIDE_NUMBER_SIZE = 4  # a number written to base two or in groups, in the size of one
MAX_WIDTH_DIGITS = 100  # leading zeros included
_PERCENT_FIELD = re.compile(r"([-+ #0]*+[0-9]*+\*?(?:\.[0-9]*+\*?)?)[hlL]?(.?)", re.DOTALL)
_BRACKET = re.compile(r"[()]")
_WIDE_NUMBER = re.compile(r"[bn,_]")
_DIGITS = re.compile(r"\d+")

_TEXTS = (str, bytes)
_VIEWS: tuple[type[Collection[Any]], ...] = (type({}.keys()), type({}.values()), type({}.items()))
_ITEMS: tuple[type[Collection[Any]], ...] = (list, tuple, set, frozenset, *_VIEWS)
# A macro and a generator may be items (published templates list macros): a template cannot read their attributes, and
# each item of a generator is checked.
_PLAIN: tuple[type, ...] = (*_TEXTS, int, float, NoneType, Undefined, dict, *_ITEMS, range, Macro, GeneratorType)


def value_size(value: Any) -> int:
    """The size of a value when all of it is written as text. What is shared counts as often as it is reached. Counting
    stops soon after MAX_CHARACTERS. Raises TemplateError for an item that is no plain value (check_item)."""
    if not isinstance(value, _PLAIN):
        return 1
    total, depth, level = 0, 0, [value]
    while level and total <= MAX_CHARACTERS:
        total, level = _level_size(total, level)
        depth += 1
        if depth > MAX_DEPTH and level:
            raise TemplateError(f"the chat template nests values more than {MAX_DEPTH} levels deep")
    return total


def _level_size(total: int, level: list[Any]) -> tuple[int, list[Any]]:
    """`total` with the size of the values of a level, without their items, and all their items, the next level."""
    items: list[Any] = []
    for each in level:
        if isinstance(each, _TEXTS):
            total += len(each)
        elif isinstance(each, int):
            total += 1 + each.bit_length() // 3 if each.bit_length() <= MAX_INTEGER_BITS else MAX_CHARACTERS + 1
        elif isinstance(each, dict):
            total += 2 * ITEM_SIZE * len(each)
            if total <= MAX_CHARACTERS:
                items.extend((*each.keys(), *each.values()))
        elif isinstance(each, _ITEMS):
            total += ITEM_SIZE * len(each)
            if total <= MAX_CHARACTERS:
                items.extend(each)
        elif isinstance(each, range):
            items.extend((each.start, each.stop, each.step))
        elif isinstance(each, Macro):
            total += len(str(each.name))
        else:
            check_item(each)
            total += 1
        if total > MAX_CHARACTERS:
            break
    return total, items


def check_item(item: Any) -> None:
    """TemplateError if this value may not be an item of a list, a dictionary or a generator.

    A namespace, a loop and others have attributes whose size may change, or is not counted. So they are only values of
    variables: a filter that reads an attribute of each item (`sort`, `join`) never finds them."""
    if not isinstance(item, _PLAIN):
        raise TemplateError(
            f"the chat template puts a {type(item).__name__.lstrip('_')} into a list, a dictionary or a text; these may"
            " hold texts, numbers, lists, dictionaries and macros"
        )


def check_key(key: Any) -> Any:
    """A key of a dictionary. Raises TemplateError for a long tuple."""
    if isinstance(key, tuple) and value_size(key) > MAX_TUPLE_KEY_SIZE:
        raise TemplateError(f"the chat template has a tuple of more than {MAX_TUPLE_KEY_SIZE:,} characters as a key")
    return key


def check_difference(operand: Any) -> None:
    """TemplateError for `-` with the keys or items of a dictionary: one step compares all keys of one hash."""
    if isinstance(operand, _VIEWS):
        raise TemplateError("the chat template subtracts with the keys or items of a dictionary, which is not allowed")


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
    """An upper bound of the size of `template % values`, where an escaped character of a text counts as one."""
    total, size, position = len(template), value_size(values), 0
    while total <= MAX_CHARACTERS and (position := template.find("%", position)) >= 0:
        position = _key_end(template, position + 1)
        field = _PERCENT_FIELD.match(template, position)
        assert field is not None  # each of its parts may be empty
        position = field.end()
        if "*" in field[1]:
            raise TemplateError("the chat template formats with a computed width, which is not allowed")
        if field[2] != "%":
            total += _field_size(field[1], ESCAPED_SIZE * size if field[2] in ("r", "a") else size)
    return total


def _key_end(template: str, position: int) -> int:
    """The position after the key in parentheses that begins here, which may hold further ones; else the position."""
    if not template.startswith("(", position):
        return position
    depth = 0
    for bracket in _BRACKET.finditer(template, position):
        depth += 1 if bracket[0] == "(" else -1
        if depth == 0:
            return bracket.end()
    return len(template)  # Python refuses it


def _brace_format_size(template: str, values: Any) -> int:
    """An upper bound of the size of `template.format(values)`, where an escaped character of a text counts as one."""
    total, size = len(template), value_size(values)
    for _, name, specification, conversion in Formatter().parse(template):
        if name is None:  # text after the last field
            continue
        if any(brace in part for part in (name, specification or "") for brace in "{}"):
            raise TemplateError("the chat template formats with a computed width or a brace in a name, not allowed")
        wide = WIDE_NUMBER_SIZE if _WIDE_NUMBER.search(specification or "") else 1
        total += _field_size(specification or "", size * (ESCAPED_SIZE if conversion in ("r", "a") else wide))
        if total > MAX_CHARACTERS:
            break
    return total


def _field_size(specification: str, size: int) -> int:
    """An upper bound of the size of a value of this size in a field. Each number may be its width or its precision.
    Python accepts any decimal digit of Unicode there."""
    numbers = _DIGITS.findall(specification)
    if any(len(digits) > MAX_WIDTH_DIGITS for digits in numbers):
        raise TemplateError(f"the chat template formats with a width of more than {MAX_WIDTH_DIGITS} digits")
    return FIELD_SIZE + size + sum(map(int, numbers))


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
        check_size(value_size(args))  # `loop.changed` compares all of them in one step
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
        self._environment, self._value = environment, check_key(value)

    def __hash__(self) -> int:
        return hash(self._value)

    def __eq__(self, other: object) -> bool:
        self._environment.count_step()
        return isinstance(other, _Key) and bool(self._value == other._value)


@jinja2.pass_environment
def _unique(environment: Any, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Iterator[Any]:
    """Jinja's `unique` that counts its comparisons and what it remembers."""
    read_key = filters.make_attrgetter(environment, attribute, postprocess=_ignore_case(case_sensitive))
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
    separator = d if isinstance(d, str) else str(d)
    items = list(map(filters.make_attrgetter(context.environment, attribute), value))
    check_size(len(items) * len(separator) + value_size(items))
    return filters.sync_do_join(context, items, separator)


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


def _read_keys(items: Iterable[Any], read_key: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    """Each item behind its key. The keys are measured together, because sorting compares them all in one step."""
    pairs, size = [], 0
    for item in items:
        key = read_key(item)
        size += ITEM_SIZE + value_size(key)
        check_size(size)
        pairs.append((key, item))
    return pairs


def _first(pair: tuple[Any, Any]) -> Any:
    return pair[0]


def _ignore_case(case_sensitive: bool) -> Callable[[Any], Any] | None:
    return None if case_sensitive else filters.ignore_case


@jinja2.pass_environment
def _sort(
    environment: Any, value: Any, reverse: bool = False, case_sensitive: bool = False, attribute: Any = None
) -> list[Any]:
    read_keys = filters.make_multi_attrgetter(environment, attribute, postprocess=_ignore_case(case_sensitive))
    return [item for _, item in sorted(_read_keys(value, read_keys), key=_first, reverse=reverse)]


def _choose(choose: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    """Jinja's `min` or `max` with keys that are measured."""

    @jinja2.pass_environment
    def choose_item(environment: Any, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Any:
        read_key = filters.make_attrgetter(environment, attribute, postprocess=_ignore_case(case_sensitive))
        pairs = _read_keys(value, read_key)
        return choose(pairs, key=_first)[1] if pairs else environment.undefined("the sequence is empty")

    return choose_item


def _dictsort(value: Any, case_sensitive: bool = False, by: Any = "key", reverse: bool = False) -> list[Any]:
    if not isinstance(value, dict):  # Jinja would call the attribute `items` of a namespace
        raise TemplateError(f"the chat template sorts a {type(value).__name__.lstrip('_')} with dictsort")
    return filters.do_dictsort(value, case_sensitive, by, reverse)


# Jinja's own filters, without those that no chat template uses and those that are replaced above.
_ALLOWED_FILTERS = (
    "abs capitalize count d default e escape first float int items last length list lower map reject "
    "rejectattr reverse safe select selectattr string title truncate upper wordcount"
)
FILTERS: dict[str, Callable[..., Any]] = {
    **{name: filters.FILTERS[name] for name in _ALLOWED_FILTERS.split()},
    "center": _center,
    "dictsort": _dictsort,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "max": _choose(max),
    "min": _choose(min),
    "replace": _replace,
    "round": _round,
    "sort": _sort,
    "tojson": _tojson,
    "trim": _trim,
    "unique": _unique,
}


class _Namespace(Namespace):
    """The result of `namespace()`: the only mutable value of a template, so its contents are never written out, and it
    is no item of a list (check_item)."""

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
    attributes = dict(*_read_pairs(environment, args), **values)
    environment.add_work(2 * ITEM_SIZE * len(attributes))
    return _Namespace(attributes)


# The values whose attributes a template may read. Methods are checked when they are called (method_arguments).
READABLE = (*_METHODS, int, float, LoopContext, Namespace)

GLOBALS: dict[str, Callable[..., Any]] = {
    "namespace": _namespace,
    "dict": _dict,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
