"""How commands and their outputs are found in a page, and compared."""

import pytest

from docs.site_build.command_blocks import Command, matches, runnable

PAGE = """
```console
$ curl -d '{"a":
    1}' \\
    x
{"b": 2}
$ true
```

```python
print(1)
```

```text
1
```

```python
pass
```

Words.

```text
2
```

```sh
make image
```
"""


def test_commands_are_found_with_their_outputs() -> None:
    assert runnable(PAGE) == [
        Command("console", "curl -d '{\"a\":\n    1}' \\\n    x", '{"b": 2}\n', 3),
        Command("console", "true", None, 7),
        Command("python", "print(1)\n", "1\n", 11),
        Command("python", "pass\n", None, 19),
    ]


@pytest.mark.parametrize(
    ("shown", "given", "equal"),
    [
        ('{"a": 1,\n"b": 2}', '{"a":1,"b":2}\n', True),
        ('{"a": 0.99...}', '{"a":0.9987}', True),
        ("1. ...", "1. Bananas\n2. Oranges", True),
        ('{"a": 0.99...}', '{"a":0.98}', False),
        ("ab", "abc", False),
        ("a.c", "abc", False),
    ],
)
def test_white_space_does_not_count_and_dots_stand_for_anything(shown: str, given: str, equal: bool) -> None:
    assert matches(shown, given) is equal
