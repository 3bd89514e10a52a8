"""Rules for a run's options: TRL's lists of choices, adapters that can be joined, batches that come out even."""

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from peft import LoraConfig
from trl import GRPOConfig, ModelConfig, get_peft_config

from llm_policy import adapters
from llm_policy.adapters import UNJOINABLE, check_joinable, check_model_options
from llm_policy.errors import InputError
from llm_policy.grpo import arguments as rules
from llm_policy.grpo.arguments import TRL_CHOICES, ScriptArguments, check_arguments, check_task
from llm_policy.grpo.diagnostics import BATCH_CONDITIONS

LORA = {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"]}


def training(**options) -> GRPOConfig:
    given = {"output_dir": "out", "use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 2}
    return GRPOConfig(**(given | options))


# TRL's choices -----------------------------------------------------------------------------------------------------


def quoted(help_text: str) -> set[str]:
    """Values in a help text of TRL: 'grpo', `'token'` and, as it happens, `group'`."""
    return set(re.findall(r"(\w+)'(?!\w)", help_text)) | set(re.findall(r"'(\w+)'", help_text))


@pytest.mark.parametrize("name", TRL_CHOICES)
def test_trl_names_the_choices_that_stand_here(name):
    """TRL has no list to import. A release that adds, renames or drops one is seen here."""
    options = {field.name: field for field in fields(GRPOConfig)}
    named = quoted(options[name].metadata["help"])
    missing = set(TRL_CHOICES[name]) - named
    assert not missing, f"TRL no longer names them: {missing}"
    known = {value for values in TRL_CHOICES.values() for value in values}  # a help text may name another option's
    assert named <= known, f"new in TRL: {named - known}"
    assert options[name].default in TRL_CHOICES[name]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in TRL_CHOICES for value in TRL_CHOICES[name]])
def test_every_choice_is_accepted(name, value):
    check_arguments(ScriptArguments(objective="grpo"), training(**{name: value}), ModelConfig(**LORA))


@pytest.mark.parametrize("name", TRL_CHOICES)
def test_every_other_choice_is_refused(name):
    config = training()
    setattr(config, name, "nonsense")
    with pytest.raises(InputError, match=f"^--{name} 'nonsense': expected one of {', '.join(TRL_CHOICES[name])}$"):
        check_arguments(ScriptArguments(), config, ModelConfig(**LORA))


@pytest.mark.parametrize("name", [*rules.REFUSED, *rules.SHOWN_OTHERWISE, *rules.LENGTH])
def test_every_option_that_has_a_rule_is_there(name):
    known = {field.name for group in (GRPOConfig, ScriptArguments) for field in fields(group)}
    assert name in known | {"episodes"}  # of the tasks


# Adapters ----------------------------------------------------------------------------------------------------------

