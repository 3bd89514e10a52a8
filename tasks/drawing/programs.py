"""What is done with programs that ran: cut what draws nothing, tell how much of a picture is right."""

import ast
import time
from collections.abc import Callable

from tasks.drawing.sandbox import NAME, Grid

LONGEST_CLEANING_S = 5.0  # of one program: each statement takes a run, and a run may take seconds


def share_of_equal_pixels(drawn: Grid | None, wanted: Grid) -> float:
    """0 for another shape, or where nothing was drawn.

    >>> share_of_equal_pixels([[1, 2], [3, 4]], [[1, 2], [0, 0]])
    0.5
    """
    if drawn is None or len(drawn) != len(wanted) or len(drawn[0]) != len(wanted[0]):
        return 0.0
    pairs = [(a, b) for row, other in zip(drawn, wanted, strict=True) for a, b in zip(row, other, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def cleaned(code: str, draws: Callable[[str], Grid | None]) -> str:
    """`code` in one style, without the statements of `task` that change nothing of what it draws.

    Each statement of its top level is left out once, from the last to the first, and stays out if the picture stays as
    it was. After `LONGEST_CLEANING_S` the others stay.

    Args:
        draws: what a program makes of the picture to start from; None where it fails.
    """
    try:
        tree = ast.parse(code)
        text = ast.unparse(tree) + "\n"
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the sandbox reads more than Python does
        return code
    tasks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == NAME]
    started = time.monotonic()
    picture = draws(code)
    if not tasks or picture is None or draws(text) != picture:
        return code
    body = tasks[-1].body
    for place in reversed(range(len(body))):
        if time.monotonic() - started > LONGEST_CLEANING_S:
            break
        statement = body.pop(place)
        shorter = ast.unparse(tree) + "\n" if body else ""
        if shorter and draws(shorter) == picture:
            text = shorter
        else:
            body.insert(place, statement)
    return text
