"""How long a step takes, on TRL's path and on this one."""

import numpy as np

from llm_policy.report import files
from llm_policy.report.cells import link, markdown
from llm_policy.report.dates import date_and_commit, made
from llm_policy.report.studies import SPEED


def speed_section() -> str:
    """speed/step_time/*.json: a step on TRL's path and on this one, with its parts, and the ratio."""
    headers = (
        "benchmark", "TRL / here", "seconds per step", "sampling", "training pass", "tokens computed",
        "peak memory, GB", "sampling, times its floor", "TRL / floor", "processor", "date, commit",
    )  # fmt: skip
    rows = []
    for file in sorted((files.RESULTS / SPEED / "step_time").glob("*.json")):
        with files.whole(file):
            content = files.read_json(file)
            stock, packed = (content["medians"][path] for path in ("stock TRL", "packed"))
            ratios = [a["seconds"] / b["seconds"] for a, b in zip(*content["rounds"].values(), strict=True)]
            parts = [f"{stock[part]:.1f}, {packed[part]:.1f}" for part in ("seconds", "sampling", "training_pass")]
            rows.append(
                [
                    link(file.stem, SPEED, "step_time", file.name),
                    f"**{np.median(ratios):.1f}** ({min(ratios):.1f} to {max(ratios):.1f})",
                    *parts,
                    f"{stock['tokens']:.0f}, {packed['tokens']:.0f}",
                    ", ".join(f"{gb:.1f}" for gb in content["peak_memory_gb"].values() if gb is not None),
                    f"{packed['sampling'] / content['floor_of_sampling']:.1f}",
                    f"{stock['seconds'] / floor:.1f}" if (floor := content.get("floor_of_step")) else "",
                    ", ".join(content[key] for key in ("device", "processor", "dtype") if key in content),
                    date_and_commit(made(file)),
                ]
            )
    return markdown(headers, rows)
