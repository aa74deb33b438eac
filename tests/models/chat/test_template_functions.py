"""The bounds of what a chat template formats are never less than the text that Python makes."""

from string import Formatter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhead.models.chat import ChatTemplate
from polyhead.models.chat.template_functions import MAX_CHARACTERS, method_arguments, percent_format_size
from polyhead.models.chat.template_functions import _brace_format_size as brace_format_size
from polyhead.models.core.errors import TemplateError

WIDTHS = ("", "", "0", "7", "0000000000004000", "90000000000", "٩٠", "٠٠٠٠٠٠٠٠٠٠٢٠٠", "0" * 4000 + "9")
NAMES = ("", "0", "1", "a", "0[}]", "a[}]", "0[0]", "0.real", "{", "}")
TEXTS = ("", "text ", "5000000000", "%%", "%", "{", "}", "{{", "}}", "[", "(", ")", ":")
NUMBERS = (0, -1, 7, 97, 2**60, -(2**8190), 1.5, -1e308, 1e-308, 2.2250738585072014e-308, float("nan"), True, None)
values = st.one_of(
    st.sampled_from(NUMBERS),
    st.text(max_size=8),
    st.lists(st.sampled_from(("ab", 1, None)), max_size=3),
    st.just({"}": "x", "a": 400}),
)


def one_of(*texts: str) -> st.SearchStrategy[str]:
    return st.sampled_from(texts)


def joined(*parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(*parts).map("".join)


precisions = joined(one_of("", "."), one_of(*WIDTHS))
specifications = joined(
    one_of("", "", "<", "^", "x>", "9>", "="),
    one_of("", "", "+", "-", " ", "#", "0", "z"),
    one_of(*WIDTHS, "{}", "{1}"),
    one_of("", "", ",", "_"),
    precisions,
    one_of("", "", *"bcdefgnosx%EG"),
)
brace_fields = joined(
    *(one_of("{"), one_of(*NAMES), one_of("", "", "!r", "!s", "!a"), one_of("", ":"), specifications, one_of("}"))
)
percent_fields = joined(
    *(one_of("%"), one_of("", "(a)", "(b(c))"), one_of("", "", "-", "+0", " ", "#"), one_of(*WIDTHS, "*")),
    precisions,
    one_of("", "h", "l"),
    one_of(*"diouxXeEfFgGcrsa%"),
)


def templates(fields: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(st.one_of(fields, fields, one_of(*TEXTS)), max_size=4).map("".join)


@settings(max_examples=1000, deadline=None)
@given(template=templates(brace_fields), first=values, second=values)
def test_what_braces_make_is_no_longer_than_its_bound(template: str, first: Any, second: Any) -> None:
    given_values = ((first, second), {"a": first})
    try:
        if (bound := brace_format_size(template, given_values)) > MAX_CHARACTERS:
            return
        made = Formatter().vformat(template, *given_values)
    except (TemplateError, ValueError, TypeError, LookupError, AttributeError, OverflowError):
        return
    assert len(made) <= bound


@settings(max_examples=1000, deadline=None)
@given(template=templates(percent_fields), first=values, second=values, shape=st.sampled_from((1, 2, "names")))
def test_what_percent_makes_is_no_longer_than_its_bound(template: str, first: Any, second: Any, shape: Any) -> None:
    right = {1: (first,), 2: (first, second), "names": {"a": first, "b(c)": second}}[shape]
    try:
        if (bound := percent_format_size(template, right)) > MAX_CHARACTERS:
            return
        made = template % right
    except (TemplateError, ValueError, TypeError, LookupError, OverflowError):
        return
    assert len(made) <= bound


@pytest.mark.parametrize(
    "expression",
    [
        "'%0000000001500000000d' % 1",
        "'%(a)0000000001500000000d' % {'a': 1}",
        "'%(a(b))0000000001500000000d' % {'a(b)': 1}",
        "'%.0000000001500000000f' % 1.5",
        "'%0000000001500000000d' | format(1)",
        "'{:000000000900000000}'.format(1)",
        "'{:.000000000900000000f}'.format(1.5)",
        "'{:٩٠٠٠٠٠٠٠٠}'.format('x')",
        "'{:" + "0" * 5000 + "900000000}'.format(1)",
        "'{0[}]:{1}}'.format({'}': 'x'}, 900000000)",
        "'{0.a[}]:{1}}'.format({'a': {'}': 'x'}}, 900000000)",
        "'{a[}]:{b}}'.format_map({'a': {'}': 'x'}, 'b': 900000000})",
    ],
)
def test_a_width_that_is_written_in_an_uncommon_way_is_refused(expression: str) -> None:
    with pytest.raises(TemplateError, match=r"more than|computed width"):
        ChatTemplate(f"{{{{ ({expression}) | length }}}}").render([{"role": "user", "content": "hi"}])


def test_numbers_in_the_text_of_a_format_are_no_widths() -> None:
    template = "{{ 'call 18005551234: {:>4} {}'.format('x', 1) }}|{{ '18005551234 100%% %5.2f %s' % (1.5, 'é') }}"
    assert ChatTemplate(template).render([]) == "call 18005551234:    x 1|18005551234 100%  1.50 é"


def test_the_bound_of_a_long_format_is_counted_no_further_than_the_limit() -> None:
    arguments = (1,)
    for template in ("{0}" * 300_000, "{0:5}" * 200_000):
        with pytest.raises(TemplateError, match="more than 1,000,000"):
            method_arguments(template, "format", arguments, {})
    assert MAX_CHARACTERS < percent_format_size("%d" * 400_000, arguments) < MAX_CHARACTERS + 1000
