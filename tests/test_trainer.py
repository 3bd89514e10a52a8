import copy
import gc
import inspect
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tiny_models import ARCHITECTURES
from tiny_policies import (
    ARCHITECTURE_NAMES,
    adapter_weights,
    add_random_adapter,
    fill_adapter,
    plain_scores,
    random_policy,
    token_ids,
    tokenizer_of,
)
from trl import GRPOConfig, GRPOTrainer

from llm_policy import sampling
from llm_policy.environments.frozen_lake import ACTIONS
from llm_policy.errors import InputError
from llm_policy.grpo import packing
from llm_policy.grpo import trainer as trainer_module
from llm_policy.grpo.expected import action_token_ids
from llm_policy.grpo.trainer import EpochRepeatSampler, MergedCopy, PolicyTrainer
from llm_policy.grpo.tree_attention import Sight

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
    return [[*([*completion[:-1], end] for completion in group[:-1]), group[-1]] for group in groups]


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
        "logging_nan_inf_filter": False,  # else the log shows 0 for a loss that is no number
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
    assert own_log["loss"] == pytest.approx(stock_log["loss"], rel=1e-4, abs=1e-5)
    return own_log, stock_log


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_one_step_moves_the_weights_as_trls_trainer_does(architecture, loss_type, tmp_path):
    own_log, stock_log = assert_same_step(architecture, tmp_path, loss_type=loss_type)
    for metric in ("grad_norm", "reward", "entropy", "clip_ratio/region_mean", "completions/mean_length"):
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
    # log-probabilities of some -300: their exponential, the ratio to a skipped completion's 0, would overflow
    "peaked policy": {"temperature": 0.02, "num_iterations": 2, "learning_rate": 1e-3},
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

    def counting(prompts, completions, *arguments, **options):
        counts.append(len(completions))
        return packing.pack_groups(prompts, completions, *arguments, **options)

    monkeypatch.setattr(trainer_module, "pack_groups", counting)
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


def test_completions_that_skip_the_pass_leave_the_logged_entropy_as_it_is(tmp_path):
    kinds = (PolicyTrainer, GRPOTrainer)
    own, stock = (trained(kind, "llama", tmp_path, rewards=ONE_UNANIMOUS)[2]["entropy"] for kind in kinds)
    assert own == pytest.approx(stock, rel=0.1)


@pytest.mark.parametrize("case", SKIPS)
def test_completions_without_advantage_skip_the_pass(case, tmp_path, monkeypatch):
    options, expected = SKIPS[case]
    counts = scored_completions(monkeypatch)
    trained(PolicyTrainer, "llama", tmp_path, rewards=ONE_UNANIMOUS, **options)
    assert counts == expected


@pytest.mark.parametrize("kind", [PolicyTrainer, GRPOTrainer])
def test_a_unanimous_group_has_no_variance_however_its_reward_rounds(kind, tmp_path):
    """TRL's trainer shows why: it finds some where there is none."""
    groups, size = 3, 6
    completions = [[token_ids(3, seed=size * p + g) for g in range(size)] for p in range(groups)]
    shares = []
    for reward in (0.7670000195503235, 1.0345, 0.8921):
        rewards = [(reward,) * size] * groups
        options = {"num_generations": size, "per_device_train_batch_size": groups * size}
        *_, log = trained(kind, "llama", tmp_path, rewards=rewards, completions=completions, **options)
        shares.append(log["frac_reward_zero_std"])
    assert (min(shares) == 1.0) == (kind is PolicyTrainer)


SCALINGS = [{"scale_rewards": name} for name in ("group", "batch", "none")]


