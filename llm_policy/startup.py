"""A first line before the heavy imports: PyTorch, Transformers and TRL take 10 seconds, on a slow disk 50."""

import sys
from pathlib import Path


def announce(module_name: str, what: str = "PyTorch, Transformers and TRL") -> None:
    """Say on standard error what is being loaded, if `module_name` is the script that was called (`__main__`).

    Scripts call it before they import anything that takes time. This module must stay free of such imports.
    """
    if module_name == "__main__":
        print(f"{Path(sys.argv[0]).name}: loading {what} ...", file=sys.stderr, flush=True)
