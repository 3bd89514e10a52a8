"""Toy-text environments as arrays: exact Q-values, exact policy evaluation, with and without a step limit.

Axes: M maps (optional, always the first), S states, A actions, K outcomes of an action. Every function takes one MDP or
a stack of equally sized ones, and loops over neither states nor maps. Nothing here is sampled.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from llm_policy.errors import InputError

MOST_STATES = 4096  # values without a limit come from a dense matrix of states x states
LARGEST_REWARD = 1e100  # beyond it means and differences overflow
# One chunk of maps holds about this many outcomes: its arrays then stay in a core's cache from sweep to sweep.
CHUNK_OUTCOMES = 60_000
FIRST_SWEEPS = 64
# Rounding of probabilities such as 1/3 must not look like a chance that the episode ends.
PROBABILITY_ROUNDING = 1e-12

AGREEMENT_GAMMA = 0.99  # without a discount a detour costs nothing and many actions tie with the best
OPTIMAL_PERCENT = 99.95  # of the optimal return: from here on a policy counts as optimal
# Actions whose Q-values are this close to the best are all optimal: exact ones tie only up to rounding, and those of a
# CSV are rounded to some decimals.
OPTIMAL_TOLERANCE = 1e-6


@dataclass(frozen=True)
class MDP:
    """A finite Markov decision process in sparse form: the K possible successors of each state and action.

    next_states_SAK: int, the state after outcome k.
    probabilities_SAK: float, the probability of outcome k *and that the episode continues*. The mass missing to 1 ends
        the episode: an outcome with `done=True` in Gymnasium's `P` has 0 here, and its reward counts in `rewards_SA`.
    rewards_SA: float, the expected reward of the step.
    start_S: float, the distribution of the first state.
    terminal_S: bool, states that are entered with `done=True`.
    All arrays may have one more axis in front, M: a stack of maps of one size.
    """

    next_states_SAK: np.ndarray
    probabilities_SAK: np.ndarray
    rewards_SA: np.ndarray
    start_S: np.ndarray
    terminal_S: np.ndarray

    @property
    def transitions_SAS(self) -> np.ndarray:
        """Dense probabilities of continuing from s under a to s', shape ([M,] S, A, S); rows sum to at most 1."""
        states = self.rewards_SA.shape[-2]
        rows = np.arange(self.rewards_SA.size).reshape(self.rewards_SA.shape)[..., None]
        dense = np.bincount(
            (rows * states + self.next_states_SAK).ravel(),
            weights=self.probabilities_SAK.ravel(),
            minlength=self.rewards_SA.size * states,
        )
        return dense.reshape(*self.rewards_SA.shape, states)


def mdp_from_env(env) -> MDP:
    """The MDP of a Gymnasium environment with a table `P[state][action] = [(probability, next, reward, done), ...]`.

    FrozenLake, CliffWalking and Taxi have one. The table is taken as it is: a step limit is not part of it.
    InputError if the environment has no `P` or no known start distribution.
    """
    name = getattr(getattr(env, "spec", None), "id", None) or type(env).__name__
    base_env = getattr(env, "unwrapped", env)
    table = getattr(base_env, "P", None)
    if table is None:
        raise InputError(f"environment {name}: has no transition table `P`, expected FrozenLake, CliffWalking or Taxi")
    start_S = getattr(base_env, "initial_state_distrib", None)
    if start_S is None:
        raise InputError(f"environment {name}: has a table `P` but no start distribution `initial_state_distrib`")

    table = _checked_table(name, table)
    states, actions = len(table), len(table[0])
    outcomes = max(len(table[state][action]) for state in range(states) for action in range(actions))
    next_states_SAK = np.tile(np.arange(states)[:, None, None], (1, actions, outcomes))
    probabilities_SAK = np.zeros((states, actions, outcomes))
    rewards_SA = np.zeros((states, actions))
    terminal_S = np.zeros(states, dtype=bool)
    for state in range(states):
        for action in range(actions):
            for outcome, (probability, next_state, reward, done) in enumerate(table[state][action]):
                next_states_SAK[state, action, outcome] = next_state
                probabilities_SAK[state, action, outcome] = 0.0 if done else probability
                rewards_SA[state, action] += probability * reward
                terminal_S[next_state] |= bool(done)
    start_S = np.array(start_S, dtype=np.float64)
    sums = {"start distribution": start_S.sum()}
    for state, action in np.ndindex(states, actions):
        sums[f"table, state {state}, action {action},"] = sum(p for p, *_ in table[state][action])
    for what, total in sums.items():
        if not abs(total - 1.0) < 1e-6:
            raise InputError(f"environment {name}: its {what} has probabilities that sum to {total:g}, expected 1")
    if not (probabilities_SAK >= 0).all():
        raise InputError(f"environment {name}: its table has the probability {probabilities_SAK.min():g}")
    if not (np.abs(rewards_SA) <= LARGEST_REWARD).all():
        raise InputError(f"environment {name}: its table has a reward that is no number, or above {LARGEST_REWARD:g}")
    return MDP(next_states_SAK, probabilities_SAK, rewards_SA, start_S, terminal_S)