@pytest.mark.parametrize("options", [*SCALINGS, {"multi_objective_aggregation": "normalize_then_sum"}])
def test_unanimous_groups_are_counted_whatever_the_scaling(options, tmp_path):
    """TRL's trainer looks at the whole batch where it scales by it."""
    rewards = [(0.0,) * GROUP, (*[1.0] * (GROUP - 1), 0.0), (1.0,) * GROUP]
    *_, log = trained(PolicyTrainer, "llama", tmp_path, rewards=rewards, **options)
    assert log["frac_reward_zero_std"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_a_step_without_any_variance_runs_and_changes_nothing(loss_type, tmp_path, monkeypatch):
    counts = scored_completions(monkeypatch)
    before, after, log = trained(PolicyTrainer, "llama", tmp_path, rewards=ALL_UNANIMOUS, loss_type=loss_type)
    assert counts == []
    assert "entropy" not in log
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
CHECKED_PROMPTS = [token_ids(30), [*token_ids(20), *token_ids(6, seed=9)]]  # 20 tokens stand before both
right_sight = Sight.visible


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_the_check_passes_where_packing_is_right(architecture, dtype, most, tmp_path):
    trainer = trainer_of(PolicyTrainer, architecture, tmp_path)
    trainer.model.to(dtype)
    assert 0 < trainer.check_against_stock(CHECKED_PROMPTS, EXAMPLES) < most


def _sees_other_completions(sight):
    """All that stands before a token in its row."""
    sight.ends_PM[:] = sight.numbers_PL.size(1)
    return right_sight(sight)


def _sees_nothing_before_the_completion(sight):
    sight.ends_PM[sight.key_positions_PM < 28] = 0
    sight.ends_PM[:, -sight.numbers_PL.size(1) :].clamp_(min=sight.numbers_PL + 1)  # itself it sees
    return right_sight(sight)


def _is_ignored(sight):
    """A row as any other."""
    visible_PLM = torch.ones_like(right_sight(sight))
    return visible_PLM.tril(visible_PLM.size(2) - visible_PLM.size(1))


# The tolerance of bfloat16 is made for trained weights: random ones of some architectures differ by less.
@pytest.mark.parametrize(
    ("architecture", "dtype"), [*((name, torch.float32) for name in ARCHITECTURE_NAMES), ("llama", torch.bfloat16)]
)
@pytest.mark.parametrize("damage", [_sees_other_completions, _sees_nothing_before_the_completion, _is_ignored])
@pytest.mark.parametrize("by_piece", [True, False])
def test_the_check_refuses_a_wrong_mask(by_piece, architecture, damage, dtype, tmp_path, monkeypatch):
    trainer = trainer_of(PolicyTrainer, architecture, tmp_path)
    trainer.model.to(dtype)
    monkeypatch.setattr(trainer_module, "goes_by_piece", lambda _: by_piece)
    monkeypatch.setattr(Sight, "visible", lambda sight, _=None, tokens=slice(None): damage(sight)[:, tokens])
    with pytest.raises(InputError) as error:
        trainer.check_against_stock(CHECKED_PROMPTS, EXAMPLES)
    assert trainer.model.config.model_type in str(error.value)
    assert "--packed false" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_check_refuses_numbers_that_are_none(tmp_path, monkeypatch):
    trainer = trainer_of(PolicyTrainer, "llama", tmp_path)
    scores = packing.packed_log_probabilities
    monkeypatch.setattr(trainer_module, "packed_log_probabilities", lambda *a: [v * torch.nan for v in scores(*a)])
    with pytest.raises(InputError, match=r"llama.*--packed false"):
        trainer.check_against_stock(CHECKED_PROMPTS, EXAMPLES)


def test_a_packed_pass_that_fails_is_refused_with_its_reason(tmp_path, monkeypatch):
    trainer = trainer_of(PolicyTrainer, "llama", tmp_path)
    monkeypatch.setattr(trainer_module, "packed_log_probabilities", lambda *_: torch.ones(2) + torch.ones(3))
    with pytest.raises(InputError, match=r"^llama: the packed pass failed \(The size of tensor .*--packed false$"):
        trainer.check_against_stock(CHECKED_PROMPTS, EXAMPLES)


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


def test_each_prompt_is_sampled_along_the_guess_of_its_row(tmp_path, monkeypatch):
    """Guesses that are right; then the same samples come of them as of none."""
    guess_of_row = {}
    options = {"top_k": 0, "trainer_options": {"guesses": lambda rows: [guess_of_row[row["row"]] for row in rows]}}
    trainer = sampling_trainer(PolicyTrainer, "llama", tmp_path, **options)
    prompts = prompts_of(trainer)
    seen = []

    def spying(model, prompts, *arguments, guesses, **options):
        seen.extend(zip(prompts, guesses, strict=True))
        return sampling.sample_completions(model, prompts, *arguments, guesses=guesses, **options)

    monkeypatch.setattr(trainer_module, "sample_completions", spying)
    order = [2, 0, 1]
    batch = [trainer.train_dataset[row] for row in order for _ in range(GROUP)]

    def sampled():
        torch.manual_seed(0)
        ids = trainer._generate_and_score_completions(batch)["completion_ids"]
        return ids[::GROUP].tolist()

    monkeypatch.setattr(trainer, "reward_funcs", [lambda prompts, **_: [float(i) for i in range(len(prompts))]])
    guess_of_row.update({row: [] for row in order})
    expected = sampled()
    guess_of_row.update(zip(order, expected, strict=True))
    assert sampled() == expected
    assert seen == [(prompts[row], []) for row in order] + [(prompts[row], guess_of_row[row]) for row in order]


def test_without_room_for_the_copy_the_adapter_decodes(tmp_path, monkeypatch, capsys):
    own, crowded = (sampling_trainer(PolicyTrainer, "llama", tmp_path) for _ in range(2))
    expected, _ = own._generate_single_turn(prompts_of(own), None, {}, 1)
    assert own._merged_copy is not None
    monkeypatch.setattr(MergedCopy, "has_room", lambda model: False)
    for _ in range(2):
        found, _ = crowded._generate_single_turn(prompts_of(crowded), None, {}, 1)
        assert found == expected
    assert crowded._merged_copy is None
    assert capsys.readouterr().out.count("no GPU memory for merged weights") == 1


@pytest.mark.parametrize(("free", "has_room"), [(481, True), (479, False)])
def test_the_copy_needs_its_size_and_a_fifth_more(free, has_room, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000))
    gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"), parameters=lambda: [torch.zeros(60), torch.zeros(40)])
    assert MergedCopy.has_room(gpu) is has_room


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


# The expected objective ------------------------------------------------------------------------------------------

THOUGHT = "<think>I am at row 0, column 1.</think>"
# (prompt, completion, whether its answer stands in the action's usual tokens, group advantage)
REPLIES = [
    # no answer at all
    (2, "no idea", False, -0.9),
    (0, f"{THOUGHT}<answer>LEFT</answer>", True, 0.7),
    (0, f"{THOUGHT}<answer>UP</answer>", True, -0.4),
    # an action in the thought; another prompt, so other rewards
    (1, "<think>UP or DOWN</think><answer>DOWN</answer>", True, 1.1),
    # read by the reward, but in other tokens: an ordinary completion
    (1, f"{THOUGHT}<answer>right</answer>", False, 0.3),
]
ACTION_REWARDS = torch.tensor([[0.9, 0.1, 0.3, 0.2], [0.0, 1.0, 0.4, 0.8], [0.5, 0.6, 0.7, 0.0]])


def expected_trainer(architecture, folder, action_entropy_coef=0.0, **options):
    """A trainer of the expected objective (or of `options["objective"]`), in training mode."""
    objective = options.pop("objective", "expected")
    names_and_rewards = {
        "actions": ACTIONS,
        "action_rewards": lambda rows: ACTION_REWARDS[[row["row"] for row in rows]],
        "action_entropy_coef": action_entropy_coef,
    }
    own = {name: options.pop(name) for name in ("guesses", "action_baseline") if name in options}
    options["trainer_options"] = {"objective": objective} | own | names_and_rewards
    trainer = trainer_of(PolicyTrainer, architecture, folder, **options)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # train() sets it; most tests ask for one loss alone
    return trainer


def names_of(trainer) -> list[tuple[int, ...]]:
    """The actions' token ids."""
    return action_token_ids(trainer._tokenizer, ACTIONS)


def encoded(trainer, text: str) -> list[int]:
    return in_tokens(trainer._tokenizer, text)


