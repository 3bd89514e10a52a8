"""Seconds to judge a run's adapter: its factors in float32, as PEFT reads them, and as `load_model` has them.

    python benchmarks/judging.py --run runs/maps_thought     # a bfloat16 run of a task with a table; about 3 minutes

Both judge the first maps of the run in turn, greedily, and the second is asked whether it answers as the first.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llm_policy.startup import announce

announce(__name__, "PyTorch and Transformers. Then a run is judged several times")

from peft import PeftModel

from llm_policy.chat import Reader
from llm_policy.command_line import parse_arguments
from llm_policy.errors import InputError, run_script
from llm_policy.hardware import device_text, take_granted_threads, this_device
from llm_policy.models import base_of_adapter, is_adapter, load_model, load_tokenizer
from llm_policy.run_files import run_settings
from tasks import task_module
from tasks.tabular_judge import TableJudge

MAPS = 3


@dataclass
class Arguments:
    run: str = field(default="runs/maps_thought", metadata={"help": "Folder of a finished run."})
    rounds: int = field(default=3, metadata={"help": "How often each judges."})


def main(argv: Sequence[str] | None = None) -> None:
    (arguments,), _ = parse_arguments(argv, (Arguments,), description=__doc__)
    if threads := take_granted_threads():
        print(threads)
    folder, settings = Path(arguments.run), run_settings(arguments.run)
    if not settings or not is_adapter(folder):
        raise InputError(f"--run {folder}: holds no finished run with an adapter; train one, or name another folder")
    reader = Reader(load_tokenizer(folder), settings["max_completion_length"])
    judge = task_module(settings["task"]).make_judge(settings, reader, 1000, 0)
    if not isinstance(judge, TableJudge):
        raise InputError(f"--run {folder}: its task is {settings['task']}; expected a run of a task with a table")
    judge = replace(judge, environments=judge.environments[:MAPS])
    device, dtype = this_device(), settings["dtype"]

    name, revision = base_of_adapter(folder)
    models = {
        "float32": PeftModel.from_pretrained(load_model(name, dtype, revision=revision, device=device), folder),
        dtype: load_model(folder, dtype, device=device),
    }
    if len(models) == 1:
        raise InputError(f"--run {folder}: is a float32 run, in which both are the same; name one in bfloat16")
    states = sum(len(environment.acting_states) for environment in judge.environments)
    print(
        f"judging {states} states {arguments.rounds} times each, {device_text(on_gpu=device.type == 'cuda')} ...",
        flush=True,
    )
    seconds, found = {which: [] for which in models}, {}
    for timed in (False, *[True] * arguments.rounds):  # at first every kernel is new
        for which, model in models.items():
            begin = time.perf_counter()
            found[which] = judge.answers(model)
            if timed:
                seconds[which].append(time.perf_counter() - begin)
    for which, spread in seconds.items():
        print(f"factors in {which}: {median(spread):6.1f} s  ({', '.join(f'{value:.1f}' for value in spread)})")
    ratios = sorted(a / b for a, b in zip(*seconds.values(), strict=True))
    print(f"ratio {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    first, second = found.values()
    print("the same policy tables" if first["policies"] == second["policies"] else "other answers in some states")


if __name__ == "__main__":
    run_script(main)
