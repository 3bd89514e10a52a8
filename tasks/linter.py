"""What is wrong with data and prompts, said before a step is paid for.

`train_script.py --check only` runs it alone. An error makes learning impossible or its score untrue; a warning names
what makes it slow.

Axes: P states of the expert, S states, A actions, K outcomes of an action, N state-action pairs.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from transformers import PreTrainedTokenizerBase

from llm_policy.chat import Messages, check_prompt, prompt_token_ids, reply_token_ids
from llm_policy.environments.frozen_lake import ACTIONS, FrozenLake, parse_state_text
from llm_policy.environments.mdp import OPTIMAL_TOLERANCE, optimal_actions
from llm_policy.environments.policy_table import best_actions
from llm_policy.errors import InputError
from llm_policy.processes import progress
from rewards import RewardShaping

ANSI_CODE = re.compile(r"\x1b\[[0-9;]*m")
# Rows of a lake, the agent shown by a letter or a colour; and an answer, whatever stands between.
CELL = r"(?:\x1b\[41m[SFHG]\x1b\[0m|[SFHGA])"
GRID_OR_ANSWER = re.compile(
    rf"(?P<grid>(?:^[ \t]*{CELL}(?: ?{CELL})+[ \t]*$\n?)+)"
    rf"|<answer>\s*(?P<action>(?i:{'|'.join(ACTIONS)}))\s*</answer>",
    re.MULTILINE,
)
FLAT = 0.01  # spread of a state's Q-values in units of the largest |Q|
NEAR_TIE = 0.06  # of the best reward: what min-max leaves between a step backwards and the best move beside a hole
WRONG_DYNAMICS = 0.02  # mean Bellman residual in units of the largest |Q|; learned Q-values stay below


@dataclass(frozen=True)
class Finding:
    """One line about the data: which rule, what was found and what to do about it, and in which file."""

    rule: str
    message: str
    is_error: bool = False
    source: str = "data"

    def __str__(self) -> str:
        return f"{'error' if self.is_error else 'warning'}: {self.rule}: {self.message}"


def lint(
    expert: pd.DataFrame,
    prompts: Sequence[Messages],
    tokenizer: PreTrainedTokenizerBase,
    shaping: RewardShaping,
    context_tokens: int,
    max_completion_tokens: int,
    replies: Iterable[str] = (),
) -> list[Finding]:
    """All findings, errors first.

    Args:
        expert: from `read_expert_csv`, one row per state.
        prompts: chat messages of each row, as the model will be given them.
        shaping: the reward in use.
        context_tokens: what the model can read; prompt and completion together must not be longer.
        replies: what the warm start teaches.
    """
    lake = expert["environment"].iloc[0] if isinstance(expert["environment"].iloc[0], FrozenLake) else None
    findings = [
        *same_prompts(expert["state_str"], prompts, tokenizer),
        *(_examples(expert, prompts, lake.is_slippery) if lake else ()),
        *prompt_tokens(prompts, tokenizer, context_tokens, max_completion_tokens),
        *cut_replies(replies, tokenizer, max_completion_tokens),
        *(_unsaid_dynamics(prompts, lake.is_slippery) if lake else ()),
        *(_lake_dynamics(expert, lake.is_slippery) if lake else _dynamics(expert)),
        *_states_without_rows(expert),
        *_weak_rewards(expert, shaping),
    ]
    return sorted(findings, key=lambda finding: not finding.is_error)


def same_prompts(
    names: Sequence[str], prompts: Sequence[Messages], tokenizer: PreTrainedTokenizerBase, what: str = "states"
) -> list[Finding]:
    """States that the model cannot tell apart at all, or by nothing but colour codes, through its chat template.

    Args:
        names: of the states, one per prompt.
    """
    texts = [str(tokenizer.apply_chat_template(messages, tokenize=False)) for messages in prompts]
    exact, plain = defaultdict(list), defaultdict(list)
    for name, text in zip(names, texts, strict=True):
        exact[text].append(name)
        plain[ANSI_CODE.sub("", text)].append(name)
    findings = []
    shared = [names for names in exact.values() if len(names) > 1]
    if shared:
        findings.append(
            Finding(
                f"one prompt, several {what}",
                f"{sum(map(len, shared))} {what} share {len(shared)} prompts, first {' and '.join(shared[0][:2])}; "
                "the prompt must tell them apart",
                is_error=True,
            )
        )
    coloured = [names for names in plain.values() if len(names) > 1]
    if coloured and not shared:
        findings.append(
            Finding(
                "prompts differ in colour codes only",
                f"{sum(map(len, coloured))} states, first {' and '.join(coloured[0][:2])}: a language model hardly "
                "reads ANSI escapes; use --observation coordinates",
                is_error=True,
            )
        )
    return findings


def _examples(expert: pd.DataFrame, prompts: Sequence[Messages], is_slippery: bool) -> list[Finding]:
    """Examples inside the prompts (a lake, then an answer) whose action is not optimal.

    By the expert's Q-values, or by exact ones for a lake that is not in the expert's table.
    """
    best = {
        (lake, state): optimal_actions(np.array(q))
        for lake, state, q in zip(expert["environment"], expert["state"], expert["q_values"], strict=True)
    }
    wrong: Counter[str] = Counter()
    unchecked: set[str] = set()
    for messages in prompts:
        text, shown = None, None  # the lake as it stands there, and the lake and state that it shows
        for match in GRID_OR_ANSWER.finditer("\n".join(message["content"] for message in messages)):
            if match["grid"]:
                text = re.sub(r"[ \t]", "", match["grid"]).strip()
                try:
                    grid, state = parse_state_text(text)
                    shown = FrozenLake(grid, is_slippery), state
                except InputError:  # no agent, or no lake
                    shown = None
                if shown and shown not in best:
                    best[shown] = best_actions(shown[0])[shown[1]]
            elif shown is None:
                unchecked |= {text} if text else set()
            elif not best[shown][ACTIONS.index(match["action"].upper())]:
                right = " or ".join(ACTIONS[a] for a in np.flatnonzero(best[shown]))
                where = f"state {shown[1]} of {shown[0]}"
                wrong[f"{match['action'].upper()} in {where}, where the expert goes {right}"] += 1
    findings = []
    if wrong:
        message = f"{len(wrong)} answers in the prompts are not optimal, correct them: {'; '.join(list(wrong)[:3])}"
        findings.append(Finding("wrong examples", message, is_error=True))
    if unchecked:
        message = (
            f"{len(unchecked)} lakes with an answer in the prompts, first {min(unchecked).splitlines()}: where the "
            "agent stands is not to be seen; write A in its cell"
        )
        findings.append(Finding("unreadable examples", message))
    return findings


def prompt_tokens(
    prompts: Sequence[Messages], tokenizer: PreTrainedTokenizerBase, context_tokens: int, max_completion_tokens: int
) -> list[Finding]:
    """Prompts that the model would see cut, and prompts whose BOS token is missing or there twice."""
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer("x")["input_ids"][:1] == [bos]
    refused, without_bos = [], 0  # no token ids are kept: those of many maps are gigabytes
    for messages in progress(prompts, "checking prompts"):
        ids = prompt_token_ids(messages, tokenizer)
        without_bos += ids[:1] != [bos]
        try:
            check_prompt(ids, tokenizer, context_tokens, max_completion_tokens)
        except InputError as error:
            refused.append((len(ids), str(error)))
    findings = []
    if refused:
        _, longest = max(refused, key=lambda found: found[0])
        findings.append(Finding("prompt tokens", f"{longest} ({len(refused)} prompts)", is_error=True))
    if adds_bos and without_bos:
        message = (
            f"{without_bos} prompts do not begin with {tokenizer.bos_token!r} (BOS), which this tokenizer puts before "
            "every text; its chat template has to write it"
        )
        findings.append(Finding("prompt tokens", message, is_error=True))
    return findings


def cut_replies(
    replies: Iterable[str], tokenizer: PreTrainedTokenizerBase, max_completion_tokens: int
) -> list[Finding]:
    """Replies that the warm start teaches and that no completion can hold: an error where most are such."""
    lengths = [len(reply_token_ids(reply, tokenizer)) for reply in replies]
    cut = sum(length > max_completion_tokens for length in lengths)
    if not cut:
        return []
    message = (
        f"the warm start teaches replies of up to {max(lengths)} tokens, and completions are cut at "
        f"{max_completion_tokens}, so that {cut} of {len(lengths)} cannot be well-formed; raise --max_completion_length"
    )
    return [Finding("cut replies", message, is_error=2 * cut > len(lengths))]


def bellman_residual(expert: pd.DataFrame, is_slippery: bool | None = None) -> tuple[float, float]:
    """How badly the expert's Q-values obey Q(s,a) = c r + gamma E[max Q(s',.)].

    c is what a reward of 1 is worth in the expert's units, 1 in Gymnasium's.

    Args:
        is_slippery: judge lakes under these dynamics; None takes the environments as they are.

    Returns:
        Mean |residual| over the largest |Q|, with the gamma in [0, 1] and the c that fit best, and that gamma. NaN
        where no state-action pair has all its successors among the expert's states.
    """
    known, predicted, rewards = [], [], []
    for environment, rows in expert.groupby("environment", sort=False):
        mdp = (environment if is_slippery is None else replace(environment, is_slippery=is_slippery)).mdp
        values_S = np.where(mdp.terminal_S, 0.0, np.nan)
        q_PA = np.array(rows["q_values"].tolist())
        values_S[rows["state"]] = q_PA.max(axis=1)
        states = rows["state"].to_numpy()
        continues_PAK = mdp.probabilities_SAK[states] > 0  # zero where the episode ends: nothing follows
        next_values_PAK = np.where(continues_PAK, values_S[mdp.next_states_SAK[states]], 0.0)
        next_values_PA = (mdp.probabilities_SAK[states] * next_values_PAK).sum(axis=2)
        usable_PA = np.isfinite(next_values_PA)
        known.append(q_PA[usable_PA])
        predicted.append(next_values_PA[usable_PA])
        rewards.append(mdp.rewards_SA[states][usable_PA])
    q_N, next_N, reward_N = map(np.concatenate, (known, predicted, rewards))
    if not len(q_N):
        return float("nan"), float("nan")
    gamma = float(np.clip(np.linalg.lstsq(np.stack([next_N, reward_N], 1), q_N)[0][0], 0.0, 1.0))
    goal = reward_N @ (q_N - gamma * next_N) / max(reward_N @ reward_N, 1e-12)
    residual = np.abs(goal * reward_N + gamma * next_N - q_N).mean() / max(np.abs(q_N).max(), 1e-12)
    return float(residual), gamma


def _unsaid_dynamics(prompts: Sequence[Messages], is_slippery: bool) -> list[Finding]:
    """Prompts for slippery ice that never mention it: the expert's actions then look like mistakes."""
    silent = sum("slip" not in " ".join(m["content"] for m in messages).lower() for messages in prompts)
    if not (is_slippery and silent):
        return []
    message = f"{silent} of {len(prompts)} prompts do not say that the ice is slippery; say it there"
    return [Finding("unsaid dynamics", message)]


