"""Where the answer stands, and the term at it."""

import copy
from collections.abc import Sequence

import pytest
import torch
from tiny_policies import ARCHITECTURE_NAMES, tokenizer_of
from tokenizers import AddedToken

from llm_policy.environments.frozen_lake import ACTIONS
from llm_policy.errors import InputError
from llm_policy.grpo.expected import (
    ExpectedObjective,
    NamedAction,
    action_token_ids,
    luck_of_actions,
    without_answers,
)

# Where the answer stands -----------------------------------------------------------------------------------------

# (completion, the name at whose first token the answer stands, or None)
ANSWERS = {
    "well-formed": ("<think>go</think><answer>DOWN</answer>", "DOWN"),
    "action in the thought": ("<think>RIGHT, not UP. Or UP?</think><answer>UP</answer>", "UP"),
    "same action in the thought, twice": ("<think>LEFT LEFT</think><answer>LEFT</answer>", "LEFT"),
    "no thought": ("<answer>RIGHT</answer>", "RIGHT"),
    "text behind the answer": ("<answer>RIGHT</answer> because LEFT is a hole", "RIGHT"),
    # read by the reward, in other tokens than the usual ones
    "lower case": ("<think>go</think><answer>down</answer>", None),
    "spaces": ("<think>go</think><answer> UP </answer>", None),
    "new line": ("<think>go</think><answer>\nUP\n</answer>", None),
    "no answer": ("<think>LEFT</think>", None),
    "empty answer": ("<think>LEFT</think><answer></answer>", None),
    "two names": ("<think>go</think><answer>LEFT or UP</answer>", None),
    "two answers": ("<answer>LEFT</answer><answer>UP</answer>", None),
    "cut": ("<think>go</think><answer>DOWN", None),
    "empty": ("", None),
}


def named_in(text: str, tokenizer, actions: Sequence[str]) -> tuple[list[int], list[NamedAction]]:
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    ids_BT = torch.tensor([ids])
    return ids, ExpectedObjective(tokenizer, actions, 0.0).named_actions(ids_BT, torch.ones_like(ids_BT))


@pytest.mark.parametrize("split_actions", [False, True])
@pytest.mark.parametrize("case", ANSWERS)
def test_where_a_completion_names_its_action(case, split_actions):
    text, name = ANSWERS[case]
    tokenizer = tokenizer_of("llama", split_actions)
    ids, found = named_in(text, tokenizer, ACTIONS)
    assert len(found) == (name is not None)
    for n in found:
        assert tokenizer.decode(ids[: n.start]) == text[: text.index("<answer>") + len("<answer>")]
        assert tuple(ids[n.start : n.stop]) == action_token_ids(tokenizer, ACTIONS)[ACTIONS.index(name)]
        assert n.action == ACTIONS.index(name)


def test_an_action_that_begins_with_another_one_is_refused():
    """Else the shorter one's probability would contain the longer one's, and the worse of the two could win."""
    with pytest.raises(InputError, match="actions 'LEFT' and 'LEFT UP': one begins with the other"):
        action_token_ids(tokenizer_of("llama"), ("UP", "LEFT UP", "LEFT"))


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
@pytest.mark.parametrize("split_actions", [False, True])
def test_action_tokens_spell_the_names(architecture, split_actions):
    tokenizer = tokenizer_of(architecture, split_actions)
    token_ids = action_token_ids(tokenizer, ACTIONS)
    assert [tokenizer.decode(ids) for ids in token_ids] == list(ACTIONS)
    assert {len(ids) > 1 for ids in token_ids} == {split_actions}


@pytest.mark.parametrize("token", [">DOWN<", ">DOWN", "DOWN<"])
def test_tokens_that_run_over_the_answer_tag_are_refused(token):
    tokenizer = copy.deepcopy(tokenizer_of("llama"))
    tokenizer.add_tokens([AddedToken(token, normalized=False)])
    with pytest.raises(InputError, match=r"'DOWN'.*--objective grpo"):
        action_token_ids(tokenizer, ACTIONS)


