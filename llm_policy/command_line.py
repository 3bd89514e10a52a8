"""The command line of every script: dataclasses, a YAML file under --config, and a --help that fits on one screen."""

import difflib
import os
import re
import shutil
import sys
import textwrap
import types
from argparse import ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from enum import Enum
from pathlib import Path
from typing import Union, get_args, get_origin, get_type_hints

from trl import TrlParser

from llm_policy.errors import InputError
from llm_policy.ranges import check_mappings, check_products, check_ranges
from llm_policy.reading import check_texts, expand_home, read_yaml
from llm_policy.run_files import ROOT

HELP, HELP_ALL = {"-h", "--help"}, {"--help_all", "--help-all"}
FOREIGN_PACKAGES = ("trl", "transformers")  # their options are many: --help leaves them to --help_all
EXIT_CODES = {
    0: "done",
    2: "the input cannot be used (one line says why)",
    75: "interrupted",
}
KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text in quotes",
    list: "a list",
    dict: "a mapping",
}
WIDEST_LINE = 120
CONFIG_HELP = "YAML file with options; flags win over it."


class HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Of --help_all: the description as it is, and each option's default."""


class Parser(TrlParser):
    """TrlParser whose errors are an `InputError` of one line, without the list of all options."""

    def error(self, message: str):
        raise InputError(f"{plain_message(message)}; see --help")


def plain_message(message: str) -> str:
    """argparse's "argument --a_b/--a-b: invalid int value: 'x'" -> "--a_b 'x': expected a whole number"."""
    message = re.sub(r"^argument (--\w+)[^:]*: ", r"\1: ", message)
    for kind, pattern in (
        (int, r"(--\w+): invalid int value: '(.*)'"),
        (float, r"(--\w+): invalid float value: '(.*)'"),
        (bool, r"(--\w+): Truthy value expected: got (.*) but expected one of .*"),
    ):
        message = re.sub(pattern, rf"\1 '\2': expected {KINDS[kind]}", message)
    return message


