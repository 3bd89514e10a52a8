"""The range of every numeric option of every script, in one table; the command line checks flags and YAML against it.

No option takes nan or inf. Upper bounds stand where a larger value means a slip of the pen or exceeds memory or days:
an option that is bounded so says it before the work begins.
"""

import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Union, get_args, get_origin, get_type_hints

from llm_policy.errors import InputError

# Interval, in the notation of mathematics -> options. "Class.option" where an option of that name means another thing.
TABLE = {
    "[1, 100000]": """
        per_device_train_batch_size per_device_eval_batch_size generation_batch_size gradient_accumulation_steps
        num_generations num_generations_eval steps_per_generation num_iterations eval_accumulation_steps
        torch_empty_cache_steps dataloader_prefetch_factor ddp_bucket_cap_mb ref_model_sync_steps pad_to_multiple_of
        vllm_tensor_parallel_size max_tool_calling_iterations num_completions_to_print
        warm_start_steps warm_start_prompts epochs samples lora_alpha iterations batches episodes_per_batch
        prompts completion_tokens accumulation rounds lakes batch
        n_envs n_epochs n_critic_updates cg_max_steps line_search_max_iter sub_sampling_factor hidden_sizes""",
    "[1, 10000000]": """
        max_completion_length max_completion_tokens context_tokens vllm_max_model_length save_total_limit
        episodes q_learning_steps ddp_timeout n_steps batch_size""",
    "[1, 1000000]": "horizon_steps",
    "[1, 1024]": "lora_r",
    "[2, 1000000]": "judge_episodes",
    "[2, 64]": "size map_size",
    "[2, 100000]": "group processes",
    "[1, 65535]": "vllm_server_port vllm_group_port",
    "[0, 100000]": """
        random_maps test_maps test_questions dataloader_num_workers top_k warm_up retries
        endpoint_retries sure_samples history_best history_recent""",
    "[0, 10000]": "samples_per_state",
    "[0, 4294967295]": "seed seeds data_seed test_map_seed split_seed",  # numpy's seeds
    "[0, 1000000000]": "evaluate_steps warmup_steps eval_delay",
    "[-1, 1000000000]": "max_steps local_rank sde_sample_freq",
    "[-20, 20]": "log_std_init",
    "(0, 1000000000]": "logging_steps eval_steps save_steps",
    "(0, 1000000]": "PolicyGradientArguments.max_grad_norm",  # stable-baselines3 cuts to 0, where the others do not cut
    "(0, 10]": "learning_rate warm_start_learning_rate",
    "[0, 10]": "HindsightArguments.learning_rate",
    "(0, 1]": "warm_start_threshold top_p gamma adam_epsilon vllm_gpu_memory_utilization",
    "(0, 1)": "test_share",
    "[0, 8]": "options",
    "[1, 1000000000]": "timesteps max_episodes",
    "[0, 1]": """
        gae_lambda min_p balance_actions action_baseline wrong_states ref_model_mixup_alpha top_entropy_quantile""",
    "[0, 1)": "adam_beta1 adam_beta2 lora_dropout label_smoothing_factor",
    "(0, 1000]": """
        cg_damping
        target_kl clip_range sure_temperature
        temperature repetition_penalty delta epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos
        vespo_lambda_pos vespo_k_neg vespo_lambda_neg""",
    "[0, 1000]": """
        ent_coef vf_coef
        ProposerSettings.temperature beta epsilon weight_decay optimal_bonus action_entropy_coef form_coef thought_coef
        entropy_coef
        entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target noise router_aux_loss_coef
        neftune_noise_alpha""",
    "[0, 1000000]": """
        num_train_epochs max_grad_norm off_policy_mask_threshold vllm_importance_sampling_clip_max
        vllm_importance_sampling_clip_min vllm_importance_sampling_cap""",
    "(0, 86400]": "endpoint_timeout_seconds vllm_server_timeout",
    "[-1000, 1000]": "reward_weights",
    "[-1000000000, 1000000000]": "optimum_hint",
}
# Each of these may be large, and all of them together take days or tens of gigabytes
PRODUCTS = {
    ("batches", "episodes_per_batch", "horizon_steps"): (100_000_000, "rows"),
    ("batches", "q_learning_steps"): (10_000_000_000, "steps of learners"),
    ("random_maps", "map_size", "map_size"): (1_000_000, "cells"),
    ("iterations", "episodes"): (10_000_000, "episodes"),
    ("warm_up", "episodes"): (10_000_000, "episodes"),
    ("n_envs", "n_steps"): (10_000_000, "steps in memory"),
    ("episodes", "horizon_steps"): (1_000_000_000, "steps"),
    ("judge_episodes", "horizon_steps"): (1_000_000_000, "steps"),
}
HORIZON_STEPS = 100  # where none is given; most environments have this or twice as much


