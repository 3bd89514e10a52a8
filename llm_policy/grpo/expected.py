"""The objective `expected`: the exact expected reward at the answer, in place of one sampled term.

In each completion that names a legal action directly behind `<answer>`, in the prompt's spelling, the loss at the
action's tokens is

    - sum_a p(a) r(s, a) - action_entropy_coef * H(pi),        pi = p / sum_A p,

with r the reward of a well-formed completion that answers a, p the model's own probability of the action's string after
prompt and thought, and A the legal actions. All other tokens keep the group advantage.

What is no action earns nothing here, not the half that it has for its form, so that probability which leaks to other
answers comes back. A readable action in a malformed completion counts like a well-formed one, because the other tokens
teach the form. Under such rewards the gradient is G / (G - 1) times the mean of the gradients that sampling the answer
again and again would give GRPO with groups of G and without reward scaling (GRPO's baseline, the group's mean, contains
the sample itself). So the reward has no sampling noise at the decision, and a group whose rewards agree has a gradient
as long as one of its completions names an action. The KL term of `beta`, where there is one, stays sampled.

The equality is one of sums over tokens (loss_type luspo). grpo and dapo divide a sampled term by the number of tokens,
this one only by the number of completions, so that there it weighs more. Needs token-level ratios
(importance_sampling_level): a ratio of the whole sequence would carry the sampled term back to the answer.

Axes: B completions of a batch, T tokens, N completions that name an action, A legal actions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from llm_policy.completions import parse_completion
from llm_policy.errors import InputError
from llm_policy.grpo.packing import Branch


@dataclass(frozen=True)
class NamedAction:
    """Where a completion names its action: completion `completion`, tokens `start` up to `stop`."""

    completion: int
    start: int
    stop: int


class ExpectedObjective:
    """The term at the answer, for one list of legal actions and one tokenizer.

    Attributes:
        actions: what may stand in the answer, in the order of the rewards' columns.
        token_ids: of each action, one or several.
        entropy_coef: weight of the entropy (nats) of pi.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, actions: Sequence[str], entropy_coef: float) -> None:
        self.tokenizer = tokenizer
        self.actions = list(actions)
        self.token_ids = action_token_ids(tokenizer, actions)
        self.entropy_coef = entropy_coef

    def named_actions(self, completion_ids_BT: torch.Tensor, completion_mask_BT: torch.Tensor) -> list[NamedAction]:
        """One entry for each completion that names a legal action in its usual tokens."""
        found = []
        for i, (ids, mask) in enumerate(zip(completion_ids_BT.tolist(), completion_mask_BT.tolist(), strict=True)):
            span = find_answer(self.tokenizer, ids[: sum(mask)], self.actions, self.token_ids)
            if span is not None:
                found.append(NamedAction(i, span.start, span.stop))
        return found

    def branches(self, named: Sequence[NamedAction]) -> list[Branch]:
        """What the packed pass has to score besides: every legal action at each of these places."""
        return [Branch(n.completion, n.start, token_ids) for n in named for token_ids in self.token_ids]

    def loss(
        self, branch_log_probabilities: Sequence[torch.Tensor], rewards_BA: torch.Tensor, named: Sequence[NamedAction]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss, a mean over the B completions of the batch, and sums over the N of what is logged.

        Args:
            branch_log_probabilities: of the tokens of `branches(named)`, in that order.
            rewards_BA: what a well-formed completion earns with each action, row by row of the batch.
        """
        log_probabilities_NA = rewards_BA.new_empty(0, len(self.token_ids))
        if named:
            log_probabilities_NA = torch.stack([b.sum() for b in branch_log_probabilities]).view(len(named), -1)
        probabilities_NA = log_probabilities_NA.exp()
        expected_N = (probabilities_NA * rewards_BA[[n.completion for n in named]]).sum(1)
        log_policy_NA = log_probabilities_NA.log_softmax(dim=1)
        entropy_N = -(log_policy_NA.exp() * log_policy_NA).sum(1)
        total = expected_N.sum() + self.entropy_coef * entropy_N.sum()
        sums = {
            "action/expected_reward": expected_N.sum().detach(),
            "action/entropy": entropy_N.sum().detach(),
            "action/legal_probability": probabilities_NA.sum().detach(),
        }
        return -total / len(rewards_BA), sums


def without_answers(
    advantages_B: torch.Tensor, completion_ids_BT: torch.Tensor, named: Sequence[NamedAction]
) -> torch.Tensor:
    """Advantages as (B, T), zero at the actions' tokens: there the expected term takes over."""
    advantages_BT = advantages_B.unsqueeze(1).repeat(1, completion_ids_BT.size(1))
    for n in named:
        advantages_BT[n.completion, n.start : n.stop] = 0.0
    return advantages_BT


def action_token_ids(tokenizer: PreTrainedTokenizerBase, actions: Sequence[str]) -> list[tuple[int, ...]]:
    """Token ids of each action's name as it stands between `<answer>` and `</answer>`, one or several per name."""
    token_ids = []
    for name in actions:
        text = f"<think>.</think><answer>{name}</answer>"
        start = text.index(f"{name}</answer>")
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        inside = [
            (token, span)
            for token, span in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
            if span[0] < start + len(name) and span[1] > start
        ]
        if not inside or inside[0][1][0] != start or inside[-1][1][1] != start + len(name):
            raise InputError(
                f"{tokenizer.name_or_path}: its tokens for {name!r} run over the answer tag: use --objective grpo"
            )
        token_ids.append(tuple(token for token, _ in inside))
    return token_ids


def find_answer(
    tokenizer: PreTrainedTokenizerBase,
    completion_ids: list[int],
    actions: Sequence[str],
    action_ids: Sequence[tuple[int, ...]],
) -> range | None:
    """Positions of the action's tokens in a completion that names one of `actions` in its usual tokens, else None."""
    answer = parse_completion(_text(tokenizer, completion_ids)).answer
    if answer not in actions:
        return None
    wanted = action_ids[actions.index(answer)]
    for start in range(len(completion_ids) - len(wanted), 0, -1):
        if tuple(completion_ids[start : start + len(wanted)]) != wanted:
            continue
        if _text(tokenizer, completion_ids[:start]).endswith("<answer>"):
            return range(start, start + len(wanted))
    return None


def _text(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))
