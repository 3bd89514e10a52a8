"""Seconds, tokens and memory of one GRPO step: TRL's stock path beside this project's, alternating in one run.

    python benchmarks/step_time.py                                       # embedded model, 11 prompts x 8: 10 minutes
    python benchmarks/step_time.py --taught                              # after the warm start, as in training
    python benchmarks/step_time.py --prompts 1 --group 64 --completion_tokens 200 --accumulation 4     # one riddle
    python benchmarks/step_time.py --prompts 8 --completion_tokens 128 --prompt_tokens 600 --accumulation 8
    python benchmarks/step_time.py --gemma_2b --prompts 1 --group 16     # GPU: Gemma-2B's shape, random weights

Same model, prompts, objective (`grpo`), completion lengths and rewards (random, so that every group has variance).
Without `--taught` the untrained model writes completions of one length that have nothing in common: free text. With
`--taught` completions are what training samples after the warm start: one sentence, then the action. The memory of each
path is measured in a process of its own, because the allocator returns nothing to the other.

The floor of sampling is what the model's matrix products alone take, a token of all completions at a time. The floor of
the step, on a CPU, is all operations of its products and attention (torch's FlopCounterMode), at the rate of one large
product in the same number format: TRL's seconds divided by it are the most that computing the same tokens can gain.
"""

import itertools
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llm_policy.startup import announce

announce(
    __name__,
    "PyTorch, Transformers and TRL. Then TRL's own step and this project's are timed in turn, "
    "about 10 minutes with the default options on two CPU cores",
)

import numpy as np
import torch
from datasets import Dataset
from figures import check_output, save_figures
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    set_seed,
)
from trl import GRPOConfig

from llm_policy import decoding
from llm_policy.chat import Messages, Reader, fit_to_template, prompt_token_ids, reply_token_ids
from llm_policy.command_line import parse_arguments
from llm_policy.completions import action_index, tagged
from llm_policy.environments.frozen_lake import CANONICAL_GRIDS, FrozenLake
from llm_policy.errors import InputError, check_choices, run_script
from llm_policy.grpo.trainer import PolicyTrainer
from llm_policy.grpo.warm_start import Lesson, teach_format
from llm_policy.hardware import take_granted_threads, this_device
from llm_policy.models import EMBEDDED_MODEL, load_model, load_tokenizer
from llm_policy.number_format import FORMATS, faster_format
from tasks.frozen_lake import lake_words

PATHS = {"stock TRL": False, "packed": True}
LAKE, WORDS = FrozenLake(CANONICAL_GRIDS["4x4"]), lake_words("coordinates")
IS_REPLY = tagged(lambda answer: action_index(answer, LAKE.actions) is not None)


@dataclass(kw_only=True)
class StepArguments:
    """Size of the step that is timed."""

    prompts: int = field(default=11, metadata={"help": "Prompts per step."})
    group: int = field(default=8, metadata={"help": "Completions per prompt."})
    completion_tokens: int = field(default=24, metadata={"help": "Of each completion; with --taught at most."})
    prompt_tokens: int = field(
        default=0, metadata={"help": "At least so many per prompt, by examples of other lakes, different in each."}
    )
    accumulation: int = field(default=2, metadata={"help": "Micro-batches per step."})
    dtype: str = field(default="auto", metadata={"help": "bfloat16 or float32; auto: what is faster here."})
    gemma_2b: bool = field(default=False, metadata={"help": "Gemma-2B's architecture, random weights."})
    taught: bool = field(default=False, metadata={"help": "Teach the answer format first, then sample freely."})

    def __post_init__(self) -> None:
        check_choices(self, {"dtype": ("auto", *FORMATS)})
        if (completions := self.prompts * self.group) % self.accumulation:
            raise InputError(
                f"--accumulation {self.accumulation}: does not divide the {completions} completions of a step, "
                f"--prompts {self.prompts} x --group {self.group}"
            )