@dataclass(frozen=True)
class Range:
    """An interval of numbers; `Range.parse("(0, 1]")` holds what is above 0 and at most 1."""

    low: float
    high: float
    has_low: bool
    has_high: bool

    @classmethod
    def parse(cls, interval: str) -> "Range":
        low, high = interval[1:-1].split(", ")
        return cls(float(low), float(high), interval[0] == "[", interval[-1] == "]")

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self.has_low else value > self.low
        return above and (value <= self.high if self.has_high else value < self.high)

    def __str__(self) -> str:
        least = f"{'of at least' if self.has_low else 'above'} {self.low:.12g}"
        return f"{least}, {'at most' if self.has_high else 'below'} {self.high:.12g}"


RANGES = {name: Range.parse(interval) for interval, names in TABLE.items() for name in names.split()}

ANY_NUMBER = Range.parse("(-inf, inf)")


def numeric_kind(hint: object) -> type | None:
    """int or float where an option's type is one of the two, a list of it or a choice with it; else None."""
    has_members = get_origin(hint) in (list, Union, types.UnionType)
    kinds = {numeric_kind(member) for member in get_args(hint)} if has_members else {hint}
    return float if float in kinds else int if int in kinds else None


def ranges_of(group: type) -> dict[str, tuple[type, Range]]:
    """Numeric option -> int or float, and its range: any number for one that is not in the table, a new task's say."""
    hints, found = get_type_hints(group), {}
    for field in fields(group):
        kind = numeric_kind(hints[field.name]) if field.init else None
        if kind:
            own_name = f"{group.__name__}.{field.name}"
            found[field.name] = kind, RANGES.get(own_name) or RANGES.get(field.name, ANY_NUMBER)
    return found


def check_ranges(values: Mapping, groups: Iterable[type]) -> None:
    """`InputError` for the first numeric option whose value is out of its range; None and text such as auto pass.

    Args:
        values: of the options of all groups, by name, before the dataclasses are made.
    """
    for group in groups:
        for name, (kind, allowed) in ranges_of(group).items():
            value = values.get(name)
            for number in value if isinstance(value, list) else [value]:
                check_number(f"--{name}", number, kind, allowed)


def check_products(values: Mapping) -> None:
    """`InputError` for options of one script that are in their ranges and whose product exceeds that in `PRODUCTS`."""
    known = {name: value for name, value in values.items() if isinstance(value, int)}
    if "horizon_steps" in values:
        known.setdefault("horizon_steps", HORIZON_STEPS)
    for names, (most, unit) in PRODUCTS.items():
        if known.keys() >= set(names) and (product := math.prod(known[name] for name in names)) > most:
            named = " x ".join(f"--{name} {known[name]}" for name in names)
            raise InputError(f"{named}: {product:.3g} {unit}, expected at most {most:.3g}")


def check_mappings(values: Mapping) -> None:
    """The same for the numbers in options that hold several, as `--generation_kwargs` does."""
    for name, value in values.items():
        for key, number in value.items() if isinstance(value, dict) else ():
            check_number(f"--{name} {key}", number, float, RANGES.get(key, ANY_NUMBER))


def check_number(name: str, value: object, kind: type, allowed: Range) -> None:
    """`InputError` for a number, or a text that is one, out of its range."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return
        value = int(value) if math.isfinite(value) and value == int(value) else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    is_whole = kind is float or isinstance(value, int)
    is_finite = isinstance(value, int) or math.isfinite(value)  # an integer may be too long for a float
    if not (is_whole and is_finite and value in allowed):
        shown = f"{value:.12g}" if isinstance(value, float) or abs(value) < 1e300 else f"{str(value)[:12]}..."
        raise InputError(f"{name} {shown}: expected {'a number' if kind is float else 'an integer'} {allowed}")