def _checked_table(name: str, table) -> list[list[list[tuple]]]:
    """`P` of an environment, by state, action and outcome; `InputError` for what leads out of it, or is none."""
    try:
        if len(table) > MOST_STATES:
            raise InputError(
                f"environment {name}: {len(table)} states, at most {MOST_STATES}: solving takes their square"
            )
        states, actions = range(len(table)), range(len(table[0]))
        checked = [[[(p, n, r, done) for p, n, r, done in table[s][a]] for a in actions] for s in states]
        found = ((s, a, n) for s in states for a in actions for _, n, _, _ in checked[s][a] if not 0 <= n < len(states))
        outside = next(found, None)
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"environment {name}: its table is no P[state][action] = [(probability, next state, reward, done), ...], "
            f"states and actions counted from 0 ({error!r})"
        ) from error
    if outside:
        state, action, leads_to = outside
        raise InputError(
            f"environment {name}: state {state}, action {action}: {leads_to} is no state, expected 0 to {states[-1]}"
        )
    return checked


def optimal_q(mdp: MDP, gamma: float = 1.0, tolerance: float = 1e-10, max_sweeps: int = 100_000) -> np.ndarray:
    """The optimal Q-values without a step limit, shape ([M,] S, A), each within `tolerance` of the exact one.

    Value iteration from 0, then exact policy iteration from its greedy policy (Puterman 1994, sections 6.3-6.4), in
    chunks of maps; a finished map leaves its chunk. Sweeps alone would not do: at gamma 1 a lake on which waiting is
    safe needs 10^5 of them, and a small residual says little there. So the stop is a policy whose value comes from a
    linear solve and which no action improves by more than `tolerance` over the steps that an episode lasts.

    At gamma 1 all actions that lose no chance tie, also those that stay for ever, so that the greedy policy may never
    arrive (8x8 lake: success 0). Use `optimal_policy` there, or gamma < 1.
    InputError if gamma is outside [0, 1] or the values do not settle within `max_sweeps` (reward for ever at gamma 1).
    """
    _check_gamma(gamma)
    stack = _stacked(mdp)
    q_MSA = np.empty(stack.rewards_SA.shape)
    for maps in _chunks(stack):
        active = np.arange(maps.start, maps.stop)
        values_MS = np.zeros(stack.start_S[maps].shape)
        # Undiscounted, a loop that costs nothing hides an end that is worse than it until the sweeps come from there
        sweeps, burst = 0, FIRST_SWEEPS if gamma < 1 else max(FIRST_SWEEPS, stack.rewards_SA.shape[-2])
        while len(active):
            burst = min(burst, max_sweeps - sweeps)
            if burst <= 0:
                raise InputError(
                    f"optimal_q: map {active[0]} has not converged to {tolerance:g} in max_sweeps={max_sweeps} sweeps "
                    f"at gamma={gamma:g}; expected a reward that ends, gamma < 1 or more sweeps"
                )
            part = _select(stack, active)
            values_MS = _sweep(part, values_MS, gamma, burst)
            first_q_MSA = _backup(part, values_MS, gamma)
            solved_M, q_MSA[active] = _policy_iteration(part, first_q_MSA, gamma, tolerance)
            active, values_MS = active[~solved_M], values_MS[~solved_M]
            sweeps, burst = sweeps + burst, 2 * burst
    return q_MSA.reshape(mdp.rewards_SA.shape)