def in_tokens(tokenizer, text: str) -> list[int]:
    """With the end token."""
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def batch_of(trainer, rows, completions, advantages) -> dict[str, torch.Tensor]:
    """What TRL hands to the loss: prompts padded on the left, completions on the right."""
    prompts = [prompts_of(trainer)[row] for row in rows]

    def padded(lists, left):
        length = max(map(len, lists))
        pads = [[0] * (length - len(ids)) for ids in lists]
        ids = [p + list(i) if left else list(i) + p for p, i in zip(pads, lists, strict=True)]
        masks = [p + [1] * len(i) if left else [1] * len(i) + p for p, i in zip(pads, lists, strict=True)]
        return torch.tensor(ids), torch.tensor(masks)

    prompt_ids, prompt_mask = padded(prompts, left=True)
    completion_ids, completion_mask = padded(completions, left=False)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.as_tensor(advantages, dtype=torch.float32),
        "num_items_in_batch": completion_mask.sum(),
        "action_rewards": ACTION_REWARDS[rows],
        "action_baseline": torch.zeros(len(rows), len(ACTIONS)),
    }


def gradient(trainer, loss) -> torch.Tensor:
    """Of `loss` with respect to the adapter, flat."""
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


def log_probabilities(trainer, prompt, prefix, temperature=1.0) -> torch.Tensor:
    """Of the four names after `prefix`, by four plain rows; not normalised."""
    scores = [plain_scores(trainer.model, prompt, [*prefix, *name], temperature)[0] for name in names_of(trainer)]
    return torch.stack([score[len(prefix) :].sum() for score in scores])


def teach_names(trainer) -> None:
    """Make the adapter spell the names: untaught, one of two tokens is a million times likelier than one of five."""
    prompt, prefix = prompts_of(trainer)[0], encoded(trainer, f"{THOUGHT}<answer>")[:-1]
    start, length = len(prompt) + len(prefix), max(map(len, names_of(trainer)))
    ids = torch.tensor([[*prompt, *prefix, *name, *[0] * (length - len(name))] for name in names_of(trainer)])
    labels = ids.masked_fill(ids == 0, -100)
    labels[:, :start] = -100
    optimizer = torch.optim.Adam([p for p in trainer.model.parameters() if p.requires_grad], lr=0.02)
    for _ in range(15):
        optimizer.zero_grad()
        trainer.model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()


def assert_same_gradient(found, expected):
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("split_actions", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
@pytest.mark.parametrize(
    ("entropy_coef", "unanimous"),
    # replies without advantage are computed as far as their answer, one without an answer not at all
    [(0.0, ()), (0.3, ()), (0.3, (1, 3, 4)), (0.0, range(5))],
)
def test_expected_gradient_equals_the_enumerated_one(architecture, split_actions, entropy_coef, unanimous, tmp_path):
    """Every term of the docstring by plain forward passes: each name's string, each other token's log-probability."""
    trainer = expected_trainer(
        architecture, tmp_path, entropy_coef, split_actions=split_actions, loss_type="grpo", temperature=0.8
    )
    assert {len(name) > 1 for name in names_of(trainer)} == {split_actions}
    teach_names(trainer)
    rows = [row for row, *_ in REPLIES]
    completions = [encoded(trainer, text) for _, text, *_ in REPLIES]
    advantages = [0.0 if i in unanimous else advantage for i, (*_, advantage) in enumerate(REPLIES)]
    loss = trainer._compute_loss(trainer.model, batch_of(trainer, rows, completions, advantages))

    expected = torch.tensor(0.0)
    metrics_N3 = []
    replies = zip(REPLIES, completions, advantages, strict=True)
    for (row, text, in_usual_tokens, _), completion, advantage in replies:
        prompt = prompts_of(trainer)[row]
        weight_T = torch.full((len(completion),), advantage)
        if in_usual_tokens:
            prefix = encoded(trainer, text.partition("<answer>")[0] + "<answer>")[:-1]
            log_p_A = log_probabilities(trainer, prompt, prefix, temperature=0.8)
            log_pi_A = log_p_A.log_softmax(0)
            assert log_pi_A.max() < -1e-3  # there is something to learn
            assert log_p_A.exp().sum() < 0.999  # here, too
            earned, entropy = (log_p_A.exp() * ACTION_REWARDS[row]).sum(), -(log_pi_A.exp() * log_pi_A).sum()
            expected = expected + earned + entropy_coef * entropy
            metrics_N3.append([earned.item(), entropy.item(), log_p_A.exp().sum().item()])
            action = ACTIONS.index(text.partition("<answer>")[2].removesuffix("</answer>"))
            weight_T[len(prefix) : len(prefix) + len(names_of(trainer)[action])] = 0.0
        scores_T, _ = plain_scores(trainer.model, prompt, completion, 0.8)
        expected = expected + (weight_T * scores_T).mean()
    assert_same_gradient(gradient(trainer, loss), gradient(trainer, -expected / len(REPLIES)))
    names = ("action/expected_reward", "action/entropy", "action/legal_probability")
    logged = [trainer._metrics["train"][name][-1] for name in names]
    assert logged == pytest.approx(torch.tensor(metrics_N3).mean(0).tolist(), rel=1e-4)  # of those with an answer


def besides_action(trainer, row: int, text: str) -> torch.Tensor:
    """Log-probabilities of a reply's tokens but its action's, by a plain row."""
    before, _, behind = text.partition("<answer>")
    start = len(encoded(trainer, f"{before}<answer>")) - 1
    name = names_of(trainer)[ACTIONS.index(behind.removesuffix("</answer>"))]
    log_p_T, _ = plain_scores(trainer.model, prompts_of(trainer)[row], encoded(trainer, text))
    return torch.cat([log_p_T[:start], log_p_T[start + len(name) :]])


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
def test_the_forms_gradient_equals_the_enumerated_one(architecture, tmp_path):
    """Of the first well-formed reply of each group, though without advantage it would have skipped the pass."""
    texts = [
        (0, "<answer>LEFT</answer>"),
        (0, f"{THOUGHT}<answer>UP</answer>"),
        (1, f"{THOUGHT}<answer>DOWN</answer>"),
        (1, "<think>UP or DOWN</think><answer>DOWN</answer>"),
    ]
    trainer = expected_trainer(architecture, tmp_path)
    trainer.num_generations = 2
    completions = [encoded(trainer, text) for _, text in texts]
    batch = batch_of(trainer, [row for row, _ in texts], completions, [0.0] * 4)
    without = gradient(trainer, trainer._compute_loss(trainer.model, batch))
    trainer.expected.form_coef = 0.5
    found = gradient(trainer, trainer._compute_loss(trainer.model, batch)) - without

    expected = torch.tensor(0.0)
    for row, text in texts[1:3]:
        form_T = besides_action(trainer, row, text)
        expected = expected + 0.5 * torch.logit(form_T.exp()).sum() / 2
    assert_same_gradient(found, gradient(trainer, -expected))
    assert 1 < trainer._metrics["train"]["form/failure_probability"][-1] < len(form_T)


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
def test_the_taught_thoughts_gradient_equals_the_enumerated_one(architecture, tmp_path):
    """Of each prompt's own thought and of each answer's end, once per group, whatever was sampled."""
    taught = [f"{THOUGHT}<answer>LEFT</answer>", "<think>UP or DOWN</think><answer>UP</answer>"]
    trainer = expected_trainer(architecture, tmp_path)
    trainer.num_generations = 2
    sampled = [encoded(trainer, text) for text in ("nothing", taught[0], taught[0], "UP")]
    batch = batch_of(trainer, [0, 0, 1, 1], sampled, [0.0] * 4)
    without = gradient(trainer, trainer._compute_loss(trainer.model, batch))
    trainer.expected.thought_coef = 0.5
    replies = [encoded(trainer, taught[row]) for row in (0, 0, 1, 1)]
    length = max(map(len, replies))
    batch["taught_ids"] = torch.tensor([[*ids, *[0] * (length - len(ids))] for ids in replies])
    batch["taught_mask"] = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in replies])
    found = gradient(trainer, trainer._compute_loss(trainer.model, batch)) - without

    expected = torch.tensor(0.0)
    for row, text in enumerate(taught):
        thought, end = text.partition("<answer>")[0], len(encoded(trainer, "</answer>"))
        for action in ACTIONS:
            form_T = besides_action(trainer, row, f"{thought}<answer>{action}</answer>")
            expected = expected + (form_T if action == ACTIONS[0] else form_T[-end:]).sum()
    assert_same_gradient(found, gradient(trainer, -0.5 * expected / 2))
    logged = trainer._metrics["train"]["thought/log_probability"][-1]
    assert logged == pytest.approx(expected.item() / 2, rel=1e-4)


