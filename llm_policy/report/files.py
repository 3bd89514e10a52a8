"""Where results and pictures lie, and the reading of one file: a damaged one is one line that names it.

Other modules say `files.ROOT` and `files.RESULTS`, because tests put another folder there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib.figure import Figure
from pydantic import BaseModel, ValidationError

from llm_policy.errors import InputError
from llm_policy.reading import first_of, parse_json, read_text
from llm_policy.run_files import ROOT

RESULTS = ROOT / "results"


def read_json(file: Path) -> dict:
    try:
        found = parse_json(read_text(file))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{shown(file)}: cannot be read as JSON ({reason}); run it again or delete it") from error
    if not isinstance(found, dict):
        raise InputError(f"{shown(file)}: holds {found!r:.40}, expected an object in braces; run it again or delete it")
    return found


def read_lines(file: Path, kind: type[BaseModel]) -> list[dict]:
    """The lines of a metrics.jsonl, at least one and each of that kind."""
    remedy = "run it again or delete it"
    try:
        texts = read_text(file).splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"{shown(file)}: cannot be read ({error}); {remedy}") from error
    if not texts:
        raise InputError(f"{shown(file)}: holds no line; {remedy}")
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(parse_json(text))
            kind.model_validate(lines[-1])
        except ValidationError as error:
            raise InputError(f"{shown(file)}: line {number}: {first_of(error)}; {remedy}") from error
        except ValueError as error:
            raise InputError(f"{shown(file)}: line {number}: is no JSON ({error}); {remedy}") from error
    return lines


def save_picture(figure: Figure, name: str) -> None:
    """In docs/pictures."""
    file = ROOT / "docs" / "pictures" / f"{name}.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)


def shown(path: Path) -> str:
    """A path below the repository's root without that root."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


@contextmanager
def whole(seed: Path) -> Iterator[None]:
    """One line where the files of a seed are not what the scripts write."""
    try:
        yield
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        reason = first_of(error) if isinstance(error, ValidationError) else repr(error)
        raise InputError(f"{shown(seed)}: its files are damaged ({reason}); run it again or delete it") from error