def optimal_policy(mdp: MDP) -> np.ndarray:
    """A one-hot policy ([M,] S, A) that earns the whole optimum without a step limit, and soon.

    At gamma 1 every action that loses no chance is optimal, also one that waits for ever, so that `greedy_policy` may
    never arrive. Here a discount chooses among these actions alone.
    """
    best_SA = optimal_actions(optimal_q(mdp))
    worse_than_anything = -1e3 * max(1.0, float(np.abs(mdp.rewards_SA).max())) * mdp.rewards_SA.shape[-2]
    restricted = replace(
        mdp,
        probabilities_SAK=np.where(best_SA[..., None], mdp.probabilities_SAK, 0.0),
        rewards_SA=np.where(best_SA, mdp.rewards_SA, worse_than_anything),
    )
    return greedy_policy(optimal_q(restricted, AGREEMENT_GAMMA))


def policy_values(mdp: MDP, policy_SA: np.ndarray, gamma: float = 1.0, horizon_steps: int | None = None) -> np.ndarray:
    """The expected return of a policy from each state, shape ([M,] S), exact.

    Without `horizon_steps` by elimination of states, which is exact however rarely the policy leaves a loop. At gamma 1
    it covers the states from which the policy can end the episode; elsewhere the value is 0 if no reward ever comes,
    and -inf (inf) if a negative (positive) one keeps coming. With `horizon_steps`, by recursion over that many steps.
    InputError if the policy's shape or the horizon is wrong.
    """
    _check_gamma(gamma)
    stack, policy_MSA = _stacked(mdp), _stacked_policy(mdp, policy_SA)
    if horizon_steps is not None:
        values_MS = np.zeros(stack.start_S.shape)
        for _ in range(_checked_horizon(horizon_steps)):
            values_MS = np.einsum("msa,msa->ms", policy_MSA, _backup(stack, values_MS, gamma))
    else:
        values_MS = np.empty(stack.start_S.shape)
        for maps in _chunks(stack):
            part, policy = _select(stack, maps), policy_MSA[maps]
            next_states_MSK = part.next_states_SAK.reshape(*policy.shape[:2], -1)
            probabilities_MSK = gamma * (part.probabilities_SAK * policy[..., None]).reshape(next_states_MSK.shape)
            exits_MSA = 1.0 - gamma * part.probabilities_SAK.sum(axis=3)
            exits_MSA[exits_MSA < PROBABILITY_ROUNDING] = 0.0
            exits_MS, rewards_MS = (np.einsum("msa,msa->ms", policy, what) for what in (exits_MSA, part.rewards_SA))
            values_MS[maps] = _eliminate(next_states_MSK, probabilities_MSK, exits_MS, rewards_MS)
    return values_MS.reshape(mdp.start_S.shape)


def policy_return(
    mdp: MDP, policy_SA: np.ndarray, gamma: float = 1.0, horizon_steps: int | None = None
) -> float | np.ndarray:
    """The expected return of a policy from the start: a float, or shape (M,).

    On a lake at gamma 1 this is the success probability.
    """
    return _from_start(mdp, policy_values(mdp, policy_SA, gamma, horizon_steps))


def optimal_return(mdp: MDP, horizon_steps: int | None = None) -> float | np.ndarray:
    """The best possible undiscounted return from the start: a float, or shape (M,).

    With `horizon_steps` the best policy may look at the clock; no policy table of states alone can beat it.
    """
    if horizon_steps is None:
        return _from_start(mdp, optimal_q(mdp).max(axis=-1))
    stack = _stacked(mdp)
    values_MS = _sweep(stack, np.zeros(stack.start_S.shape), 1.0, _checked_horizon(horizon_steps))
    return _from_start(mdp, values_MS.reshape(mdp.start_S.shape))


def greedy_policy(q_SA: np.ndarray) -> np.ndarray:
    """One-hot policy ([M,] S, A) of the first optimal action."""
    return np.eye(q_SA.shape[-1])[optimal_actions(q_SA).argmax(axis=-1)]


