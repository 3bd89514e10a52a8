"""Where the minutes of `make train` go, and how far they are from what the matrix products alone would cost.

    python benchmarks/profile_training.py                                   # about three minutes on two CPU cores
    python benchmarks/profile_training.py --output results/speed/profile/profile.json

The timed steps are plain GRPO's on random rewards, which compute nearly the same tokens as those of `make train`. Each
phase of a run is timed on its own. The step is split into sampling, training pass and rest, and its operations are
listed by their own time. The floor is the floating-point operations of matrix products and attention (torch's
FlopCounterMode), divided by the rate that this machine reaches on one large product in the same number format.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a run on a CPU is what is profiled
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llm_policy.startup import announce

announce(
    __name__,
    "PyTorch, Transformers and TRL. Then each phase of a training run is timed, about three minutes on two CPU cores",
)

from figures import check_output, save_figures
from peft import LoraConfig, get_peft_model
from step_time import (
    IS_REPLY,
    LAKE,
    WORDS,
    Meter,
    StepArguments,
    build,
    format_of,
    lessons,
    matrix_product_rate,
    one_step,
)
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from llm_policy.chat import Reader
from llm_policy.command_line import parse_arguments
from llm_policy.errors import run_script
from llm_policy.grpo.warm_start import teach_format
from llm_policy.hardware import take_granted_threads
from llm_policy.models import EMBEDDED_MODEL, ROOT, load_model, load_tokenizer
from tasks.tabular_judge import TableJudge

WARM_START_STEPS, GRPO_STEPS, EVALUATIONS = 5, 30, 7  # of a run of configs/laptop.yaml that learns in 30 steps
WARM_START_PROMPTS = 6
TOP_OPERATIONS = 12


def say(text: str) -> None:
    print(text, flush=True)


def seconds(function) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


@dataclass
class Arguments:
    """The size of the step is that of configs/laptop.yaml."""

    prompts: int = field(default=11, metadata={"help": "Prompts per step."})
    group: int = field(default=2, metadata={"help": "Completions per prompt."})
    completion_tokens: int = field(default=32, metadata={"help": "Of each completion, at most."})
    accumulation: int = field(default=1, metadata={"help": "Micro-batches per step."})
    dtype: str = field(default="auto", metadata={"help": "bfloat16 or float32; auto: what is faster here."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the figures."})


def main(argv: Sequence[str] | None = None) -> None:
    (arguments,), _ = parse_arguments(argv, (Arguments,), description=__doc__)
    check_output(arguments.output)
    if threads := take_granted_threads():
        print(threads)
    step_arguments = StepArguments(
        prompts=arguments.prompts,
        group=arguments.group,
        completion_tokens=arguments.completion_tokens,
        accumulation=arguments.accumulation,
        dtype=format_of(arguments.dtype),
        taught=True,
    )
    dtype = step_arguments.dtype

    phases = {}  # name -> (seconds once, times in a run)
    say("timing the imports of train_script.py and the loading of the model ...")
    imports = [sys.executable, "-c", "import train_script"]
    phases["imports"] = (seconds(lambda: subprocess.run(imports, cwd=ROOT, check=True)), 1)
    phases["loading the model"] = (seconds(lambda: load_model(EMBEDDED_MODEL, dtype)), 2)  # again to join the adapters

    tokenizer, model = load_tokenizer(EMBEDDED_MODEL), load_model(EMBEDDED_MODEL, dtype)
    reader = Reader(tokenizer, max_completion_tokens=32)
    judge = TableJudge([LAKE], WORDS, reader, {})
    student = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    say(f"timing {WARM_START_STEPS} steps of the warm start, with its check ...")
    options = {"max_steps": WARM_START_STEPS, "prompts_per_step": WARM_START_PROMPTS, "learning_rate": 1e-3}
    options |= {"threshold": 2.0, "seed": 0}
    warm_start = seconds(lambda: teach_format(student, reader, lessons(), IS_REPLY, **options))
    phases["warm start, with its check"] = (warm_start, 1)
    say("timing the evaluations ...")
    judge.answers(student)
    phases["evaluation, greedy"] = (seconds(lambda: judge.answers(student)), EVALUATIONS)
    phases["evaluation, 8 samples per state"] = (seconds(lambda: judge.answers(student, 8)), 1)

    with tempfile.TemporaryDirectory() as folder:
        say("teaching the answer format to the model whose steps are timed ...")
        trainer = build("packed", step_arguments, folder)
        meter = Meter(trainer)
        say("timing three training steps, after a warm-up step ...")
        one_step(trainer, meter)  # first use of every kernel
        steps = [one_step(trainer, meter) for _ in range(3)]
        step = min(steps, key=lambda figures: figures["seconds"])
        for part in ("sampling", "training_pass", "rest"):
            phases[f"step: {part.replace('_', ' ')}"] = (step[part], GRPO_STEPS)
        rate = matrix_product_rate(dtype)
        say("counting the operations of one step, and timing each in another ...")
        with FlopCounterMode(display=False) as counter:
            one_step(trainer, meter)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            one_step(trainer, meter)

    total = sum(once * times for once, times in phases.values())
    print(f"\n{'':32}{'s once':>8}{'times':>7}{'s':>8}{'share':>8}")
    for name, (once, times) in phases.items():
        print(f"{name:32}{once:8.2f}{times:7}{once * times:8.1f}{once * times / total:8.0%}")
    print(f"{'all':32}{'':15}{total:8.1f}")
    teraflop = counter.get_total_flops() / 1e12
    floor = teraflop * 1e12 / rate
    print(
        f"\none step: {teraflop:.2f} TFLOP of matrix products and attention, at {rate / 1e9:.0f} GFLOP/s {floor:.2f} s"
    )
    print(f"measured {step['seconds']:.2f} s, {step['seconds'] / floor:.1f} times this floor")
    averages = profiler.key_averages()
    spent = sum(event.self_cpu_time_total for event in averages)
    top = sorted(averages, key=lambda event: -event.self_cpu_time_total)[:TOP_OPERATIONS]
    operations = [
        {"operation": event.key, "share": event.self_cpu_time_total / spent, "calls": event.count} for event in top
    ]
    print("\noperations of one step by their own time")
    for row in operations:
        print(f"{row['share']:6.1%}{row['calls']:7}  {row['operation']}")
    if arguments.output:
        figures = {
            "dtype": dtype,
            "phases": {name: {"seconds": once, "times": times} for name, (once, times) in phases.items()},
            "step_tflop": teraflop,
            "matrix_product_gflop_per_second": rate / 1e9,
            "floor_seconds": floor,
            "step_seconds": step["seconds"],
            "operations": operations,
        }
        save_figures(arguments.output, figures)


if __name__ == "__main__":
    run_script(main)