@pytest.mark.parametrize("masked", [[0], [0, 1, 2, 3]])
def test_a_thought_is_rehearsed_where_completions_are_masked(masked, tmp_path):
    trainer = expected_trainer("llama", tmp_path)
    teach_names(trainer)
    trainer.num_generations, trainer.expected.thought_coef = 2, 0.5
    reply = encoded(trainer, f"{THOUGHT}<answer>UP</answer>")
    batch = batch_of(trainer, [0, 0, 1, 1], [reply] * 4, [0.0] * 4)
    batch["taught_ids"] = torch.tensor([reply] * 4)
    batch["taught_mask"] = torch.ones_like(batch["taught_ids"])
    whole = trainer._compute_loss(trainer.model, batch)
    rehearsed = trainer._metrics["train"]["thought/log_probability"][-1]
    batch["completion_mask"] = batch["completion_mask"].clone()
    batch["completion_mask"][masked] = 0
    assert torch.isfinite(trainer._compute_loss(trainer.model, batch))
    assert trainer._metrics["train"]["thought/log_probability"][-1] == pytest.approx(rehearsed, rel=1e-4)
    assert torch.isfinite(whole)


def test_thoughts_that_differ_are_not_taught_what_pays_everywhere(tmp_path):
    """Two thoughts, two actions, each with what it earns in the mean: with the whole baseline neither is better."""
    trainer = expected_trainer("llama", tmp_path, objective="natural")
    trainer.num_generations, trainer.num_generations_eval = 2, 2
    texts = [f"<think>{thought}</think><answer>{action}</answer>" for thought, action in (("a", "UP"), ("b", "LEFT"))]
    mean_A = ACTION_REWARDS.mean(0)
    batch = batch_of(trainer, [0, 0], [encoded(trainer, text) for text in texts], [0.0] * 2)
    named = trainer.expected.named_actions(batch["completion_ids"], batch["completion_mask"])
    assert len(named) == 2
    trainer._reward_B = torch.tensor([float(mean_A[n.action]) for n in named]).double()
    rewards_BA = mean_A.double().repeat(2, 1)
    assert trainer._advantages_without_luck(batch, rewards_BA, torch.zeros(4)).abs().max() > 0.5
    trainer.action_baseline, trainer.state.max_steps = 1.0, 10
    whole_A = trainer._baseline_A(rewards_BA)
    assert trainer._advantages_without_luck(batch, rewards_BA, whole_A).tolist() == [0.0, 0.0]


def test_a_taught_thought_ends_where_its_padding_begins(tmp_path):
    taught = [in_tokens(tokenizer_of("llama"), f"<think>{'at ' * n}</think><answer>UP</answer>") for n in (1, 5, 9)]
    trainer = expected_trainer("llama", tmp_path, guesses=lambda rows: [taught[row["row"]] for row in rows])
    trainer.expected.thought_coef = 0.5
    rows = [trainer.train_dataset[row] for row in range(3) for _ in range(GROUP)]
    mask_BT = trainer._generate_and_score_completions(rows)["taught_mask"]
    assert mask_BT.sum(1).tolist() == [len(ids) for ids in taught for _ in range(GROUP)]


def test_a_group_that_is_cut_counts_as_one(tmp_path, monkeypatch):
    trainer = expected_trainer("llama", tmp_path)
    trainer.num_generations, trainer.expected.form_coef = 2, 0.5
    seen, form_loss = [], trainer.expected.form_loss

    def spy(log_probabilities, exemplars, groups, device):
        seen.append(groups)
        return form_loss(log_probabilities, exemplars, groups, device)

    monkeypatch.setattr(trainer.expected, "form_loss", spy)
    ids = encoded(trainer, f"{THOUGHT}<answer>UP</answer>")
    trainer._compute_loss(trainer.model, batch_of(trainer, [0, 0, 1], [ids] * 3, [0.0] * 3))
    assert seen == [2]