@dataclass
class OutputArguments:
    rounds: int = field(default=3, metadata={"help": "Timed steps of each path, after a warm-up step."})
    measure_memory: bool = field(default=True, metadata={"help": "Peak memory, too, in two further processes."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the figures."})


class Meter(TrainerCallback):
    """Seconds in sampling, in the training pass and in all of a step, and tokens through the embedding.

    A step is what the trainer repeats: what `train` does once, before and after its steps, does not count.
    """

    def __init__(self, trainer: PolicyTrainer) -> None:
        self.step = self.sampling = 0.0
        self.tokens = 0
        trainer.add_callback(self)
        trainer._generate_single_turn = self._timed(trainer._generate_single_turn, "sampling")
        trainer._prepare_inputs = self._timed(trainer._prepare_inputs, "preparing")
        trainer.training_step = self._timed(trainer.training_step, "training_step")
        self.preparing = self.training_step = 0.0
        self._count(trainer.model.get_input_embeddings())  # the merged copy that decodes inherits the hook

    def on_step_begin(self, *_args, **_options) -> None:
        synchronize()
        self._begun = time.perf_counter()

    def on_step_end(self, *_args, **_options) -> None:
        synchronize()
        self.step = time.perf_counter() - self._begun

    def _count(self, embedding: torch.nn.Module) -> None:
        def hook(_module, arguments, _output):
            self.tokens += arguments[0].numel()

        def counted(step):
            before = self.tokens
            replay = recorded(step)  # carries nothing out, but calls the hook
            of_a_pass, self.tokens = self.tokens - before, before

            def counted_replay() -> None:
                self.tokens += of_a_pass
                replay()

            return step if replay is step else counted_replay

        embedding.register_forward_hook(hook)
        recorded, decoding.recorded = decoding.recorded, counted

    def _timed(self, function, name: str):
        def timed(*args, **kwargs):
            synchronize()
            started = time.perf_counter()
            output = function(*args, **kwargs)
            synchronize()
            setattr(self, name, getattr(self, name) + time.perf_counter() - started)
            return output

        return timed


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def random_reward(completions, **_) -> list[float]:
    return np.random.default_rng(len(completions)).random(len(completions)).tolist()


def lessons() -> list[Lesson]:
    """What the warm start teaches on the 4x4 lake."""
    actions = range(len(LAKE.actions))
    return [
        (WORDS.messages(LAKE, state), [WORDS.reply(LAKE, state, action) for action in actions])
        for state in LAKE.acting_states
    ]


def messages_of(state: int, number: int, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int) -> Messages:
    """The prompt of a state, behind as many random lakes as fill it up."""
    system, user = WORDS.messages(LAKE, state)
    messages, seeds = fit_to_template([system, user], tokenizer), itertools.count(1000 * number)
    while len(prompt_token_ids(messages, tokenizer)) < prompt_tokens:
        lake = "\n".join(generate_random_map(4, seed=next(seeds)))
        user = {**user, "content": f"Another lake:\n{lake}\n{user['content']}"}
        messages = fit_to_template([system, user], tokenizer)
    return messages


def floor_of_sampling(model: torch.nn.Module, rows: int, tokens: int) -> float:
    """Seconds of the matrix products alone that decoding takes: every linear layer on `rows` rows, `tokens` times."""
    plain = model.get_base_model()
    base = [m.get_base_layer() if isinstance(m, LoraLayer) else m for n, m in plain.named_modules() if "lora_" not in n]
    layers = list({id(m): m for m in base if isinstance(m, torch.nn.Linear)}.values())
    inputs = {n: torch.randn(rows, n, device=model.device, dtype=plain.dtype) for n in {m.in_features for m in layers}}
    seconds = []
    with torch.no_grad():
        for _ in range(5):
            synchronize()
            started = time.perf_counter()
            for layer in layers:
                layer(inputs[layer.in_features])
            synchronize()
            seconds.append(time.perf_counter() - started)
    return float(np.median(seconds)) * tokens


def matrix_product_rate(dtype: str) -> float:
    """Floating-point operations per second of a product of 2048 x 2048 matrices; the best of five."""
    a, b = torch.randn(2, 2048, 2048, dtype=FORMATS[dtype])
    torch.mm(a, b)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - started)
    return 2 * 2048**3 / min(seconds)


def floor_of_step(trainer: PolicyTrainer, meter: "Meter", dtype: str) -> float:
    """Seconds of the products and attention of one step, at the rate of one large product; on CPUs."""
    with FlopCounterMode(display=False) as counter:
        one_step(trainer, meter)
    return counter.get_total_flops() / matrix_product_rate(dtype)


def gemma_2b(tokenizer: PreTrainedTokenizerBase, dtype: str) -> PreTrainedModel:
    """Gemma-2B's architecture at full size, random weights: time and memory do not depend on them."""
    config = GemmaConfig(
        vocab_size=256_000, hidden_size=2048, intermediate_size=16_384, num_hidden_layers=18,
        num_attention_heads=8, num_key_value_heads=1, head_dim=256, max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with this_device():
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))


def format_of(dtype: str) -> str:
    """What `--dtype` means here; says so where the machine decides."""
    if dtype != "auto":
        return dtype
    faster, line = faster_format(torch.cuda.is_available())
    print(line, flush=True)
    return faster


