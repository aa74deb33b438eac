"""The flags of `polyhead serve`: one for each setting, made from its definition.

Values are passed on as text to `service.config.settings`, which checks them.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from .setting_types import LIST_EXAMPLES, PAIR_EXAMPLES
from .settings import Settings, SettingsError, describe_unknown_setting

DESCRIPTION = """Serve models: NAME=SOURCE, where a source is a folder, a GGUF file or a hub id; "+ADAPTER" after it
merges a LoRA, a PEFT folder or a GGUF file. NAME:OTHER=ADAPTER lays one over the model NAME, beside others: one network
for all of them.
Without any, the quick-start models are fetched and served."""
EPILOG = """Flags go over the environment (POLYHEAD_PORT=8000), that over the file of --config, that over the
defaults."""

BOOLEAN_WORDS = ("true", "false", "yes", "no", "on", "off", "1", "0", "t", "f", "y", "n")  # pydantic's booleans
BOOLEAN_FLAGS = {
    f"--{name.replace('_', '-')}" for name, field in Settings.model_fields.items() if field.annotation is bool
}


class JoinValues(argparse.Action):
    """Of a flag that is given several times keeps all values, not the last one only."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        before = getattr(namespace, self.dest, "")
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


def parse_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the given values by setting. Raises SettingsError for unknown flags; --help prints and exits."""
    given, unknown = build_parser().parse_known_intermixed_args(expand_switches(arguments))
    if unknown:
        flags = [name.removeprefix("--").partition("=")[0] for name in unknown if name[:2] == "--"]
        raise SettingsError("\n".join(map(describe_unknown_flag, flags)) or f"unknown argument {unknown[0]!r}")
    values = vars(given)
    if not values["models"]:
        del values["models"]
    return values


def describe_unknown_flag(flag: str) -> str:
    """`flag` is given without its two dashes."""
    name = flag.replace("-", "_")
    if name in Settings.model_fields and flag != name.replace("_", "-"):
        return f"no flag is called '--{flag[:60]}'; did you mean --{name.replace('_', '-')}?"
    return describe_unknown_setting(name)


def expand_switches(arguments: Sequence[str]) -> list[str]:
    """Add =true to boolean flags without a value."""
    expanded = list(arguments)
    for index, argument in enumerate(arguments):
        if argument in BOOLEAN_FLAGS and (
            index + 1 == len(arguments) or arguments[index + 1].lower() not in BOOLEAN_WORDS
        ):
            expanded[index] = f"{argument}=true"
    return expanded


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("polyhead serve", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    for name, field in Settings.model_fields.items():
        if name == "models":
            parser.add_argument("models", nargs="*", metavar="NAME=SOURCE")
        else:
            flag = f"--{name.replace('_', '-')}"
            action = JoinValues if name in (*PAIR_EXAMPLES, *LIST_EXAMPLES) else "store"
            parser.add_argument(flag, action=action, default=argparse.SUPPRESS, metavar="VALUE", help=flag_help(field))
    return parser


def flag_help(field: FieldInfo) -> str:
    default = field.default
    shown = "" if default is PydanticUndefined or not str(default).strip("*") else f" [{default}]"
    return f"{field.description}{shown}".replace("%", "%%")