def test_one_thought_is_not_paid_for_what_its_drawn_action_earns(tmp_path):
    trainer = expected_trainer("llama", tmp_path, objective="natural")
    trainer.num_generations = 2
    texts = [f"{THOUGHT}<answer>{name}</answer>" for name in ("UP", "LEFT")]
    batch = batch_of(trainer, [0, 0], [encoded(trainer, text) for text in texts], [0.0] * 2)
    trainer._reward_B = ACTION_REWARDS[0][[ACTIONS.index("UP"), ACTIONS.index("LEFT")]].double()
    baseline_A = torch.tensor([0.2, -0.1, 0.0, -0.1]).double()
    without = trainer._advantages_without_luck(batch, ACTION_REWARDS[[0, 0]].double(), baseline_A)
    assert without.tolist() == [0.0, 0.0]


def test_what_an_action_earns_in_all_states_of_a_batch_is_taken_off_and_less_of_it_with_every_step(tmp_path):
    trainer = expected_trainer("llama", tmp_path)
    mean_A = ACTION_REWARDS[:2].mean(0)
    rows = [trainer.train_dataset[row] for row in (0, 1) for _ in range(GROUP)]
    for step, share in ((0, 0.5), (4, 0.3), (10, 0.0)):
        trainer.action_baseline, trainer.state.max_steps, trainer.state.global_step = 0.5, 10, step
        found_BA = trainer._generate_and_score_completions(rows)["action_baseline"]
        torch.testing.assert_close(found_BA, (share * (mean_A - mean_A.mean())).repeat(2 * GROUP, 1))


def test_what_is_taken_off_changes_the_gradient_as_other_rewards_would(tmp_path):
    trainer = expected_trainer("llama", tmp_path)
    teach_names(trainer)
    batch = batch_of(trainer, [0, 1], [encoded(trainer, f"{THOUGHT}<answer>UP</answer>")] * 2, [0.0] * 2)
    baseline_BA = torch.tensor([0.2, -0.1, 0.0, -0.1]).repeat(2, 1)
    less = {**batch, "action_rewards": batch["action_rewards"] - baseline_BA}
    expected = gradient(trainer, trainer._compute_loss(trainer.model, less))
    with_baseline = {**batch, "action_baseline": baseline_BA}
    assert_same_gradient(gradient(trainer, trainer._compute_loss(trainer.model, with_baseline)), expected)
    assert not torch.allclose(gradient(trainer, trainer._compute_loss(trainer.model, batch)), expected)


@pytest.mark.parametrize("objective", ["cloning", "distillation"])
def test_labels_stay_what_they_are_under_an_action_baseline(objective, tmp_path):
    trainer = expected_trainer("llama", tmp_path, 0.3, objective=objective, guesses=lambda rows: [[5, 6]] * len(rows))
    with_baseline = PolicyTrainer(
        trainer.model, trainer.reward_funcs, trainer.args, objective=objective, actions=ACTIONS,
        action_rewards=trainer.action_rewards, action_entropy_coef=0.3, action_baseline=1.0, guesses=trainer.guesses,
        train_dataset=trainer.train_dataset, processing_class=trainer.processing_class,
    )  # fmt: skip
    assert not with_baseline._baseline_A(ACTION_REWARDS).any()