def test_actions_in_another_order_are_found_by_their_names():
    """The lake's order is not in the parser any more: a task with other names, or another order, is scored by names."""
    tokenizer, actions = tokenizer_of("llama"), ("UP", "RIGHT", "DOWN", "LEFT")
    objective = ExpectedObjective(tokenizer, actions, entropy_coef=0.0)
    completions = [
        [
            *tokenizer.encode(f"<think>.</think><answer>{name}</answer>", add_special_tokens=False),
            tokenizer.eos_token_id,
        ]
        for name in actions
    ]
    ids_BT = torch.tensor(completions)
    named = objective.named_actions(ids_BT, torch.ones_like(ids_BT))
    assert [n.completion for n in named] == [0, 1, 2, 3]
    for n, action in zip(named, actions, strict=True):
        assert tokenizer.decode(ids_BT[n.completion, n.start : n.stop]) == action
    # Branches are in the order of the rewards' columns
    assert [tokenizer.decode(branch.token_ids) for branch in objective.branches(named[:1])] == list(actions)


def test_a_name_that_is_no_legal_action_is_not_found():
    tokenizer = tokenizer_of("llama")
    assert named_in("<think>.</think><answer>LEFT</answer>", tokenizer, ("SOUTH", "NORTH"))[1] == []


# The term ------------------------------------------------------------------------------------------------------