def parse_arguments(
    argv: Sequence[str] | None, groups: Sequence[type], *, description: str, default_config: Path | None = None,
    own: Sequence[type] | None = None, exit_codes: Mapping[int, str] = EXIT_CODES, config_help: str = CONFIG_HELP,
) -> tuple[list, str]:  # fmt: skip
    """Read a command line and its YAML file.

    Args:
        argv: the arguments; None for those of the process.
        groups: dataclasses. Every field is an option, and each field of the script's own has a help text. What a
            group's `rare` names is left to --help_all.
        description: what the script does, with examples: its docstring.
        default_config: YAML file that is read where no --config is named.
        own: the groups that --help lists; None for those that TRL and Transformers do not define.
        exit_codes: code -> meaning, for the last line of --help.
        config_help: what --help says of --config.
    Returns one instance of each dataclass and the YAML file's path, "" for none. Flags win over the file, and the last
    --config counts.
    Raises `InputError`, one line, for unknown and abbreviated flags, unusable values and an unusable file.
    --help and --help_all print and leave with code 0.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if own is None:
        own = [group for group in groups if group.__module__.partition(".")[0] not in FOREIGN_PACKAGES]
    for field in own_fields(own):
        assert field.metadata.get("help"), f"{field.name}: an option without a help text"
    if HELP & set(argv):
        print(short_help(groups, own, description, default_config, exit_codes, config_help))
        raise SystemExit(0)
    # No --help of argparse: its usage alone would fill a screen. No abbreviations: a new option must not break them.
    usage = "%(prog)s [--config FILE] [--OPTION VALUE ...]"
    parser = Parser(
        tuple(groups),  # type: ignore[arg-type]  # TRL's name for a dataclass is no type
        description=description.strip(), epilog=exit_codes_text(exit_codes), usage=usage, formatter_class=HelpFormatter,
        add_help=False, allow_abbrev=False,
    )  # fmt: skip
    if HELP_ALL & set(argv):
        escape_percent_signs(parser, own)
        parser.print_help()
        raise SystemExit(0)

    argv, config = take_config(argv, default_config)
    values = read_config(config, groups, own) if config else {}
    names = [field.name for group in groups for field in fields(group) if field.init]
    unknown = [name for name in values if name not in names]
    if unknown:
        raise InputError(f"{config}: unknown options: {', '.join(unknown)}{suggestion(unknown[0], names)}; see --help")
    parser.set_defaults_with_config(**values)
    given = {option_name(argument) for argument in argv if argument.startswith("--")}
    with naming_file(config, values.keys() - given):
        check_lists(argv, groups)
        found, unknown = parser.parse_known_args(argv)
        if unknown:
            raise InputError(f"unknown arguments: {' '.join(unknown)}{suggestion(unknown[0], names)}; see --help")
        defaults = {field.name: field.default for group in groups for field in fields(group)}
        check_texts({name: value for name, value in vars(found).items() if value != defaults.get(name)})
        check_ranges(vars(found), groups)
        check_products(vars(found))
        try:
            parsed = list(parser.parse_args_into_dataclasses(argv, look_for_args_file=False))
        except (ValueError, TypeError, OSError, ImportError, LookupError) as error:  # of a dataclass that checks values
            where = f"{config} and the command line: " if config else ""
            raise InputError(f"{where}{' '.join(str(error).split()).rstrip('.')}; see --help") from error
        for instance in parsed:  # JSON is read by now
            check_mappings(vars(instance))
            expand_home(instance)
    return parsed, config


@contextmanager
def naming_file(config: str, options: Collection[str]) -> Iterator[None]:
    """An `InputError` about one of `options`, which stand in the file `config` alone, names the file."""
    try:
        yield
    except InputError as error:
        about = re.match(r"--(\w+)", str(error))
        if about and about[1] in options:
            raise InputError(f"{config}: {error}") from error
        raise


def option_name(word: str) -> str:
    """
    >>> option_name("--max-steps=3")
    'max_steps'
    """
    return word.partition("=")[0].lstrip("-").replace("-", "_")


def check_lists(argv: Sequence[str], groups: Sequence[type]) -> None:
    """`InputError` for a list without a default that is given twice: argparse would drop the first one."""
    flags = [option_name(argument) for argument in argv if argument.startswith("--")]
    for group in groups:
        hints = get_type_hints(group)
        for field in fields(group):
            is_needed = field.default is MISSING and field.default_factory is MISSING
            if is_needed and get_origin(hints[field.name]) is list and flags.count(field.name) > 1:
                raise InputError(f"--{field.name}: is given twice; give it once, with all values behind it")


# The YAML file ----------------------------------------------------------------------------------------------------


def take_config(argv: list[str], default_config: Path | None) -> tuple[list[str], str]:
    """The arguments without --config, and the file that the last one names, or `default_config`, or ""."""
    rest, config = [], "" if default_config is None else str(default_config)
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name != "--config":
            rest.append(argument)
            continue
        config = value if equals else next(arguments, "")
        if not config:
            raise InputError("--config: expected the path of a YAML file after it")
    check_texts({"config": config} if config else {})
    return rest, os.path.expanduser(config)


def asks_for_help(argv: Sequence[str]) -> bool:
    return bool((HELP | HELP_ALL) & set(argv))


def read_option(
    argv: Sequence[str] | None, name: str, default: str, default_config: Path | None = None, bare: str | None = None
) -> str:
    """One option before all others are known: what the last `--name` says, else the YAML file, else `default`.

    For an option that decides which other options there are. Nothing is checked here.

    Args:
        bare: what `--name` says at the end of the line; `default` where it is None.
    """
    rest, config = take_config(sys.argv[1:] if argv is None else list(argv), default_config)
    value = default
    if config and Path(config).is_file():
        try:
            values = read_yaml(config)
        except (ValueError, OSError):
            values = None  # parse_arguments says what is wrong with it
        found = values.get(name) if isinstance(values, dict) else None
        value = default if found is None else str(found)
    for i, argument in enumerate(rest):
        flag, equals, given = argument.partition("=")
        if flag in (f"--{name}", f"--{name.replace('_', '-')}"):
            value = given if equals else next(iter(rest[i + 1 :]), default if bare is None else bare)
    return value


def read_config(config: str, groups: Sequence[type], own: Sequence[type]) -> dict:
    """The file's options; `InputError` where it is no YAML mapping, or a value has another type than its option.

    argparse converts, or refuses, what stands there as text, and takes everything else as it is.
    """
    try:
        values = read_yaml(config)
    except FileNotFoundError as error:
        raise InputError(f"--config {config}: no such file; configs/ holds the ones that come with this") from error
    except (ValueError, OSError) as error:
        raise InputError(f"--config {config}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise InputError(f"--config {config} must contain a YAML mapping, one `option: value` per line")
    for group in groups:
        for name, hint in get_type_hints(group).items():
            # TRL takes text for more than it names, `all-linear` for a list say
            is_left_to_trl = group not in own and isinstance(values.get(name), str)
            if name not in values or is_left_to_trl or fits(values[name], hint):
                continue
            if type(values[name]) in (int, float) and str in union_members(hint):
                values[name] = str(values[name])  # as on the command line
                continue
            kinds = [KINDS.get(get_origin(t) or t, str(t)) for t in union_members(hint) if t is not type(None)]
            remedy = (
                " of numbers such as 1.0e-4, with a point" if re.search(r"'-?\d+e-?\d+'", repr(values[name])) else ""
            )
            raise InputError(f"{config}: {name}: {values[name]!r}: expected {' or '.join(kinds)}{remedy}")
    return values


def union_members(hint: object) -> tuple:
    """`int | None` -> (int, NoneType); of what is no union, itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def fits(value: object, hint: object, text_is_converted: bool = True) -> bool:
    """Whether a value of a YAML file has the type `hint`; text counts as a number where it is converted."""
    members = union_members(hint)
    if len(members) > 1:
        return any(fits(value, member, text_is_converted) for member in members)
    if get_origin(hint) is list:
        return isinstance(value, list) and all(fits(item, get_args(hint)[0], text_is_converted=False) for item in value)
    if hint in (int, float, bool):
        if isinstance(value, str):
            return text_is_converted
        return type(value) is hint or (hint is float and type(value) is int)
    kind = get_origin(hint) or hint
    return isinstance(value, kind) if isinstance(kind, type) else True