def optimal_actions(q_SA: np.ndarray) -> np.ndarray:
    """Which actions are maximal within `OPTIMAL_TOLERANCE`: bool, shape of `q_SA`."""
    q_SA = np.asarray(q_SA)
    return q_SA >= q_SA.max(axis=-1, keepdims=True) - OPTIMAL_TOLERANCE


def _policy_iteration(mdp: MDP, q_MSA: np.ndarray, gamma: float, tolerance: float) -> tuple[np.ndarray, np.ndarray]:
    """From the greedy policy of q to one that no action improves: (which maps got there, Q-values).

    A state changes its action only for a strictly better one, so a policy that ends the episode stays one that does,
    ties or not. A policy that pays for ever (value -inf) is given back unsolved: it takes more sweeps.
    """
    actions_MS = q_MSA.argmax(axis=-1)
    q_MSA = q_MSA.copy()
    solved_M = np.zeros(len(q_MSA), dtype=bool)
    active = np.arange(len(q_MSA))
    part = mdp
    # Ten rounds are plenty on a lake; if these are not enough, more sweeps make a better beginning.
    for _ in range(30):
        if not len(active):
            break
        chosen_MS1 = actions_MS[active][..., None]
        values_MS, steps_M = _solve_chain(
            np.take_along_axis(part.next_states_SAK, chosen_MS1[..., None], axis=2)[:, :, 0],
            np.take_along_axis(part.probabilities_SAK, chosen_MS1[..., None], axis=2)[:, :, 0],
            np.take_along_axis(part.rewards_SA, chosen_MS1, axis=2)[:, :, 0],
            gamma,
        )
        finite_M = np.isfinite(values_MS).all(axis=1)
        active, values_MS, steps_M = active[finite_M], values_MS[finite_M], steps_M[finite_M]
        part = _select(part, finite_M)
        q_MSA[active] = backup_MSA = _backup(part, values_MS, gamma)
        rounding_M = 8 * np.finfo(float).eps * np.maximum(1, abs(backup_MSA).max(axis=(1, 2), initial=0))
        margin_M = np.maximum(tolerance / steps_M, rounding_M)
        better_MS = backup_MSA.max(axis=-1) > values_MS + margin_M[:, None]
        actions_MS[active] = np.where(better_MS, backup_MSA.argmax(axis=-1), actions_MS[active])
        improved_M = better_MS.any(axis=1)
        solved_M[active[~improved_M]] = True
        active, part = active[improved_M], _select(part, improved_M)
    return solved_M, q_MSA


def _solve_chain(
    next_states_MSK: np.ndarray, probabilities_MSK: np.ndarray, rewards_MS: np.ndarray, gamma: float
) -> tuple[np.ndarray, np.ndarray]:
    """Values of Markov chains with rewards, (M, S), and the longest expected (discounted) duration of each, (M,)."""
    flow_MSK = gamma * probabilities_MSK
    exits_MS = flow_MSK.sum(axis=2) < 1 - PROBABILITY_ROUNDING
    ends_MS, values_in_loops_MS = _endings(next_states_MSK, flow_MSK, exits_MS, rewards_MS)
    flow_MSS = _dense(next_states_MSK, np.where(ends_MS[..., None], flow_MSK, 0.0))
    right_MS2 = np.stack([np.where(ends_MS, rewards_MS, 0.0), ends_MS.astype(float)], axis=2)
    solution_MS2 = np.linalg.solve(np.eye(rewards_MS.shape[1]) - flow_MSS, right_MS2)
    values_MS = np.where(np.isinf(values_in_loops_MS), values_in_loops_MS, solution_MS2[..., 0])
    return values_MS, np.maximum(1.0, solution_MS2[..., 1].max(axis=1))