def test_the_loss_by_hand():
    """Two of three completions name an action: - (sum p r + c H) / 3."""
    objective = ExpectedObjective(tokenizer_of("llama"), ("LEFT", "UP"), entropy_coef=0.5)
    p_NA = torch.tensor([[0.6, 0.2], [0.1, 0.1]], dtype=torch.float64)
    rewards_BA = torch.tensor([[9.0, 9.0], [1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    named = [NamedAction(1, 4, 5, 0), NamedAction(2, 4, 5, 1)]
    loss, sums = objective.loss([row.log() for row in p_NA.flatten()[:, None]], rewards_BA, named)
    expected = 0.6 * 1.0 + 0.1 * 2.0
    entropy = -(0.75 * torch.tensor(0.75).log() + 0.25 * torch.tensor(0.25).log()) + torch.tensor(2.0).log()
    assert loss.item() == pytest.approx(-(expected + 0.5 * entropy.item()) / 3)
    assert {name: value.item() for name, value in sums.items()} == pytest.approx(
        {
            "action/expected_reward": expected,
            "action/entropy": entropy.item(),
            "action/legal_probability": 1.0,
        }
    )


@pytest.mark.parametrize("name", ["expected", "natural"])
def test_with_the_whole_baseline_nothing_pays_that_does_not_read_the_state(name):
    """Three states, one policy for all of them: what all share has no gradient, and it has one without the baseline."""
    objective = ExpectedObjective(tokenizer_of("llama"), ("LEFT", "UP"), 0.0, name)
    rewards_BA = torch.tensor([[1.0, 0.0], [2.0, 0.5], [0.0, 0.5]], dtype=torch.float64)
    named = [NamedAction(i, 4, 5, 0) for i in range(3)]
    logits_A = torch.tensor([0.7, -0.2], dtype=torch.float64, requires_grad=True)

    def shared_gradient(baseline_A) -> list[float]:
        log_p = logits_A.log_softmax(0).repeat(3)[:, None]
        loss, sums = objective.loss(list(log_p), rewards_BA, named, baseline_A)
        assert sums["action/expected_reward"] == pytest.approx(float((log_p.detach().exp()[:2, 0] * rewards_BA).sum()))
        return torch.autograd.grad(loss, logits_A)[0].tolist()

    assert shared_gradient(rewards_BA.mean(0)) == pytest.approx([0.0, 0.0], abs=1e-12)
    assert shared_gradient(0.0)[0] < -0.01  # LEFT is better in the mean


def test_without_a_named_action_the_loss_is_zero():
    objective = ExpectedObjective(tokenizer_of("llama"), ("LEFT", "UP"), entropy_coef=0.5)
    loss, sums = objective.loss([], torch.zeros(3, 2), [])
    assert loss.item() == 0.0
    assert all(value.item() == 0.0 for value in sums.values())


def test_advantages_are_zero_at_the_answer_alone():
    advantages_BT = without_answers(torch.tensor([1.0, -2.0]), torch.zeros(2, 4), [NamedAction(1, 1, 3, 0)])
    assert advantages_BT.tolist() == [[1.0, 1.0, 1.0, 1.0], [-2.0, 0.0, 0.0, -2.0]]


# The natural gradient ------------------------------------------------------------------------------------------


def logit_gradient(logits_A, rewards_A, entropy_coef: float, form: str) -> torch.Tensor:
    """What gradient descent adds to the logits of a policy over the actions alone, in one step of size 1."""
    objective = ExpectedObjective(tokenizer_of("llama"), ACTIONS, entropy_coef, form)
    logits_A = torch.tensor(logits_A, dtype=torch.float64, requires_grad=True)
    scores = [score[None] for score in logits_A.log_softmax(0)]
    loss, _ = objective.loss(scores, torch.tensor([rewards_A], dtype=torch.float64), [NamedAction(0, 4, 5, 0)])
    return -torch.autograd.grad(loss, logits_A)[0]


REWARDS = [1.5, 1.0, 0.75, 0.5]


@pytest.mark.parametrize("logits", [[0.0] * 4, [3.0, 0.0, -1.0, 0.5], [-8.0, 8.0, 0.0, 0.0]])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1, 1.0])
def test_natural_is_the_plain_gradient_through_the_inverse_fisher_matrix(logits, entropy_coef):
    plain = logit_gradient(logits, REWARDS, entropy_coef, "expected")
    natural = logit_gradient(logits, REWARDS, entropy_coef, "natural")
    pi_A = torch.tensor(logits, dtype=torch.float64).softmax(0)
    fisher_AA = pi_A.diag() - torch.outer(pi_A, pi_A)
    through = torch.linalg.pinv(fisher_AA, rtol=1e-12) @ plain
    torch.testing.assert_close(natural * len(ACTIONS), through - through.mean(), rtol=1e-5, atol=1e-6)


def test_at_a_uniform_policy_both_are_the_same():
    uniform = [0.0] * 4
    torch.testing.assert_close(
        logit_gradient(uniform, REWARDS, 0.1, "natural"), logit_gradient(uniform, REWARDS, 0.1, "expected")
    )


def test_an_action_that_is_nearly_gone_comes_back():
    """Its plain gradient has its probability as a factor, the natural one has not."""
    nearly_gone = [-9.0, 0.0, 0.0, 0.0]  # the best action, at 4e-5
    plain = logit_gradient(nearly_gone, REWARDS, 0.0, "expected")
    natural = logit_gradient(nearly_gone, REWARDS, 0.0, "natural")
    assert 0 < plain[0] < 1e-4
    assert natural[0] > 0.1


@pytest.mark.parametrize("form", ["expected", "natural", "distillation"])
def test_they_rest_at_the_softmax_of_the_rewards(form):
    at_rest = (torch.tensor(REWARDS, dtype=torch.float64) / 0.3).tolist()
    assert logit_gradient(at_rest, REWARDS, 0.3, form).abs().max() < 1e-12


def test_probability_that_leaks_comes_back():
    objective = ExpectedObjective(tokenizer_of("llama"), ("LEFT", "UP"), 0.1, "natural")
    log_p = torch.tensor([0.3, 0.3], dtype=torch.float64).log().requires_grad_()  # 40 % are no action
    rewards_BA = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    loss, _ = objective.loss(list(log_p[:, None]), rewards_BA, [NamedAction(0, 4, 5, 0)])
    assert (-torch.autograd.grad(loss, log_p)[0] > 0.4).all()


# The form ------------------------------------------------------------------------------------------------------


def test_the_forms_gradient_is_that_of_the_log_odds():
    """Besides the action; a token that goes wrong more seldom than SURE is left alone."""
    objective = ExpectedObjective(tokenizer_of("llama"), ("LEFT", "UP"), 0.0, form_coef=0.5)
    logits_T = torch.tensor([2.0, 5.0, -1.0, 20.0], dtype=torch.float64, requires_grad=True)  # the third is the action
    log_p_T = torch.nn.functional.logsigmoid(logits_T)
    loss, sums = objective.form_loss([log_p_T, log_p_T], [NamedAction(0, 2, 3, 0), NamedAction(2, 2, 3, 1)], 4)
    (gradient_T,) = torch.autograd.grad(-loss, logits_T)
    assert gradient_T.tolist() == pytest.approx([0.25, 0.25, 0.0, 0.0])  # weight 0.5, two in four groups
    failure = 2 * sum(1 - logits_T.detach()[t].sigmoid() for t in (0, 1, 3))
    assert sums["form/failure_probability"].item() == pytest.approx(failure.item())


def test_one_well_formed_completion_of_each_group_teaches_the_form():
    named = [
        NamedAction(i, 2, 3, 0, is_well_formed) for i, is_well_formed in ((0, False), (1, True), (2, True), (3, True))
    ]
    exemplars = ExpectedObjective(tokenizer_of("llama"), ("LEFT", "UP"), 0.0, form_coef=0.5).exemplars(named, group=2)
    assert [n.completion for n in exemplars] == [1, 2]


def test_the_taught_thoughts_loss_leaves_the_action_out():
    objective = ExpectedObjective(tokenizer_of("llama"), ("LEFT", "UP"), 0.0, thought_coef=0.5)
    log_p_T = torch.tensor([-1.0, -2.0, -50.0, -4.0])  # the third is the action
    loss, sums = objective.thought_loss([log_p_T, log_p_T], [NamedAction(0, 2, 3, 0), NamedAction(2, 2, 3, 1)], 4)
    assert (loss.item(), sums["thought/log_probability"].item()) == (0.5 * 14 / 4, -14)


def test_supervision_ends_an_answer_behind_its_label():
    """Of several best actions each has its turn; what names no action stays as it is."""
    tokenizer = tokenizer_of("llama")
    objective = ExpectedObjective(tokenizer, ACTIONS, 0.0, "cloning")
    texts = ["<think>.</think><answer>LEFT</answer>", "<think>at 3</think><answer>UP</answer>", "nothing"]
    replies = [tokenizer.encode(text, add_special_tokens=False) for text in (*texts[:2], *texts[:2], texts[2])]
    rewards = {"LEFT": [0.5, 0.5, 0.1, 0.2], "UP": [0.1, 0.2, 0.9, 0.3]}
    rewards_BA = [rewards["LEFT"], rewards["UP"], rewards["UP"], rewards["LEFT"], rewards["UP"]]
    found = [tokenizer.decode(ids) for ids in objective.labelled(replies, rewards_BA)]
    best = [ACTIONS[0], ACTIONS[2], ACTIONS[2], ACTIONS[1]]
    thoughts = [text.partition("<answer>")[0] for text in texts[:2]] * 2
    assert found[4] == tokenizer.decode(replies[4])
    assert found[:4] == [f"{thought}<answer>{a}</answer>" for thought, a in zip(thoughts, best, strict=True)]


def test_without_an_exemplar_the_form_has_no_loss():
    loss, _ = ExpectedObjective(tokenizer_of("llama"), ("LEFT", "UP"), 0.0, form_coef=0.5).form_loss([], [], 2)
    assert loss.item() == 0.0


def test_what_is_well_formed_is_read_off_the_whole_completion():
    tokenizer = tokenizer_of("llama")
    objective = ExpectedObjective(tokenizer, ACTIONS, 0.0)
    texts = ["<think>.</think><answer>UP</answer>", "<answer>UP</answer>", "<think>.</think><answer>UP</answer> so"]
    lists = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    length = max(map(len, lists))
    ids_BT = torch.tensor([ids + [0] * (length - len(ids)) for ids in lists])
    mask_BT = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in lists])
    assert [n.is_well_formed for n in objective.named_actions(ids_BT, mask_BT)] == [True, False, False]