PLAIN = {"lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "use_rslora": True, "lora_task_type": "SEQ_CLS"}
ODD = {"use_dora": True, "lora_modules_to_save": ["lm_head"], "lora_target_parameters": ["experts.gate_up_proj"]}


def refuses(check, *arguments) -> bool:
    try:
        check(*arguments)
    except InputError:
        return True
    return False


@pytest.mark.parametrize("option", [None, *PLAIN, *ODD])
def test_an_option_is_refused_where_its_adapter_could_not_be_joined(option):
    """Otherwise a run would end with an adapter that the next one cannot be trained on, or not end at all."""
    model = ModelConfig(**LORA, **{name: value for name, value in (PLAIN | ODD).items() if name == option})
    is_refused = refuses(check_model_options, model)
    assert is_refused == (option in ODD)
    assert is_refused == refuses(check_joinable, Path("adapter"), get_peft_config(model))


def test_the_cases_above_are_all_that_trl_and_peft_have():
    known = {field.name for field in fields(ModelConfig) if "lora" in field.name or "dora" in field.name}
    assert known == {*PLAIN, *ODD, "lora_target_modules"}
    assert {option for option in UNJOINABLE.values() if option} == set(ODD)
    assert set(UNJOINABLE) <= {field.name for field in fields(LoraConfig)}
    for name, option in UNJOINABLE.items():
        if option is None:
            assert not {name, f"lora_{name}"} & {field.name for field in fields(ModelConfig)}, f"now in TRL: {name}"


# What libraries refuse late ----------------------------------------------------------------------------------------

LATE = [
    # TRL's options, the model's, what the line says (None: accepted)
    ({"optim_args": "xx"}, {}, "--optim adamw_torch_fused, --optim_args xx: ValueError: "),
    ({"optim_args": "xx=1"}, {}, None),  # the handlers of Transformers read what they know
    ({"optim": "adafactor", "optim_args": None}, {}, None),
    ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"a": 1}}, {}, "--lr_scheduler_type cosine, "),
    ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1}}, {}, None),
    ({"lr_scheduler_type": "cosine_with_min_lr"}, {}, "--lr_scheduler_type cosine_with_min_lr, "),
    ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 5}}, {}, "--lr_scheduler_type polynomial, "),
    ({"lr_scheduler_type": "polynomial"}, {}, None),
    ({"report_to": "wandb"}, {}, "--report_to wandb: expected one of none, "),
    ({"report_to": "all"}, {}, None),
    ({"chat_template_kwargs": {"messages": []}}, {}, "--chat_template_kwargs: would reach the trainer's prompts alone"),
    ({"torch_compile": True}, {}, "--torch_compile: would compile passes"),
    ({"sync_ref_model": True, "beta": 0.1}, {}, "--sync_ref_model: needs a model of its own"),
    ({"use_liger_kernel": True}, {}, "--use_liger_kernel: is deprecated by TRL"),
    ({"eval_on_start": True}, {}, "--eval_on_start: evaluation is this script's"),
    ({"restore_callback_states_from_checkpoint": True}, {}, "--restore_callback_states_from_checkpoint: would make"),
    ({"generation_kwargs": {"num_beams": 2}}, {}, "--generation_kwargs num_beams 2: sampling behind a shared prompt"),
    ({"generation_kwargs": {"num_beams": 1}}, {}, None),
    ({"generation_kwargs": "top_k=5"}, {}, "--generation_kwargs top_k=5: expected an object in braces"),
    ({"generation_kwargs": {"top_q": 5}}, {}, "--generation_kwargs top_q: is no option of generate"),
    ({"max_completion_length": None}, {}, "--max_completion_length null: expected a whole number"),
    ({"torch_compile_mode": "xx"}, {}, "--torch_compile: would compile passes"),
    ({"dataloader_multiprocessing_context": "spawn"}, {}, "--dataloader_multiprocessing_context: is for workers"),
    ({}, {"lora_target_modules": ["[abc"]}, r"--lora_target_modules '\[abc': error: unterminated character set"),
    ({}, {"lora_target_modules": ["all-linear"]}, None),
    ({}, {"lora_task_type": "xx"}, "--lora_task_type 'xx': expected one of SEQ_CLS, "),
]  # fmt: skip


@pytest.mark.parametrize(("options", "lora", "message"), LATE)
def test_what_libraries_refuse_late_is_refused_before_the_work(options, lora, message):
    arguments = ScriptArguments(objective="grpo"), training(**options), ModelConfig(**(LORA | lora))
    if message is None:
        check_arguments(*arguments)
    else:
        with pytest.raises(InputError, match=f"^{message}") as caught:
            check_arguments(*arguments)
        assert "\n" not in str(caught.value)


# Objectives --------------------------------------------------------------------------------------------------------

ONE_STATE = {"per_device_train_batch_size": 2, "num_generations": 2}
OBJECTIVES = [
    # script's options, TRL's, what the line says (None: accepted)
    ({"packed": False}, {}, "--objective natural: needs --packed true"),
    ({"packed": False, "objective": "grpo"}, {}, None),
    ({}, {"importance_sampling_level": "sequence"}, "--importance_sampling_level sequence: one ratio"),
    ({"objective": "grpo"}, {"importance_sampling_level": "sequence"}, None),
    ({"action_baseline": 0.5}, ONE_STATE, r"--action_baseline 0\.5: .* a batch has one state"),
    ({"action_baseline": 0.5, "objective": "cloning"}, ONE_STATE, None),
    ({}, ONE_STATE, None),
]


@pytest.mark.parametrize(("script", "options", "message"), OBJECTIVES)
def test_what_an_objective_cannot_be_had_with(script, options, message):
    arguments = ScriptArguments(**({"objective": "natural"} | script)), training(**options), ModelConfig(**LORA)
    if message is None:
        check_arguments(*arguments)
    else:
        with pytest.raises(InputError, match=f"^{message}"):
            check_arguments(*arguments)


def test_an_unknown_objective():
    with pytest.raises(InputError, match=r"^--objective 'reinforce': expected one of natural, expected, "):
        ScriptArguments(objective="reinforce")


# Batches -----------------------------------------------------------------------------------------------------------