def test_the_expected_loss_rises_along_its_gradient_as_finite_differences_do(tmp_path):
    """Central differences of the loss itself, along its gradient and along a random half of it."""
    trainer = expected_trainer("llama", tmp_path, 0.3)
    teach_names(trainer)
    trainer.model.double()
    rows = [row for row, *_ in REPLIES]
    batch = batch_of(trainer, rows, [encoded(trainer, text) for _, text, *_ in REPLIES], [0.0] * len(REPLIES))
    batch["action_rewards"] = batch["action_rewards"].double()
    weights = [p for p in trainer.model.parameters() if p.requires_grad]
    gradient_D = gradient(trainer, trainer._compute_loss(trainer.model, batch))

    def loss_at(step_D: torch.Tensor) -> float:
        with torch.no_grad():
            for weight, step in zip(weights, step_D.split([w.numel() for w in weights]), strict=True):
                weight += step.view_as(weight)
            loss = trainer._compute_loss(trainer.model, batch).item()
            for weight, step in zip(weights, step_D.split([w.numel() for w in weights]), strict=True):
                weight -= step.view_as(weight)
        return loss

    half_D = torch.rand(gradient_D.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    for direction_D in (gradient_D, gradient_D * half_D):
        step_D = 1e-3 * direction_D / direction_D.norm()
        slope = (loss_at(step_D) - loss_at(-step_D)) / 2e-3
        assert slope == pytest.approx((gradient_D @ direction_D / direction_D.norm()).item(), rel=1e-3)
    assert gradient_D.norm() > 0.01


@pytest.mark.parametrize("split_actions", [False, True])
def test_expected_gradient_is_the_mean_of_grpos_over_all_answers(split_actions, tmp_path):
    """One thought, each answer weighted by its probability and reward: GRPO without reward scaling.

    luspo is the loss whose terms are sums over tokens, as a policy gradient's are.
    """
    gradients = {}
    for objective in ("expected", "grpo"):
        trainer = expected_trainer(
            "llama", tmp_path, objective=objective, split_actions=split_actions, loss_type="luspo"
        )
        teach_names(trainer)
        prefix = encoded(trainer, f"{THOUGHT}<answer>")[:-1]
        with torch.no_grad():
            p_A = log_probabilities(trainer, prompts_of(trainer)[0], prefix).exp()
        weights_A = len(ACTIONS) * p_A * ACTION_REWARDS[0]
        completions = [encoded(trainer, f"{THOUGHT}<answer>{name}</answer>") for name in ACTIONS]
        batch = batch_of(trainer, [0] * len(ACTIONS), completions, weights_A)
        gradients[objective] = gradient(trainer, trainer._compute_loss(trainer.model, batch))
    assert_same_gradient(gradients["expected"], gradients["grpo"])


def test_sampled_groups_approach_the_expected_gradient(tmp_path):
    """The same by sampling: the mean over many groups, along the expected gradient, lies within 4 standard errors.

    Outcomes are the four names and, with reward 0, whatever else the model may say there.
    """
    trainer = expected_trainer("llama", tmp_path, loss_type="luspo")
    teach_names(trainer)
    prompt, prefix = prompts_of(trainer)[0], encoded(trainer, f"{THOUGHT}<answer>")[:-1]
    batch = batch_of(trainer, [0], [encoded(trainer, f"{THOUGHT}<answer>LEFT</answer>")], [0.0])
    expected = gradient(trainer, trainer._compute_loss(trainer.model, batch))
    with torch.no_grad():
        p_A = log_probabilities(trainer, prompt, prefix).exp()
    assert 0.05 < 1 - p_A.sum() < 0.95
    # The gradient of a sampled answer's loss for advantage 1, from TRL's loss (nothing stands after the name). The
    # thought's own part is in all of them. What is no name has the rest: sum p grad log p = 0 over all outcomes.
    trainer.expected = None
    thought_D, *names_D = (
        gradient(trainer, trainer._compute_loss(trainer.model, batch_of(trainer, [0], [[*prefix, *name]], [1.0])))
        for name in [(), *names_of(trainer)]
    )
    names_AD = torch.stack(names_D)
    other_D = thought_D - (p_A[:, None] * (names_AD - thought_D)).sum(0) / (1 - p_A.sum())
    gradients_OD = torch.cat([names_AD, other_D[None]])
    p_O, rewards_O = torch.cat([p_A, 1 - p_A.sum(0, True)]), torch.cat([ACTION_REWARDS[0], torch.zeros(1)])
    groups, size = 20_000, 8
    generator = torch.Generator().manual_seed(0)
    drawn_NG = torch.multinomial(p_O.expand(groups, -1), size, replacement=True, generator=generator)
    rewards_NG = rewards_O[drawn_NG]
    # A group's mean contains its own sample, which shrinks the gradient by (size - 1) / size.
    advantages_NG = (rewards_NG - rewards_NG.mean(1, keepdim=True)) * size / (size - 1)
    weights_NO = torch.stack([(advantages_NG * (drawn_NG == o)).mean(1) for o in range(len(p_O))], dim=1)
    along_N = weights_NO @ (gradients_OD @ expected) / expected.dot(expected)
    standard_error = along_N.std() / groups**0.5
    assert standard_error < 0.02
    assert abs(along_N.mean() - 1.0) < 4 * standard_error
    error = weights_NO.mean(0) @ gradients_OD - expected
    assert error.norm() < 0.05 * expected.norm()


def every_action() -> list[list[list[int]]]:
    """A group for each prompt: every action once, behind one thought."""
    tokenizer = tokenizer_of("llama")
    return [[in_tokens(tokenizer, f"{THOUGHT}<answer>{name}</answer>") for name in ACTIONS]] * len(PROMPTS)


def test_a_step_raises_the_expected_reward_and_more_entropy_weight_the_entropy(tmp_path):
    """Metrics of the second step show what the first has done."""
    logs = {}
    for coefficient in (0.0, 0.3, 3.0):
        trainer = expected_trainer(
            "llama", tmp_path, coefficient, max_steps=2, learning_rate=0.05,
            completions=every_action(), rewards=ALL_UNANIMOUS,
        )  # fmt: skip
        trainer.train()
        logs[coefficient] = [row for row in trainer.state.log_history if "action/entropy" in row]
    first = logs[0.0][0]
    assert first == logs[3.0][0] | {k: first[k] for k in first if k in ("loss", "grad_norm", "step_time")}
    for name in ("action/expected_reward", "action/legal_probability"):
        assert logs[0.0][1][name] > 1.005 * first[name]
    after = [log[1]["action/entropy"] for log in logs.values()]
    assert after[0] + 1e-3 < after[1]
    assert after[1] + 1e-3 < after[2]
    assert after[2] > first["action/entropy"]


@pytest.mark.parametrize(("rewards", "is_there"), [(ALL_UNANIMOUS, False), (ONE_UNANIMOUS, True)])
def test_where_answers_alone_are_scored_no_entropy_is_logged(rewards, is_there, tmp_path):
    """Three micro-batches, of which those without any advantage would count as 0."""
    trainer = expected_trainer(
        "llama", tmp_path, completions=every_action(), rewards=rewards,
        gradient_accumulation_steps=3, per_device_train_batch_size=GROUP,
    )  # fmt: skip
    trainer.train()
    logged = [row["entropy"] for row in trainer.state.log_history if "entropy" in row]
    assert [value > 1.0 for value in logged] == [True] * is_there  # a random model is unsure of every token


def test_each_completion_has_the_rewards_of_its_own_row(tmp_path):
    """Through sampling, splitting into micro-batches and reuse."""
    trainer = expected_trainer(
        "llama", tmp_path, per_device_train_batch_size=GROUP // 2, gradient_accumulation_steps=6, num_iterations=2
    )
    row_of = {tuple(ids): row for row, ids in enumerate(prompts_of(trainer))}
    order = [2, 0, 1]
    generation_batch = [trainer.train_dataset[row] for row in order for _ in range(GROUP)]
    seen = []
    for trainer._step in range(12):
        inputs = trainer._prepare_inputs(generation_batch)
        for ids, mask, rewards in zip(
            inputs["prompt_ids"], inputs["prompt_mask"], inputs["action_rewards"], strict=True
        ):
            row = row_of[tuple(ids[mask.bool()].tolist())]
            assert torch.equal(rewards, ACTION_REWARDS[row])
            seen.append(row)
    assert seen == [row for row in order for _ in range(GROUP)] * 2


def test_accumulation_does_not_change_the_expected_step(tmp_path):
    moved = {}
    for steps in (1, 3):
        trainer = expected_trainer(
            "llama", tmp_path, 0.1, completions=every_action(), rewards=ALL_UNANIMOUS, loss_type="grpo",
            gradient_accumulation_steps=steps, per_device_train_batch_size=GROUP * len(PROMPTS) // steps,
        )  # fmt: skip
        trainer.train()
        moved[steps] = torch.cat([w.flatten() for w in adapter_weights(trainer.model).values()])
    torch.testing.assert_close(moved[1], moved[3], rtol=1e-5, atol=1e-6)


def test_expected_objective_without_a_readable_answer_is_grpo(tmp_path):
    texts = ["no idea", f"{THOUGHT}<answer>LEFT or UP</answer>", "<answer>down</answer>"]
    gradients = []
    for objective in ("expected", "grpo"):
        trainer = expected_trainer("llama", tmp_path, 1.0, objective=objective)
        batch = batch_of(trainer, [0, 1, 2], [encoded(trainer, text) for text in texts], [0.5, -1.0, 0.7])
        gradients.append(gradient(trainer, trainer._compute_loss(trainer.model, batch)))
    assert_same_gradient(*gradients)


# The natural objective ---------------------------------------------------------------------------------------------


def natural_advantages(tmp_path, replies: list[list[str]], rewards, **options) -> torch.Tensor:
    """What the other tokens of these completions get, (prompts, group)."""
    completions = [[in_tokens(tokenizer_of("llama"), text) for text in group] for group in replies]
    trainer = expected_trainer(
        "llama", tmp_path, 0.1, objective="natural", completions=completions, rewards=rewards, **options
    )
    rows = [trainer.train_dataset[row] for row in range(len(PROMPTS)) for _ in range(GROUP)]
    return trainer._generate_and_score_completions(rows)["advantages"].view(len(PROMPTS), GROUP)


def replies_of(prompt: int, names=ACTIONS) -> list[str]:
    """One thought, which no other prompt's replies have: the fixed rewards are found by the completion."""
    return [f"<think>at {prompt}</think><answer>{name}</answer>" for name in names]


def test_other_tokens_do_not_pay_for_the_action_that_was_drawn(tmp_path):
    """Well-formed, one thought, every action once: nothing to tell the other tokens. Other thoughts may be a merit."""
    rewards = [row.tolist() for row in ACTION_REWARDS]
    thoughts = [f"<think>{name}</think><answer>{name}</answer>" for name in ACTIONS]
    advantages_PG = natural_advantages(tmp_path, [replies_of(0), thoughts, replies_of(2)], rewards)
    assert advantages_PG[[0, 2]].tolist() == [[0.0] * 4] * 2
    sampled = torch.tensor(rewards[1], dtype=torch.float64)
    expected = (sampled - sampled.mean()) / (sampled.std() + 1e-4)
    torch.testing.assert_close(advantages_PG[1].double(), expected, rtol=1e-5, atol=1e-5)


def test_a_malformed_completion_is_worse_whatever_action_it_names(tmp_path):
    """By sampled rewards it would be the best of its group: it names the best action."""
    replies = [[*replies_of(p, ACTIONS[:3]), f"<think>at {p}</think><answer>UP</answer> ok"] for p in range(3)]
    rewards = [[0.6, 0.5, 0.4, 1.0 - 0.2], [0.6, 0.5, 0.4, 1.0 - 0.2], [0.6, 0.5, 0.4, 1.0 - 0.2]]
    trainer_rewards = torch.tensor([[0.6, 0.5, 0.4, 1.0]] * 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "ACTION_REWARDS", trainer_rewards)
        advantages_PG = natural_advantages(tmp_path, replies, rewards)
    for advantages_G in advantages_PG:
        assert advantages_G[3] < 0
        assert advantages_G[:3].tolist() == pytest.approx([advantages_G[0].item()] * 3, abs=1e-4)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_a_completion_without_an_action_is_worse_than_any_that_names_one(scale_rewards, tmp_path):
    replies = [[*replies_of(p, ACTIONS[:3]), f"no idea at {p}"] for p in range(3)]
    rewards = [[*row[:3].tolist(), 0.0] for row in ACTION_REWARDS]
    for advantages_G in natural_advantages(tmp_path, replies, rewards, scale_rewards=scale_rewards):
        assert advantages_G[3] < 0 < advantages_G[0]
        assert advantages_G[:3].tolist() == pytest.approx([advantages_G[0].item()] * 3, abs=1e-4)


def test_advantages_scaled_by_the_batch(tmp_path):
    """A thought of its own for each action: what it earned stays in."""
    replies = [[f"<think>{p} {name}</think><answer>{name}</answer>" for name in ACTIONS] for p in range(3)]
    rewards = [row.tolist() for row in ACTION_REWARDS]
    found = natural_advantages(tmp_path, replies, rewards, scale_rewards="batch").double()
    reward_PG = ACTION_REWARDS.double()
    expected = (reward_PG - reward_PG.mean(1, keepdim=True)) / (reward_PG.std() + 1e-4)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# Supervision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["cloning", "distillation"])
def test_supervision_teaches_the_best_action_and_the_taught_thought(objective, tmp_path, monkeypatch):
    """Nothing is sampled; each prompt's own best action and its thought gain probability."""
    monkeypatch.setattr("llm_policy.grpo.trainer.sample_completions", None)
    replies = [f"<think>at {row}</think><answer>{ACTIONS[0]}</answer>" for row in range(len(PROMPTS))]
    taught = [in_tokens(tokenizer_of("llama"), reply) for reply in replies]
    trainer = expected_trainer(
        "llama", tmp_path, 0.1, objective=objective, max_steps=30, learning_rate=0.01, optim="adamw_torch",
        guesses=lambda rows: [taught[row["row"]] for row in rows],
        completions=[[ids] * GROUP for ids in taught], rewards=ALL_UNANIMOUS,
    )  # fmt: skip
    del trainer._generate_single_turn  # the class's own

    def truth(completions, log_metric, **_):
        log_metric("sampled/true_thoughts", 1.0)  # as `tasks.tabular.logging_truth` does
        return [1.0] * len(completions)

    trainer.reward_funcs = [truth]
    batch = batch_of(trainer, [0, 1, 2], taught, [1.0] * 3)

    def thought_and_best() -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of the other tokens, and probability of each prompt's best action."""
        named = trainer.expected.named_actions(batch["completion_ids"], batch["completion_mask"])
        trainer._branches = trainer.expected.branches(named)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        with torch.no_grad():
            log_p_BT, _, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, mask, batch["completion_ids"].size(1)
            )
        p_NA = torch.stack([b.sum() for b in trainer._branch_log_probabilities]).exp().view(3, -1)
        trainer._branches = []
        return log_p_BT.sum(1) - p_NA[:, 0].log(), p_NA[range(3), ACTION_REWARDS.argmax(1)]

    thought_before, best_before = thought_and_best()
    trainer.train()
    thought_after, best_after = thought_and_best()
    assert (thought_after > thought_before + 1).all()
    assert (best_before < 0.1).all()
    assert (best_after > 0.2).all()
    rows = [{"row": row} for row in range(3) for _ in range(GROUP)]
    stood_in = trainer._generate_and_score_completions([{"prompt": PROMPTS[r["row"]], **r} for r in rows])
    labels = [n.action for n in trainer.expected.named_actions(stood_in["completion_ids"], stood_in["completion_mask"])]
    assert labels == [int(ACTION_REWARDS[r["row"]].argmax()) for r in rows], "an answer ends behind its label"
    logged = [log for log in trainer.state.log_history if "action/expected_reward" in log]
    assert len(logged) == 30
    assert not any(name.startswith(("reward", "frac_reward", "sampled/")) for log in logged for name in log)


