"""One kind of error for what a user gave: a line with the file, the value and the remedy, and exit code 2."""

import sys
import warnings
from collections.abc import Callable

EXIT_INPUT_ERROR = 2


class InputError(Exception):
    """What the user gave cannot be used. The message is one line: where, what was found, what was expected."""


def run_script(main: Callable[[], int | None]) -> None:
    """Run a script's `main` and exit: its return value as exit code, an `InputError` as one line and code 2."""
    # Deprecations between the pinned libraries: nothing that a user of these scripts could act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl|peft)\b")
    try:
        sys.exit(main())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_INPUT_ERROR)