def _dynamics(expert: pd.DataFrame) -> list[Finding]:
    """Q-values that do not fit the environment."""
    here, _ = bellman_residual(expert)
    if not here > WRONG_DYNAMICS:
        return []
    message = (
        f"mean Bellman residual {here:.3f} of the largest Q, 0 is exact; average more learners, or take "
        "--method value_iteration (python -m llm_policy.environments.expert_q). It tells nothing of Q-values that have "
        "other rewards than Gymnasium's"
    )
    return [Finding("rough Q-values", message)]


def _lake_dynamics(expert: pd.DataFrame, is_slippery: bool) -> list[Finding]:
    """Q-values that fit the other kind of ice better than the one that was asked for."""
    here, _ = bellman_residual(expert)
    there, _ = bellman_residual(expert, not is_slippery)
    if not (here > WRONG_DYNAMICS and there < here / 2):
        return _dynamics(expert)
    named, other = ("slippery", "not slippery") if is_slippery else ("not slippery", "slippery")
    message = (
        f"mean Bellman residual {here:.3f} on {named} ice, {there:.3f} on {other} ice: the CSV was made for "
        f"the latter; use --is_slippery {str(not is_slippery).lower()} or another CSV"
    )
    return [Finding("wrong dynamics", message, is_error=True)]