def _eliminate(
    next_states_MSK: np.ndarray, probabilities_MSK: np.ndarray, exits_MS: np.ndarray, rewards_MS: np.ndarray
) -> np.ndarray:
    """Values of Markov chains with rewards, (M, S): states leave one by one, and those before them take over.

    A linear solve takes what stays from 1, and knows nothing any more of a loop that is left once in 1e16 steps. Here
    nothing is subtracted (Grassmann, Taksar and Heyman 1985).

    Args:
        exits_MS: the probability that the episode ends here; with the row of `probabilities_MSK` it sums to 1.
    """
    ends_MS, values_in_loops_MS = _endings(next_states_MSK, probabilities_MSK, exits_MS > 0, rewards_MS)
    flow_MSS = _dense(next_states_MSK, np.where(ends_MS[..., None], probabilities_MSK, 0.0))
    exits_MS, rewards_MS = np.where(ends_MS, exits_MS, 1.0), np.where(ends_MS, rewards_MS, 0.0)
    for state in reversed(range(rewards_MS.shape[1])):
        leaving_M1 = (flow_MSS[:, state, :state].sum(axis=1) + exits_MS[:, state])[:, None]
        leaving_M1 = np.maximum(leaving_M1, np.finfo(float).tiny)
        flow_MSS[:, state, :state] /= leaving_M1
        exits_MS[:, state] /= leaving_M1[:, 0]
        rewards_MS[:, state] /= leaving_M1[:, 0]
        arriving_MS = flow_MSS[:, :state, state]
        flow_MSS[:, :state, :state] += arriving_MS[:, :, None] * flow_MSS[:, None, state, :state]
        exits_MS[:, :state] += arriving_MS * exits_MS[:, None, state]
        rewards_MS[:, :state] += arriving_MS * rewards_MS[:, None, state]
    values_MS = rewards_MS
    for state in range(rewards_MS.shape[1]):
        values_MS[:, state] += np.einsum("ms,ms->m", flow_MSS[:, state, :state], values_MS[:, :state])
    return np.where(np.isinf(values_in_loops_MS), values_in_loops_MS, values_MS)