BATCHES = [
    # options, what the line says (None: accepted)
    ({"num_iterations": 2, "save_steps": 4}, None),
    ({"num_iterations": 2, "save_steps": 4, "max_steps": 3}, "--max_steps 3: expected a multiple of 2, optimiser "),
    ({"num_iterations": 2, "save_steps": 5}, "--save_steps 5: expected a multiple of 2, optimiser steps on one batch"),
    ({"num_iterations": 2, "save_steps": 5, "save_strategy": "no"}, None),
    ({"gradient_accumulation_steps": 2, "save_steps": 1}, None),
    ({"gradient_accumulation_steps": 2, "steps_per_generation": 4, "save_steps": 2}, None),
    (
        {"gradient_accumulation_steps": 2, "steps_per_generation": 3},
        "--steps_per_generation 3: 1.5 optimiser steps on one batch of completions; expected a whole number",
    ),
    ({"gradient_accumulation_steps": 4, "steps_per_generation": 2, "save_steps": 1}, None),
    (
        {"gradient_accumulation_steps": 3, "steps_per_generation": 2},
        "--steps_per_generation 2: 0.666667 optimiser steps on one batch of completions; expected a whole",
    ),
]


@pytest.mark.parametrize(("options", "message"), BATCHES)
def test_steps_and_checkpoints_come_out_even_with_their_batches(options, message):
    arguments = ScriptArguments(), training(**options), ModelConfig(**LORA)
    if message is None:
        check_arguments(*arguments)
    else:
        with pytest.raises(InputError, match=f"^{message}"):
            check_arguments(*arguments)


# What a task lacks -------------------------------------------------------------------------------------------------


def sum_reward(completions, **_): ...


def length_reward(completions, **_): ...


def task(**parts) -> SimpleNamespace:
    without = {
        "actions": (),
        "action_rewards": None,
        "guess": None,
        "lessons": (),
        "reward_functions": [sum_reward, length_reward],
    }
    return SimpleNamespace(**(without | parts))


LACKING = [
    # script's options, TRL's, parts of the task, what the line says (None: accepted)
    ({}, {}, {}, None),
    ({"objective": "expected"}, {}, {"actions": ["A"], "action_rewards": list}, None),
    ({"objective": "expected"}, {}, {}, "--objective expected: --task frozen_lake knows no reward for every legal"),
    ({"objective": "expected"}, {}, {"actions": ["A"]}, "--objective expected: --task frozen_lake knows no reward"),
    ({"objective": "expected"}, {}, {"action_rewards": list}, "--objective expected: --task frozen_lake knows no"),
    (
        {"objective": "cloning"},
        {},
        {"actions": ["A"], "action_rewards": list},
        "--objective cloning: --task frozen_lake has no replies to teach",
    ),
    ({"objective": "cloning"}, {}, {"actions": ["A"], "action_rewards": list, "guess": str}, None),
    ({"thought_coef": 0.1}, {}, {}, "--thought_coef 0.1: --task frozen_lake has no thoughts to teach"),
    ({"thought_coef": 0.1}, {}, {"guess": str}, None),
    ({"warm_start": "always"}, {}, {"lessons": [([], ["reply"])]}, None),
    ({"warm_start": "always"}, {}, {}, "--warm_start always: --task frozen_lake has no replies to teach"),
    ({"warm_start": "auto"}, {}, {}, None),
    ({}, {"reward_weights": [1.0, 0.0]}, {}, None),
    (
        {},
        {"reward_weights": [1.0]},
        {},
        r"--reward_weights \[1.0\]: expected one for each of sum_reward, length_reward$",
    ),
]


@pytest.mark.parametrize(("script", "options", "parts", "message"), LACKING)
def test_what_a_task_lacks(script, options, parts, message):
    arguments = ScriptArguments(**script), training(**options), task(**parts)
    if message is None:
        check_task(*arguments)
    else:
        with pytest.raises(InputError, match=f"^{message}"):
            check_task(*arguments)


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_quantised_weights_need_their_package(bits, monkeypatch):
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=rf"^--load_in_{bits} true: the package bitsandbytes is missing; pip install -r"
    ):
        check_arguments(ScriptArguments(), training(), ModelConfig(**LORA, **{f"load_in_{bits}": True}))


@pytest.mark.parametrize("stop_when", BATCH_CONDITIONS)
def test_no_run_waits_for_a_largest_reward_that_its_task_does_not_have(stop_when):
    asked = ScriptArguments(stop_when=stop_when), training()
    check_task(*asked, task(full_reward=1.0))
    with pytest.raises(InputError, match=f"^--stop_when {stop_when}: --task frozen_lake has no largest reward; name"):
        check_task(*asked, task(full_reward=None))