def suggestion(unknown: str, names: Sequence[str]) -> str:
    """`(did you mean seed?)`, after a space, for "--see" or "see"; "" where no name is close."""
    dashes = "--" if unknown.startswith("--") else ""
    close = difflib.get_close_matches(option_name(unknown), names, n=1)
    return f" (did you mean {dashes}{close[0]}?)" if close else ""


# Help -------------------------------------------------------------------------------------------------------------


def own_fields(own: Sequence[type]) -> list[Field]:
    return [field for group in own for field in fields(group) if field.init]


def escape_percent_signs(parser: Parser, own: Sequence[type]) -> None:
    """argparse formats help texts with %; TRL escapes it in its own, we write it plainly."""
    names = {field.name for field in own_fields(own)}
    for action in parser._actions:
        if action.dest in names:
            action.help = (action.help or "").replace("%", "%%")


def exit_codes_text(exit_codes: Mapping[int, str]) -> str:
    return "exit codes: " + ", ".join(f"{code} {meaning}" for code, meaning in exit_codes.items())


def short_help(
    groups: Sequence[type], own: Sequence[type], description: str, default_config: Path | None,
    exit_codes: Mapping[int, str], config_help: str,
) -> str:  # fmt: skip
    """Description, the script's own options with their defaults, exit codes: as wide as the terminal."""
    columns = min(shutil.get_terminal_size().columns, WIDEST_LINE)
    rows = [("--config FILE", config_help)]
    rare = {name for group in own for name in getattr(group, "rare", ())}
    shown = [field for field in own_fields(own) if field.name not in rare]
    given = read_config(str(default_config), groups, own) if default_config else {}
    rows += [(f"--{field.name} {default_text(field, given)}".rstrip(), field.metadata["help"]) for field in shown]
    others = [group for group in groups if group not in own]
    owner = "TRL's " if all(group.__module__.startswith("trl.") for group in others) else ""
    more = ["those that few change"] * bool(rare)
    more += [f"those of {owner}{' and '.join(group.__name__ for group in others)}"] * bool(others)
    if more:
        rows.append(("--help_all", f"List all options: {', and '.join(more)}, too."))
    # The width of the first column that needs the fewest lines: a longer option has its help below it.
    tables = [table_lines(rows, width, columns) for width in range(16, max(17, columns // 2))]
    title = "options and their defaults:"
    if default_config is not None:
        title = f"options and their defaults (without --config, {relative(default_config)} is read):"
    return "\n".join(
        [*refilled(description, columns), "", title, *min(tables, key=len), "", exit_codes_text(exit_codes)]
    )


def refilled(description: str, columns: int) -> list[str]:
    """The lines of a docstring, its prose wrapped at `columns`; a paragraph with indented lines stays as it is."""
    lines: list[str] = []
    for paragraph in description.strip().split("\n\n"):
        is_prose = not any(line.startswith((" ", "- ")) for line in paragraph.splitlines())
        lines += [
            "",
            *(textwrap.wrap(paragraph, columns, break_long_words=False) if is_prose else paragraph.splitlines()),
        ]
    return lines[1:]


def table_lines(rows: Sequence[tuple[str, str]], width: int, columns: int) -> list[str]:
    """Two aligned columns, the first of `width` characters; the second is wrapped at `columns`."""
    lines = []
    for head, text in rows:
        texts = textwrap.wrap(text, max(20, columns - width - 4), break_long_words=False)
        if len(head) > width:
            lines.append(f"  {head}")
            head = ""
        for line in texts:
            lines.append(f"  {head:{width}}  {line}".rstrip())
            head = ""
    return lines


def default_text(field: Field, given: Mapping) -> str:
    """What the configuration gives, or a field's default, as it would stand on the command line, "" for None."""
    if field.name in given:
        value = given[field.name]
    elif field.default is MISSING and field.default_factory is MISSING:
        return "(required)"
    else:
        value = field.default if field.default_factory is MISSING else field.default_factory()
    if isinstance(value, list | tuple):
        return " ".join(map(value_text, value))
    return value_text(value)


def value_text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return relative(value) if value != "" else '""'


def relative(path: object) -> str:
    """A path below the repository's root without that root; everything else as it is."""
    return str(path).removeprefix(f"{ROOT}/")
