"""One kind of error for what a user gave: a line with the file, the value and the remedy, and exit code 2."""

import sys
import warnings
from collections.abc import Callable, Collection, Mapping

EXIT_INPUT_ERROR = 2


class InputError(Exception):
    """What the user gave cannot be used. The message is one line: where, what was found, what was expected."""


def check_choices(arguments: object, choices: Mapping[str, Collection[str]]) -> None:
    """`InputError` for the first field of `arguments` whose value is none of those allowed for it."""
    for name, allowed in choices.items():
        if getattr(arguments, name) not in allowed:
            raise InputError(f"--{name} {getattr(arguments, name)!r}: expected one of {', '.join(allowed)}")


def check_at_least(arguments: object, least: Mapping[str, int]) -> None:
    """`InputError` for the first field of `arguments` that is no integer of at least its bound; None passes."""
    for name, bound in least.items():
        value = getattr(arguments, name)
        if value is not None and (not isinstance(value, int) or value < bound):
            raise InputError(f"--{name} {value!r}: expected an integer of at least {bound}")


def run_script(main: Callable[[], int | None]) -> None:
    """Run a script's `main` and exit: its return value as exit code, an `InputError` as one line and code 2."""
    # Deprecations between the pinned libraries: nothing that a user of these scripts could act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl|peft)\b")
    try:
        sys.exit(main())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_INPUT_ERROR)