def _states_without_rows(expert: pd.DataFrame) -> list[Finding]:
    """States in which the policy is asked for an action, and of which the expert says nothing."""
    acting = {(environment, state) for environment in set(expert["environment"]) for state in environment.acting_states}
    missing = acting - set(zip(expert["environment"], expert["state"], strict=True))
    if not missing:
        return []
    first = min(environment.state_text(state) for environment, state in missing)
    message = (
        f"{len(missing)} of {len(acting)} states in which an agent acts, first {first}: nothing teaches what to do "
        "there; expert_q writes all with --rows states"
    )
    return [Finding("states without rows", message)]


def _weak_rewards(expert: pd.DataFrame, shaping: RewardShaping) -> list[Finding]:
    """States in which the choice hardly matters, by the Q-values or after the reward's normalisation."""
    q_PA = np.array(expert["q_values"].tolist())
    findings = []
    largest = np.abs(q_PA).max()
    if FLAT * largest <= OPTIMAL_TOLERANCE:
        message = (
            f"the largest is {largest:.1e}, and differences below {OPTIMAL_TOLERANCE:g} count as ties; scale them up"
        )
        findings.append(Finding("tiny Q-values", message, is_error=True))
    if shaping.cap_bonus and shaping.optimal_bonus:
        message = (
            f"--optimal_bonus {shaping.optimal_bonus:g} changes nothing under --cap_bonus true: an optimal action has 1"
        )
        findings.append(Finding("idle bonus", message))
    spread_P = np.ptp(q_PA, axis=1)
    equal = spread_P <= OPTIMAL_TOLERANCE  # the goal is out of reach there, or nothing can go wrong
    if equal.all():
        message = "every action is optimal in every state, so that nothing can be learnt; the CSV needs other Q-values"
        findings.append(Finding("equal Q-values", message, is_error=True))
    elif equal.any():
        message = (
            f"in {equal.sum()} of {len(equal)} states, first {expert['state_str'][int(equal.argmax())]}, every action "
            "is optimal; they teach nothing, and may be left out"
        )
        findings.append(Finding("equal Q-values", message))
    flat = (spread_P > OPTIMAL_TOLERANCE) & (spread_P <= FLAT * largest)
    if flat.any():
        findings.append(
            Finding(
                "flat rows",
                f"{flat.sum()} of {len(flat)} states, first {expert['state_str'][int(flat.argmax())]}: all Q-values "
                f"within {FLAT:.0%} of the largest; the reward is relative to the state and pays in full for them; "
                "leave out those that do not matter",
            )
        )
    rewards_PA = shaping.of_actions(q_PA)
    best_P1 = rewards_PA.max(axis=1, keepdims=True)
    near_PA = (rewards_PA >= (1 - NEAR_TIE) * best_P1) & ~optimal_actions(q_PA)
    if near_PA.any():
        states = near_PA.any(axis=1)
        findings.append(
            Finding(
                "near ties",
                f"in {states.sum()} of {len(states)} states, first {expert['state_str'][int(states.argmax())]}, an "
                f"action that is not optimal earns at least {1 - NEAR_TIE:.0%} of the best reward; raise "
                "--optimal_bonus with --cap_bonus false, or use --reward_shape rank",
            )
        )
    return findings
