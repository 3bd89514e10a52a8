"""The objectives beside `grpo`: all legal actions count at the answer, in place of the sampled one.

In each completion that names a legal action directly behind `<answer>`, in the prompt's spelling, the loss at the
action's tokens is, with c = action_entropy_coef,

    expected       - sum_a p(a) r(s, a) - c H(pi)
    natural        - 1/|A| sum_a [g(a) - mean g] log pi(a) - log sum_A p,     g(a) = r(s, a) - c log pi(a), constant
    cloning        - mean over the best actions of log p(a)
    distillation   - sum_a q(a) log p(a),                                     q = softmax(r(s, .) / c)

Here r is the reward of a well-formed completion that answers a, p the model's own probability of the action's string
after prompt and thought, A the legal actions, and pi = p / sum_A p. All other tokens keep the group advantage.

`expected` is what sampling the answer again and again would come to. Under rewards that pay nothing for what is no
action, its gradient is G / (G - 1) times the mean of GRPO's with groups of G and without reward scaling (GRPO's
baseline, the group's mean, contains the sample itself). Its weakness is a factor p(a): an action that is nearly gone
hardly comes back.

`natural` climbs the same E_pi[r] + c H(pi) along its natural gradient in the logits of pi (Kakade 2001), which has no
such factor: dz(a) = g(a) - mean g. At a uniform pi, where the warm start leaves it, both gradients are the same; both
end at pi = softmax(r / c). The second term brings probability back that leaks to answers which are no action.

With `action_baseline` both climb r(s, a) - w b(a) in place of r. Here b(a) is what the action earns in the mean over
the states that are sampled together, above the mean of all actions, and w falls linearly from `action_baseline` to
nothing over the training. At w = 1 every policy that does not read the state earns the same, so that only what tells
states apart pays. Without it the first gradients of all states agree on the action that is best in most of them, and a
policy can fall into it and stay. The mean is of these few states alone: what they have in common by chance would move
all states, too, and Adam takes a small common gradient for a large one. Under `natural` the other tokens are rewarded
so, too; under `expected` they keep the whole reward.

With `form_coef` one completion of each group that is well-formed and names an action teaches its form, too. At its
tokens t besides the action, as long as one goes wrong more often than SURE,

    form           - form_coef sum_t log [p_t / (1 - p_t)]

The gradient of log p_t has the factor 1 - p_t, and a token that goes wrong once in 500 samples is seldom sampled wrong:
neither makes it surer, but 24 such tokens make one completion in twenty malformed. The log-odds have no such factor;
this is the natural gradient again, of "this token or another one". It makes thoughts alike, because it raises whatever
was sampled: not for a task whose thoughts have work to do.

There `thought_coef` rehearses what the warm start taught, whatever was sampled. At the tokens t of the prompt's taught
thought, and of what ends the reply behind each of the actions, a mean over the groups,

    thought        - thought_coef sum_t log p_t

Such a thought follows from the map alone: no action is taught by it. An answer has to end behind each action: where
one of them alone was rehearsed, answers went on with what follows the action's name in the thought (LOG.md).

`cloning` (behaviour cloning) and `distillation` are supervision, for comparison. Nothing is sampled: the reply that the
warm start teaches, with a best action, stands in place of each completion, and its other tokens have advantage 1. With
loss_type luspo that is plain fine-tuning on thought and label; with TRL's dapo a token of the thought weighs less than
the label, by the number of tokens in a reply. `distillation` has the optimum of `expected` and `natural`.

Under `expected` and `natural` a readable action in a malformed completion counts like a well-formed one, because the
other tokens teach the form. A group whose rewards agree has a gradient as long as one of its completions names an
action. The KL term of `beta`, where there is one, stays sampled. The comparison with GRPO is one of sums over tokens
(loss_type luspo): grpo and dapo divide a sampled term by the number of tokens, this one is divided by the number of
completions only. It needs token-level ratios (importance_sampling_level): a ratio of the whole sequence would carry the
sampled term back to the answer.

All p are at the temperature that completions are sampled with. With another one than 1 the policy that is judged,
which samples at 1, ends at softmax(temperature * r / c).

Axes: B completions of a batch, T tokens, N completions that name an action, A legal actions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from transformers import PreTrainedTokenizerBase

from llm_policy.completions import parse_completion
from llm_policy.errors import InputError
from llm_policy.grpo.packing import Branch

SUPERVISED = ("cloning", "distillation")
SURE = 1e-4  # a token of the form that goes wrong more seldom is left alone
REWARD_ROUNDING = 1e-6  # TRL's rewards are float32: differences below this are none


@dataclass(frozen=True)
class NamedAction:
    """Where a completion names its action: completion `completion`, tokens `start` up to `stop`; and which one."""

    completion: int
    start: int
    stop: int
    action: int
    is_well_formed: bool = True


class ExpectedObjective:
    """The term at the answer, for one list of legal actions and one tokenizer.

    Attributes:
        actions: what may stand in the answer, in the order of the rewards' columns.
        token_ids: of each action, one or several.
        entropy_coef: c, the weight of the entropy (nats) of pi.
        name: a key of `TERMS`.
        form_coef: weight of the form's log-odds.
        thought_coef: weight of the taught thought's log-likelihood.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        actions: Sequence[str],
        entropy_coef: float,
        name: str = "expected",
        form_coef: float = 0.0,
        thought_coef: float = 0.0,
    ) -> None:
        self.tokenizer = tokenizer
        self.actions = list(actions)
        self.token_ids = action_token_ids(tokenizer, actions)
        self.entropy_coef = entropy_coef
        self.name = name
        self.form_coef = form_coef
        self.thought_coef = thought_coef

    def named_actions(self, completion_ids_BT: torch.Tensor, completion_mask_BT: torch.Tensor) -> list[NamedAction]:
        """One entry for each completion that names a legal action in its usual tokens."""
        found = []
        for i, (ids, mask) in enumerate(zip(completion_ids_BT.tolist(), completion_mask_BT.tolist(), strict=True)):
            ids = ids[: sum(mask)]
            parsed = parse_completion(_text(self.tokenizer, ids))
            if parsed.answer not in self.actions:
                continue
            action = self.actions.index(parsed.answer)
            tokens = self.token_ids[action]
            start = answer_start(self.tokenizer, ids, tokens)
            if start is not None:
                found.append(NamedAction(i, start, start + len(tokens), action, parsed.is_well_formed))
        return found

    def exemplars(self, named: Sequence[NamedAction], group: int) -> list[NamedAction]:
        """The first well-formed completion of each group of `group`."""
        first: dict[int, NamedAction] = {}
        for n in named:
            if n.is_well_formed:
                first.setdefault(n.completion // group, n)
        return list(first.values())

    def branches(self, named: Sequence[NamedAction]) -> list[Branch]:
        """What the packed pass has to score besides: every legal action at each of these places."""
        return [Branch(n.completion, n.start, token_ids) for n in named for token_ids in self.token_ids]

    def labelled(self, replies: Sequence[Sequence[int]], rewards_BA: Sequence[Sequence[float]]) -> list[list[int]]:
        """Taught replies with a best action in the place of theirs: supervision ends an answer behind its label.

        Where several are best, equal replies take them in turn.

        Args:
            replies: token ids of each taught reply (B lists).
        """
        length = max(map(len, replies))
        ids_BT = torch.tensor([[*reply, *[0] * (length - len(reply))] for reply in replies])
        mask_BT = torch.tensor([[1] * len(reply) + [0] * (length - len(reply)) for reply in replies])
        found = list(map(list, replies))
        for n in self.named_actions(ids_BT, mask_BT):
            rewards_A = list(rewards_BA[n.completion])
            best = [a for a, reward in enumerate(rewards_A) if reward >= max(rewards_A) - REWARD_ROUNDING]
            label = self.token_ids[best[n.completion % len(best)]]
            reply = found[n.completion]
            found[n.completion] = [*reply[: n.start], *label, *reply[n.stop :]]
        return found

    def rehearsed(
        self, taught: Sequence[NamedAction], replies: Sequence[Sequence[int]]
    ) -> tuple[list[NamedAction], list[Branch]]:
        """Taught replies with each legal action in the place of theirs: what is left out of each, what is scored.

        What they have in common, all before the action, is left out of all but the first.

        Args:
            replies: token ids of each taught reply.
        """
        places, branches = [], []
        for n, reply in zip(taught, replies, strict=True):
            for action, token_ids in enumerate(self.token_ids):
                places.append(NamedAction(n.completion, 0 if action else n.start, n.start + len(token_ids), action))
                branches.append(Branch(n.completion, 0, (*reply[: n.start], *token_ids, *reply[n.stop :])))
        return places, branches

    def loss(
        self,
        branch_log_probabilities: Sequence[torch.Tensor],
        rewards_BA: torch.Tensor,
        named: Sequence[NamedAction],
        baseline_A: torch.Tensor | float = 0.0,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss, a mean over the B completions of the batch, and sums over the N of what is logged.

        Args:
            branch_log_probabilities: of the tokens of `branches(named)`, in that order.
            rewards_BA: what a well-formed completion earns with each action, row by row of the batch.
            baseline_A: w b(a), taken off what is climbed; what is logged stays whole.
        """
        log_probabilities_NA = rewards_BA.new_empty(0, len(self.token_ids))
        if named:
            log_probabilities_NA = torch.stack([b.sum() for b in branch_log_probabilities]).view(len(named), -1)
        probabilities_NA = log_probabilities_NA.exp()
        rewards_NA = rewards_BA[[n.completion for n in named]]
        expected_N = (probabilities_NA * rewards_NA).sum(1)
        entropy_N = policy_entropy(log_probabilities_NA)
        total = TERMS[self.name](log_probabilities_NA, rewards_NA - baseline_A, self.entropy_coef).sum()
        sums = {
            "action/expected_reward": expected_N.sum().detach(),
            "action/entropy": entropy_N.sum().detach(),
            "action/legal_probability": probabilities_NA.sum().detach(),
        }
        return -total / len(rewards_BA), sums

    def form_loss(
        self,
        log_probabilities: Sequence[torch.Tensor],
        exemplars: Sequence[NamedAction],
        groups: int,
        device: torch.device | str = "cpu",
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The form's loss, a mean over the groups, and the sum over the exemplars of how often their form goes wrong.

        Args:
            log_probabilities: of all tokens of each exemplar.
            groups: of the batch, also those without an exemplar; one that is cut counts on both sides.
            device: of the loss, where no exemplar says it: processes with a GPU each add theirs up there.
        """
        log_p_N = _besides_actions(log_probabilities, exemplars, device)
        failure_N = -torch.expm1(log_p_N.detach())
        is_unsure_N = failure_N > SURE
        log_odds = (log_p_N / failure_N.clamp(min=SURE))[is_unsure_N].sum()  # has their gradient, 1 / (1 - p) dlog p
        return -self.form_coef * log_odds / max(1, groups), {"form/failure_probability": failure_N.sum()}

    def thought_loss(
        self,
        log_probabilities: Sequence[torch.Tensor],
        taught: Sequence[NamedAction],
        groups: int,
        device: torch.device | str = "cpu",
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of what `rehearsed` gives, and the sum of its log-probabilities (nats); as in `form_loss`."""
        log_p = _besides_actions(log_probabilities, taught, device).sum()
        return -self.thought_coef * log_p / max(1, groups), {"thought/log_probability": log_p.detach()}


# The terms: log-probabilities of the actions' strings (N, A), rewards (N, A), c -> what is to be raised, (N,) ---------


def expected_term(log_probabilities_NA: torch.Tensor, rewards_NA: torch.Tensor, c: float) -> torch.Tensor:
    return (log_probabilities_NA.exp() * rewards_NA).sum(1) + c * policy_entropy(log_probabilities_NA)


def natural_term(log_probabilities_NA: torch.Tensor, rewards_NA: torch.Tensor, c: float) -> torch.Tensor:
    log_policy_NA = log_probabilities_NA.log_softmax(dim=1)
    gains_NA = (rewards_NA - c * log_policy_NA).detach()
    climb_N = ((gains_NA - gains_NA.mean(1, keepdim=True)) * log_policy_NA).mean(1)
    return climb_N + log_probabilities_NA.logsumexp(1)


def cloning_term(log_probabilities_NA: torch.Tensor, rewards_NA: torch.Tensor, c: float) -> torch.Tensor:
    is_best_NA = rewards_NA >= rewards_NA.amax(1, keepdim=True) - REWARD_ROUNDING
    return (log_probabilities_NA * is_best_NA).sum(1) / is_best_NA.sum(1)


def distillation_term(log_probabilities_NA: torch.Tensor, rewards_NA: torch.Tensor, c: float) -> torch.Tensor:
    return ((rewards_NA / c).softmax(1) * log_probabilities_NA).sum(1)


TERMS: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "natural": natural_term,
    "expected": expected_term,
    "cloning": cloning_term,
    "distillation": distillation_term,
}


def policy_entropy(log_probabilities_NA: torch.Tensor) -> torch.Tensor:
    """Entropy (nats) of pi, (N,)."""
    log_policy_NA = log_probabilities_NA.log_softmax(dim=1)
    return -(log_policy_NA.exp() * log_policy_NA).sum(1)


def luck_of_actions(
    rewards_BA: torch.Tensor, named: Sequence[NamedAction], completion_ids_BT: torch.Tensor, group: int
) -> torch.Tensor:
    """What each completion's sampled action earned above the state's mean, (B,); 0 in groups of several thoughts.

    At the answer all actions count already. Where all completions of a group that name an action think the same, the
    action that was drawn says nothing about the other tokens: left in their advantage, a malformed completion with a
    lucky action would be preferred to a well-formed one. Where the thoughts differ, the action may be their merit.
    """
    luck_B = rewards_BA.new_zeros(len(rewards_BA))
    thoughts: dict[int, set[tuple[int, ...]]] = {}
    for n in named:
        thoughts.setdefault(n.completion // group, set()).add(
            tuple(completion_ids_BT[n.completion, : n.start].tolist())
        )
    for n in named:
        if len(thoughts[n.completion // group]) == 1:
            rewards_A = rewards_BA[n.completion]
            luck_B[n.completion] = rewards_A[n.action] - rewards_A.mean()
    return luck_B


def without_answers(
    advantages_B: torch.Tensor, completion_ids_BT: torch.Tensor, named: Sequence[NamedAction]
) -> torch.Tensor:
    """Advantages as (B, T), zero at the actions' tokens: there the expected term takes over."""
    advantages_BT = advantages_B.unsqueeze(1).repeat(1, completion_ids_BT.size(1))
    for n in named:
        advantages_BT[n.completion, n.start : n.stop] = 0.0
    return advantages_BT


def action_token_ids(tokenizer: PreTrainedTokenizerBase, actions: Sequence[str]) -> list[tuple[int, ...]]:
    """Token ids of each action's name as it stands between `<answer>` and `</answer>`, one or several per name.

    `InputError` where a name begins with another one, whose probability would contain that of the longer one.
    """
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
    for (short, of_short), (long, of_long) in permutations(zip(actions, token_ids, strict=True), 2):
        if of_long[: len(of_short)] == of_short:
            raise InputError(
                f"actions {short!r} and {long!r}: one begins with the other; rename one, or use --objective grpo"
            )
    return token_ids


def answer_start(
    tokenizer: PreTrainedTokenizerBase, completion_ids: list[int], action_ids: tuple[int, ...]
) -> int | None:
    """Where the last `<answer>` of a completion is followed by an action in its usual tokens; None where it is not."""
    for start in range(len(completion_ids) - len(action_ids), 0, -1):
        if tuple(completion_ids[start : start + len(action_ids)]) != action_ids:
            continue
        if _text(tokenizer, completion_ids[:start]).endswith("<answer>"):
            return start
    return None


def _besides_actions(
    log_probabilities: Sequence[torch.Tensor], named: Sequence[NamedAction], device: torch.device | str
) -> torch.Tensor:
    """Of the tokens of these completions those besides the action, one after the other, (N,)."""
    pairs = zip(log_probabilities, named, strict=True)
    pieces = [piece_T for log_p_T, n in pairs for piece_T in (log_p_T[: n.start], log_p_T[n.stop :])]
    return torch.cat(pieces or [torch.zeros(0, device=device)])


def _text(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))