# Supervision ---------------------------------------------------------------------------------------------------


def test_cloning_rests_where_the_best_actions_share_all():
    rewards = [1.5, 1.5 - 1e-8, 0.75, 0.5]
    assert logit_gradient([0.0, 0.0, -40.0, -40.0], rewards, 0.1, "cloning").abs().max() < 1e-12
    uniform_A = logit_gradient([0.0] * 4, rewards, 0.1, "cloning")
    assert uniform_A.tolist() == pytest.approx([0.25, 0.25, -0.25, -0.25])
    assert logit_gradient([0.0] * 4, REWARDS, 0.1, "cloning").tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_distillation_by_hand():
    target_A = (torch.tensor(REWARDS, dtype=torch.float64) / 0.5).softmax(0)
    found_A = logit_gradient([0.0] * 4, REWARDS, 0.5, "distillation")
    torch.testing.assert_close(found_A, target_A - 0.25)


# The luck of the sampled action --------------------------------------------------------------------------------


def test_luck_is_taken_out_where_a_group_thinks_the_same():
    rewards_BA = torch.tensor([[1.0, 0.0]] * 2 + [[0.8, 0.4]] * 2 + [[1.0, 0.5]] * 2)
    ids_BT = torch.tensor([[7, 8, 1], [7, 8, 2], [7, 8, 1], [7, 9, 2], [7, 8, 1], [3, 3, 3]])
    named = [NamedAction(0, 2, 3, 0), NamedAction(1, 2, 3, 1), NamedAction(2, 2, 3, 0), NamedAction(3, 2, 3, 1)]
    named += [NamedAction(4, 2, 3, 0)]  # beside a completion without an action
    luck_B = luck_of_actions(rewards_BA, named, ids_BT, group=2)
    assert luck_B.tolist() == pytest.approx([0.5, -0.5, 0.0, 0.0, 0.25, 0.0])