@pytest.fixture
def mixture(monkeypatch):
    """A tiny model with two experts; PEFT adapts their fused weights, which are no linear layers."""
    settings = {"model_type": "mixtral", "num_local_experts": 2}
    monkeypatch.setitem(ARCHITECTURES, "mixtral", settings)
    return "mixtral"


def test_a_mixture_of_experts_with_its_balancing_loss_is_refused_with_the_flag_that_helps(mixture, tmp_path):
    with pytest.raises(InputError, match="balancing loss is not packed; use --router_aux_loss_coef 0"):
        expected_trainer(mixture, tmp_path)


def test_a_mixture_of_experts_without_it_takes_trls_step(mixture, tmp_path):
    assert not MergedCopy.is_possible(add_random_adapter(random_policy(mixture)))
    assert_same_step(mixture, tmp_path, router_aux_loss_coef=0.0)


# TRL -------------------------------------------------------------------------------------------------------------


# TRL's private methods that `PolicyTrainer` overrides, with their parameters as of the pinned version. A version that
# changes one fails here, and not in a run.
OVERRIDDEN = {
    "_get_train_sampler": "dataset",
    "_prepare_inputs": "generation_batch",
    "_generate_single_turn": "prompt_ids images multimodal_fields num_generations has_tool_images",
    "_calculate_rewards": "inputs prompts completions completion_ids_list",
    "_generate_and_score_completions": "inputs",
    "_get_per_token_logps_and_entropies": "model input_ids attention_mask logits_to_keep batch_size compute_entropy "
    "compute_aux_loss pixel_values image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles",
    "_compute_loss": "model inputs",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_save_checkpoint": "model trial",
}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_trl_has_the_private_methods_that_are_overridden_with_their_parameters(name):
    """A new version that renames one, or changes its parameters, must fail here and not in a run."""
    parameters = list(inspect.signature(getattr(GRPOTrainer, name)).parameters)
    assert parameters[0] == "self"
    assert " ".join(parameters[1:]).startswith(OVERRIDDEN[name])
    assert name in vars(PolicyTrainer), "listed and not overridden"