def build(path: str, arguments: StepArguments, folder: str) -> PolicyTrainer:
    """One trainer on its own copy of the model; `path` is a key of `PATHS`."""
    set_seed(0)
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    if arguments.gemma_2b:
        model = gemma_2b(tokenizer, arguments.dtype)
    else:
        model = load_model(EMBEDDED_MODEL, dtype=arguments.dtype)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    if arguments.taught:
        student = get_peft_model(model, lora)
        teach_format(student, Reader(tokenizer), lessons(), IS_REPLY, max_steps=60, prompts_per_step=6,
                     learning_rate=1e-3, threshold=0.9, seed=0)  # fmt: skip
        model = student.merge_and_unload()
    model = get_peft_model(model, lora)
    states = (LAKE.acting_states * arguments.prompts)[: arguments.prompts]
    rows = [
        {"prompt": messages_of(state, number, tokenizer, arguments.prompt_tokens), "state": state}
        for number, state in enumerate(states)
    ]
    completions = arguments.prompts * arguments.group
    training = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=completions // arguments.accumulation,
        gradient_accumulation_steps=arguments.accumulation,
        num_generations=arguments.group,
        max_completion_length=arguments.completion_tokens,
        generation_kwargs=None if arguments.taught else {"min_new_tokens": arguments.completion_tokens},
        max_steps=1,
        learning_rate=1e-5,
        bf16=arguments.dtype == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = PolicyTrainer(
        model,
        [random_reward],
        training,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        packed=PATHS[path],
        guesses=lambda rows: [reply_token_ids(WORDS.reply(LAKE, row["state"], 0), tokenizer) for row in rows],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def one_step(trainer: PolicyTrainer, meter: Meter) -> dict[str, float]:
    """One optimiser step: seconds split into sampling, training pass and rest, and tokens computed."""
    meter.sampling = meter.preparing = meter.training_step = 0.0
    meter.tokens = 0
    trainer.train()
    training = meter.training_step - meter.preparing
    return {
        "seconds": meter.step,
        "sampling": meter.sampling,
        "training_pass": training,
        "rest": meter.step - meter.sampling - training,
        "tokens": float(meter.tokens),
    }


def memory_of_one_step(path: str, arguments: StepArguments) -> float:
    """Peak memory of this process, in GB, after one step on `path`; on a GPU that of the GPU."""
    take_granted_threads()
    with tempfile.TemporaryDirectory() as folder:
        build(path, arguments, folder).train()
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def peak_memory_gb(path: str, arguments: StepArguments) -> float:
    """`memory_of_one_step` of a fresh process."""
    print(f"measuring peak memory of {path} in a process of its own ...", flush=True)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(memory_of_one_step, path, arguments).result()


def main(argv: Sequence[str] | None = None) -> None:
    (arguments, others), _ = parse_arguments(argv, (StepArguments, OutputArguments), description=__doc__)
    check_output(others.output)
    if (gpus := torch.cuda.device_count()) > 1:
        raise InputError(f"{gpus} GPUs are there, and a step is of one: CUDA_VISIBLE_DEVICES=0 takes the first")
    if threads := take_granted_threads():
        print(threads)
    arguments.dtype = format_of(arguments.dtype)
    with tempfile.TemporaryDirectory() as folder:
        memory = {path: peak_memory_gb(path, arguments) if others.measure_memory else None for path in PATHS}
        trainers = {}
        for path in PATHS:
            print(f"building the trainer of {path} ...", flush=True)
            trainers[path] = build(path, arguments, folder)
        meters = {path: Meter(trainer) for path, trainer in trainers.items()}
        rounds: dict[str, list[dict[str, float]]] = {path: [] for path in PATHS}
        for round_number in range(others.rounds + 1):
            for path in PATHS:
                name = f"round {round_number} of {others.rounds}" if round_number else "warm-up round, not counted"
                print(f"{name}, {path}: ", end="", flush=True)
                figures = one_step(trainers[path], meters[path])
                print(f"{figures['seconds']:.1f} s", flush=True)
                if round_number:
                    rounds[path].append(figures)

    medians = {path: {k: float(np.median([r[k] for r in rounds[path]])) for k in rounds[path][0]} for path in PATHS}
    print(f"\n{'':16}{'s/step':>9}{'sampling':>10}{'training':>10}{'rest':>8}{'tokens':>9}{'peak GB':>9}")
    for path, m in medians.items():
        print(
            f"{path:16}{m['seconds']:9.2f}{m['sampling']:10.2f}{m['training_pass']:10.2f}{m['rest']:8.2f}"
            f"{m['tokens']:9.0f}{'' if memory[path] is None else f'{memory[path]:9.2f}'}"
        )
    floor = floor_of_sampling(
        trainers["packed"].model, arguments.prompts * arguments.group, arguments.completion_tokens
    )
    print(f"floor of sampling: {floor:.2f} s; packed takes {medians['packed']['sampling'] / floor:.1f} times that")
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(rounds["stock TRL"], rounds["packed"], strict=True)]
    spread = f"from {min(ratios):.2f} to {max(ratios):.2f}"
    print(f"stock / packed, median of {len(ratios)} rounds: {np.median(ratios):.2f} ({spread})")
    step_floor = None
    if not torch.cuda.is_available():
        print("counting the operations of one more step ...", flush=True)
        step_floor = floor_of_step(trainers["packed"], meters["packed"], arguments.dtype)
        most = medians["stock TRL"]["seconds"] / step_floor
        print(f"floor of the packed step: {step_floor:.2f} s; stock takes {most:.1f} times that")
    if others.output:
        figures = {
            "dtype": arguments.dtype,
            "rounds": rounds,
            "medians": medians,
            "peak_memory_gb": memory,
            "floor_of_sampling": floor,
            "floor_of_step": step_floor,
            "ratio": float(np.median(ratios)),
        }
        save_figures(others.output, figures, on_gpu=torch.cuda.is_available())


if __name__ == "__main__":
    run_script(main)