def _endings(
    next_states_MSK: np.ndarray, probabilities_MSK: np.ndarray, exits_MS: np.ndarray, rewards_MS: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(states from which the episode can end, (M, S); what others are worth if it is endless, else 0)."""
    values_in_loops_MS = np.zeros(rewards_MS.shape)
    if exits_MS.all():  # below gamma 1
        return exits_MS, values_in_loops_MS
    index_MSK, moves_MSK = _flat_successors(next_states_MSK), probabilities_MSK > 0
    ends_MS = _can_reach(exits_MS, index_MSK, moves_MSK)
    quiet_MS = ~ends_MS & ~_can_reach(rewards_MS != 0, index_MSK, moves_MSK)  # nothing is earned any more
    ends_MS = _can_reach(ends_MS | quiet_MS, index_MSK, moves_MSK)
    for sign in (1, -1):
        if (sign * rewards_MS[~ends_MS] > 0).any():
            pays_MS = _can_reach(~ends_MS & (sign * rewards_MS > 0), index_MSK, moves_MSK)
            values_in_loops_MS[pays_MS] = sign * np.inf
    return ends_MS & ~quiet_MS, values_in_loops_MS


def _dense(next_states_MSK: np.ndarray, probabilities_MSK: np.ndarray) -> np.ndarray:
    """Probabilities of going from one state to another, (M, S, S)."""
    maps, states = next_states_MSK.shape[:2]
    cells_MSK = np.arange(maps * states).reshape(maps, states, 1) * states + next_states_MSK
    flow = np.bincount(cells_MSK.ravel(), probabilities_MSK.ravel(), maps * states * states)
    return flow.reshape(maps, states, states)


def _can_reach(target_MS: np.ndarray, index_MSK: np.ndarray, moves_MSK: np.ndarray) -> np.ndarray:
    """States from which the target states are reached with a probability above 0 (themselves included)."""
    index_KMS, moves_KMS = (np.ascontiguousarray(np.moveaxis(array, 2, 0)) for array in (index_MSK, moves_MSK))
    while True:
        reached_MS = target_MS | (target_MS.ravel()[index_KMS] & moves_KMS).any(axis=0)
        if (reached_MS == target_MS).all():
            return reached_MS
        target_MS = reached_MS


def _sweep(mdp: MDP, values_MS: np.ndarray, gamma: float, sweeps: int) -> np.ndarray:
    """That many Bellman optimality backups, chunk by chunk. The axes are turned to (K, A, maps x states): numpy's
    inner loops then run over thousands of states instead of three outcomes."""
    result_MS = np.empty(values_MS.shape)
    for maps in _chunks(mdp):
        part, states = _select(mdp, maps), values_MS.shape[1]
        index_KAN = np.ascontiguousarray(np.moveaxis(_flat_successors(part.next_states_SAK), (3, 2), (0, 1)))
        weights_KAN = np.ascontiguousarray(gamma * np.moveaxis(part.probabilities_SAK, (3, 2), (0, 1)))
        rewards_AN = np.ascontiguousarray(np.moveaxis(part.rewards_SA, 2, 0))
        values = values_MS[maps].copy()
        next_values_AN, q_AN = np.empty(rewards_AN.shape), np.empty(rewards_AN.shape)
        for _ in range(sweeps):
            q_AN[:] = rewards_AN
            for index_AN, weights_AN in zip(index_KAN, weights_KAN, strict=True):
                # mode="clip" only skips the bounds check; successors are always in range
                np.take(values, index_AN, out=next_values_AN, mode="clip")
                next_values_AN *= weights_AN
                q_AN += next_values_AN
            np.max(q_AN, axis=0, out=values)
        result_MS[maps] = values.reshape(-1, states)
    return result_MS


def _backup(mdp: MDP, values_MS: np.ndarray, gamma: float) -> np.ndarray:
    """One-step look-ahead, shape (M, S, A)."""
    next_values_MSAK = values_MS.ravel()[_flat_successors(mdp.next_states_SAK)]
    return mdp.rewards_SA + gamma * np.einsum("msak,msak->msa", mdp.probabilities_SAK, next_values_MSAK)


def _flat_successors(next_states_MS: np.ndarray) -> np.ndarray:
    """Successor states as positions in an array over maps x states."""
    maps, states = next_states_MS.shape[:2]
    return next_states_MS + (np.arange(maps) * states).reshape(-1, *[1] * (next_states_MS.ndim - 1))


def _chunks(mdp: MDP) -> Iterator[slice]:
    maps = len(mdp.start_S)
    size = max(1, CHUNK_OUTCOMES * maps // max(1, mdp.next_states_SAK.size))
    return (slice(start, min(start + size, maps)) for start in range(0, maps, size))


def _select(mdp: MDP, maps: slice | np.ndarray) -> MDP:
    return MDP(*(getattr(mdp, field.name)[maps] for field in fields(MDP)))


def _stacked(mdp: MDP) -> MDP:
    return mdp if mdp.start_S.ndim == 2 else MDP(*(getattr(mdp, field.name)[None] for field in fields(MDP)))


def _stacked_policy(mdp: MDP, policy_SA: np.ndarray) -> np.ndarray:
    """The policy with the map axis; one policy of shape (S, A) is followed on all maps."""
    policy_SA = np.asarray(policy_SA, dtype=np.float64)
    shape = mdp.rewards_SA.shape
    if policy_SA.shape not in (shape, shape[-2:]):
        raise InputError(
            f"policy: its shape is {policy_SA.shape}, expected {shape} (states x actions of this environment)"
        )
    if not np.allclose(policy_SA.sum(axis=-1), 1.0, atol=1e-6) or (policy_SA < 0).any():
        raise InputError(
            "policy: a row is no probability distribution, expected numbers >= 0 that sum to 1 in each row"
        )
    return np.broadcast_to(policy_SA, (1, *shape) if len(shape) == 2 else shape)


def _from_start(mdp: MDP, values_MS: np.ndarray) -> float | np.ndarray:
    # where start is 0 an infinite value must not turn the sum into nan
    returns_M = np.where(mdp.start_S > 0, mdp.start_S * np.where(mdp.start_S > 0, values_MS, 0.0), 0.0).sum(axis=-1)
    return float(returns_M) if returns_M.ndim == 0 else returns_M


def _check_gamma(gamma: float) -> None:
    if not 0.0 <= gamma <= 1.0:
        raise InputError(f"gamma: {gamma} is no discount factor, expected a number from 0 to 1")


def _checked_horizon(horizon_steps: int) -> int:
    if int(horizon_steps) != horizon_steps or horizon_steps < 0:
        raise InputError(f"horizon_steps: {horizon_steps} is no number of steps, expected a whole number >= 0 or None")
    return int(horizon_steps)