def test_every_overridden_private_method_is_listed():
    own = {name for name in vars(PolicyTrainer) if name.startswith("_") and not name.startswith("__")}
    assert {name for name in own if hasattr(GRPOTrainer, name)} - {"_abc_impl"} == set(OVERRIDDEN)


# Order of the rows -----------------------------------------------------------------------------------------------


def order(seed: int, epoch: int, rows: int = 11) -> list[int]:
    sizes = {"mini_repeat_count": 1, "batch_size": 1, "repeat_count": 1}
    return list(EpochRepeatSampler(lambda: epoch, data_source=range(rows), shuffle=True, seed=seed, **sizes))


def test_the_order_depends_on_seed_and_epoch_alone():
    torch.manual_seed(0)
    orders = {(seed, epoch): order(seed, epoch) for seed in (0, 1, 42) for epoch in range(4)}
    torch.manual_seed(1)
    for (seed, epoch), expected in orders.items():
        assert order(seed, epoch) == expected
        assert sorted(expected) == list(range(11))
    assert len({tuple(o) for o in orders.values()}) == len(orders)


def test_a_sampler_made_in_the_middle_goes_on_as_the_first_would():
    epochs = iter(range(3))
    sizes = {"mini_repeat_count": 2, "batch_size": 3, "repeat_count": 2, "shuffle": True, "seed": 7}
    sampler = EpochRepeatSampler(lambda: next(epochs), data_source=range(7), **sizes)
    orders = [list(sampler) for _ in range(3)]
    assert list(EpochRepeatSampler(lambda: 2, data_source=range(7), **sizes)) == orders[2]
    assert all(len(o) == len(sampler) == 24 for o in orders)
    first = orders[0]
    assert first[:6] == first[6:12] == [row for row in first[0:6:2] for _ in range(2)]


def test_training_runs_through_the_epochs_orders(tmp_path):
    trainer = trainer_of(
        PolicyTrainer, "llama", tmp_path, shuffle_dataset=True, seed=3, max_steps=9, per_device_train_batch_size=GROUP
    )
    row_of = {tuple(ids): row for row, ids in enumerate(prompts_of(trainer))}
    seen, generate = [], trainer._generate_single_turn
    trainer._generate_single_turn = lambda ids, *a, **k: (seen.append(row_of[tuple(ids[0])]), generate(ids, *a, **k))[1]
    trainer.train()
    assert seen == [row for epoch in range(3) for row in order(3, epoch, rows=3)]
