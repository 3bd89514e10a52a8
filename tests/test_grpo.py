import copy
import gc
from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tiny_policies import (
    ARCHITECTURE_NAMES,
    add_random_adapter,
    adapter_weights,
    fill_adapter,
    plain_scores,
    random_policy,
    token_ids,
    tokenizer_of,
)
from trl import GRPOConfig, GRPOTrainer

from llm_policy import grpo, packing
from llm_policy.errors import InputError
from llm_policy.frozen_lake import ACTIONS
from llm_policy.grpo import EpochRepeatSampler, MergedCopy, PolicyTrainer, action_token_ids, find_answer

GROUP = 4

# Prompts of three lengths, as a user's turn: the template adds its own tokens.
PROMPTS = ["SFFF FHFH", "You are at row 2, column 3. The ice is slippery. Letters: S start, F ice", "go"]
# Three groups of ragged completions; each but the last of a group ends (the end token is put there).
LENGTHS = [(3, 7, 1, 5), (9, 2, 4, 4), (6, 6, 3, 8)]
REWARDS = [(1.0, 0.2, 0.5, 0.0), (0.1, 0.9, 0.4, 0.3), (0.7, 0.0, 0.0, 1.0)]


@pytest.fixture(scope="module", autouse=True)
def _fast_garbage_collection():
    """Every trainer collects garbage, and looking through all that transformers imports takes 0.3 s each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def fixed_completions(architecture: str) -> list[list[list[int]]]:
    end = tokenizer_of(architecture).eos_token_id
    groups = [[token_ids(n, seed=10 * p + g) for g, n in enumerate(row)] for p, row in enumerate(LENGTHS)]
    return [[*(completion[:-1] + [end] for completion in group[:-1]), group[-1]] for group in groups]


def trainer_of(kind, architecture, folder, *, rewards=REWARDS, completions=None, trainer_options=None, **options):
    """A trainer whose completions and rewards are fixed. Plain gradient descent: the weights move by the gradient."""
    completions = completions or fixed_completions(architecture)
    reward_of = {tuple(c): r for cs, rs in zip(completions, rewards, strict=True) for c, r in zip(cs, rs, strict=True)}

    def table_reward(completion_ids, **_):
        return [reward_of[tuple(ids)] for ids in completion_ids]

    settings = {
        "per_device_train_batch_size": GROUP * len(PROMPTS),
        "num_generations": GROUP,
        "max_completion_length": 40,
        "max_steps": 1,
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "output_dir": str(folder),
    }
    split = options.pop("split_actions", False)
    trainer = kind(
        add_random_adapter(random_policy(architecture, split_actions=split)),
        [table_reward],
        GRPOConfig(**(settings | options)),
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": text}], "row": row} for row, text in enumerate(PROMPTS)]
        ),
        processing_class=tokenizer_of(architecture, split),
        **(trainer_options or {}),
    )
    row_of = {tuple(ids): row for row, ids in enumerate(prompts_of(trainer))}

    def generate(prompt_ids, images, multimodal_fields, num_generations, **_):
        return [completions[row_of[tuple(ids)]][i % num_generations] for i, ids in enumerate(prompt_ids)], None

    trainer._generate_single_turn = generate
    return trainer


def prompts_of(trainer) -> list[list[int]]:
    return trainer._tokenize_prompts([row["prompt"] for row in trainer.train_dataset])[0]


def trained(kind, architecture, folder, **options):
    """Adapter weights before and after training, and the log of the last step."""
    trainer = trainer_of(kind, architecture, folder, **options)
    before = adapter_weights(trainer.model)
    trainer.train()
    logged = next(row for row in reversed(trainer.state.log_history) if "reward" in row)
    return before, adapter_weights(trainer.model), logged


def assert_same_step(architecture, folder, **options):
    before, own, own_log = trained(PolicyTrainer, architecture, folder, **options)
    _, stock, stock_log = trained(GRPOTrainer, architecture, folder, **(options | {"trainer_options": None}))
    moved = max((stock[name] - before[name]).abs().max().item() for name in before)
    assert 1e-3 < moved < 10
    for name in before:
        torch.testing.assert_close(
            own[name], stock[name], rtol=1e-5, atol=1e-4 * moved, msg=lambda m, n=name: f"{n}: {m}"
        )
    return own_log, stock_log


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_one_step_moves_the_weights_as_trls_trainer_does(architecture, loss_type, tmp_path):
    own_log, stock_log = assert_same_step(architecture, tmp_path, loss_type=loss_type)
    for metric in ("loss", "grad_norm", "reward", "entropy", "clip_ratio/region_mean", "completions/mean_length"):
        assert own_log[metric] == pytest.approx(stock_log[metric], abs=1e-4), metric


UNANIMOUS = (0.5,) * GROUP
ONE_UNANIMOUS = [REWARDS[0], UNANIMOUS, REWARDS[2]]
ALL_UNANIMOUS = [UNANIMOUS] * 3
SLOWER = {"learning_rate": 0.1}  # for several steps: rounding errors grow with each

# Each with the second group unanimous: its completions skip the pass where nothing but their advantage counts.
OPTIONS = {
    "nothing else": {},
    "entropy bonus": {"entropy_coef": 0.1},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 9.0, "max_steps": 2} | SLOWER,
    # the second iteration compares with the log-probabilities before the first
    "two iterations": {"num_iterations": 2, "max_steps": 2} | SLOWER,
    "two iterations, dapo": {"num_iterations": 2, "max_steps": 2, "loss_type": "dapo"} | SLOWER,
    "two batches of two iterations": {"num_iterations": 2, "max_steps": 4, "num_train_epochs": 2} | SLOWER,
    # the reference is the adapter as it was, so KL has a gradient from the second step on
    "reference": {"beta": 1.0, "max_steps": 2} | SLOWER,
    "reference and two iterations": {"beta": 1.0, "num_iterations": 2, "max_steps": 2} | SLOWER,
    "three micro-batches": {"gradient_accumulation_steps": 3, "per_device_train_batch_size": GROUP},
    "three micro-batches, dapo": {
        "gradient_accumulation_steps": 3,
        "per_device_train_batch_size": GROUP,
        "loss_type": "dapo",
    },
    # micro-batches cut groups in two
    "half groups": {"gradient_accumulation_steps": 6, "per_device_train_batch_size": GROUP // 2},
    "micro-batches and iterations": {
        "gradient_accumulation_steps": 3,
        "per_device_train_batch_size": GROUP,
        "num_iterations": 2,
        "max_steps": 2,
    }
    | SLOWER,
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "high-entropy tokens only": {"top_entropy_quantile": 0.3},
    "entropy bonus on high-entropy tokens": {"top_entropy_quantile": 0.3, "entropy_coef": 0.1},
    # the last completion of each group does not end
    "cut completions masked": {"mask_truncated_completions": True},
    "cut completions masked, dapo": {"mask_truncated_completions": True, "entropy_coef": 0.1, "loss_type": "dapo"},
    "temperature": {"temperature": 0.7},
    "ratios of whole completions": {"importance_sampling_level": "sequence", "num_iterations": 2, "max_steps": 2},
    "clipped gradient": {"max_grad_norm": 0.1},
    "rewards not scaled": {"scale_rewards": "none"},
    "rewards scaled by batch": {"scale_rewards": "batch"},
    "adam": {"optim": "adamw_torch", "learning_rate": 0.01, "max_steps": 2},
    "other losses: bnpo": {"loss_type": "bnpo"},
    "other losses: dr_grpo": {"loss_type": "dr_grpo"},
    "other losses: cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "num_iterations": 2, "max_steps": 2} | SLOWER,
    "other losses: sapo": {"loss_type": "sapo", "num_iterations": 2, "max_steps": 2} | SLOWER,
    "other losses: vespo": {"loss_type": "vespo", "num_iterations": 2, "max_steps": 2} | SLOWER,
    "stock path": {"trainer_options": {"packed": False}},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_trls_options_keep_their_meaning(case, tmp_path):
    assert_same_step("llama", tmp_path, **({"loss_type": "grpo", "rewards": ONE_UNANIMOUS} | OPTIONS[case]))


def test_several_at_once_with_a_sliding_window(tmp_path):
    """Not the entropy bonus: it is a mean over a micro-batch, and TRL shuffles completions into other micro-batches."""
    options = {"beta": 0.5, "num_iterations": 2, "max_steps": 2, "gradient_checkpointing": True}
    accumulation = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": GROUP}
    assert_same_step("gemma3", tmp_path, loss_type="grpo", **(options | accumulation | SLOWER))


def scored_completions(monkeypatch) -> list[int]:
    """The number of completions in each packed pass from now on."""
    counts = []

    def counting(prompts, completions, *arguments):
        counts.append(len(completions))
        return packing.pack_groups(prompts, completions, *arguments)

    monkeypatch.setattr(grpo, "pack_groups", counting)
    return counts


# (options, completions scored in the training pass when the second of three groups is unanimous)
SKIPS = {
    "advantages alone": ({}, [8]),
    # one completion of each group is masked, too: its advantage would count, its tokens do not
    "cut completions masked": ({"mask_truncated_completions": True}, [6]),
    "KL needs all": ({"beta": 0.1}, [12, 12]),  # first the reference
    "so does the entropy bonus": ({"entropy_coef": 0.1}, [12]),
    "so does the quantile of the entropies": ({"top_entropy_quantile": 0.5}, [12]),
}


@pytest.mark.parametrize("case", SKIPS)
def test_completions_without_advantage_skip_the_pass(case, tmp_path, monkeypatch):
    options, expected = SKIPS[case]
    counts = scored_completions(monkeypatch)
    trained(PolicyTrainer, "llama", tmp_path, rewards=ONE_UNANIMOUS, **options)
    assert counts == expected


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_a_step_without_any_variance_runs_and_changes_nothing(loss_type, tmp_path, monkeypatch):
    counts = scored_completions(monkeypatch)
    before, after, log = trained(PolicyTrainer, "llama", tmp_path, rewards=ALL_UNANIMOUS, loss_type=loss_type)
    assert counts == []
    assert log["frac_reward_zero_std"] == 1.0
    assert log["loss"] == 0.0
    for name in before:
        assert torch.equal(before[name], after[name])


# Nothing is scored although entropies count: no completion ends, so all are masked.
@pytest.mark.parametrize("options", [{}, {"entropy_coef": 0.1}, {"top_entropy_quantile": 0.5}, {"beta": 0.1}])
def test_a_step_with_all_completions_masked_leaves_the_weights_finite(options, tmp_path):
    unfinished = [[token_ids(n, seed=n) for n in row] for row in LENGTHS]
    options = options | {"completions": unfinished, "mask_truncated_completions": True}
    before, after, log = trained(PolicyTrainer, "llama", tmp_path, **options)
    assert log["loss"] == 0.0
    for name in before:
        assert torch.equal(before[name], after[name])


# The check before training ---------------------------------------------------------------------------------------

EXAMPLES = [token_ids(length, seed=length) for length in (12, 5, 9)]
right_mask = packing.attention_mask


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
def test_the_check_passes_where_packing_is_right(architecture, tmp_path):
    trainer = trainer_of(PolicyTrainer, architecture, tmp_path)
    assert 0 < trainer.check_against_stock(token_ids(30), EXAMPLES) < 1e-5


def _sees_other_completions(model, packed):
    packed.visible_PLL = torch.ones_like(packed.visible_PLL).tril()
    return right_mask(model, packed)


def _sees_nothing_before_the_completion(model, packed):
    packed.visible_PLL &= packed.visible_PLL.int().cumsum(2) > 28
    return right_mask(model, packed)


def _is_ignored(model, packed):
    return None


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
@pytest.mark.parametrize("damage", [_sees_other_completions, _sees_nothing_before_the_completion, _is_ignored])
def test_the_check_refuses_a_wrong_mask(architecture, damage, tmp_path, monkeypatch):
    trainer = trainer_of(PolicyTrainer, architecture, tmp_path)
    monkeypatch.setattr(packing, "attention_mask", damage)
    with pytest.raises(InputError) as error:
        trainer.check_against_stock(token_ids(30), EXAMPLES)
    assert trainer.model.config.model_type in str(error.value)
    assert "--packed false" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_check_refuses_numbers_that_are_none(tmp_path, monkeypatch):
    trainer = trainer_of(PolicyTrainer, "llama", tmp_path)
    scores = packing.packed_log_probabilities
    monkeypatch.setattr(grpo, "packed_log_probabilities", lambda *a: [v * torch.nan for v in scores(*a)])
    with pytest.raises(InputError, match="llama.*--packed false"):
        trainer.check_against_stock(token_ids(30), EXAMPLES)


# Sampling --------------------------------------------------------------------------------------------------------


def sampling_trainer(kind, architecture, folder, **options):
    trainer = trainer_of(kind, architecture, folder, **({"top_k": 1, "max_completion_length": 8} | options))
    del trainer._generate_single_turn  # sample
    return trainer


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
def test_sampling_equals_trls_where_one_token_is_left(architecture, merged, tmp_path):
    own = sampling_trainer(PolicyTrainer, architecture, tmp_path, trainer_options={"merged_sampling": merged})
    stock = sampling_trainer(GRPOTrainer, architecture, tmp_path)
    # (prompt of each completion, completions per prompt)
    batches = {"in runs": ([0, 0, 0, 1, 1, 1, 2, 2, 2], 3), "groups cut by processes": ([0, 1, 1, 2], 2)}
    for rows, group in batches.values():
        prompts = [prompts_of(own)[row] for row in rows]
        found, _ = own._generate_single_turn(prompts, None, {}, group)
        expected, _ = stock._generate_single_turn(prompts, None, {}, group)
        assert found == expected
    assert own.model.training == stock.model.training


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
def test_the_merged_copy_is_the_model_and_follows_its_adapter(architecture):
    model = add_random_adapter(random_policy(architecture)).eval()
    base = {name: p.detach().clone() for name, p in model.named_parameters() if "lora" not in name}
    merged = MergedCopy(model)
    ids = torch.tensor([token_ids(25)])
    with torch.no_grad(), model.disable_adapter():
        bare = model(ids).logits
    previous = bare
    for scale in (0.05, 0.2):
        fill_adapter(model, scale)
        with torch.no_grad():
            logits = model(ids).logits
            torch.testing.assert_close(merged.refreshed()(ids).logits, logits, rtol=1e-4, atol=1e-4)
        assert (logits - previous).abs().max() > 0.1
        previous = logits
    for name, p in model.named_parameters():
        assert name not in base or torch.equal(p, base[name]), name


def test_sampling_leaves_every_weight_as_it_is(tmp_path):
    trainer = sampling_trainer(PolicyTrainer, "llama", tmp_path, beta=0.1)  # with the adapter "ref" beside the trained
    before = copy.deepcopy(trainer.model.state_dict())
    trainer._generate_single_turn(prompts_of(trainer), None, {}, 1)
    after = trainer.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    trainable = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert trainable
    assert all("lora" in name and ".default." in name for name in trainable)


# (LoRA settings, whether base + adapter is one matrix a layer and nothing else is trained)
MERGEABLE = {
    "plain": ({}, True),
    "rank-stabilised": ({"use_rslora": True}, True),
    "some layers": ({"target_modules": ["q_proj", "v_proj"]}, True),
    "dora": ({"use_dora": True}, False),
    "embeddings": ({"target_modules": ["embed_tokens", "q_proj"]}, False),
    "whole modules beside it": ({"modules_to_save": ["norm"]}, False),
    "its own bias": ({"lora_bias": True, "target_modules": ["q_proj"]}, False),
    "the base's biases": ({"bias": "lora_only", "target_modules": ["q_proj"]}, False),
}


@pytest.mark.parametrize("case", MERGEABLE)
def test_what_cannot_be_merged_is_decoded_through_its_adapter(case):
    options, expected = MERGEABLE[case]
    model = add_random_adapter(random_policy("qwen2"), **options)  # its q, k, v layers have biases
    assert MergedCopy.is_possible(model) is expected


def test_a_model_without_adapter_needs_no_copy():
    assert not MergedCopy.is_possible(random_policy("llama"))
