"""Every word that a model is told in policy search (ProPS and ProPS+, arXiv 2511.21928; the wording is ours).

The prompts of training are in the root's prompts.py. They ask for an action in a state. These ask for a vector of
numbers, and most of their words describe environments. A changed word here changes the answers of every model, and a
run that was begun before cannot be resumed.
"""

from collections.abc import Sequence

from llm_policy.chat import Messages
from llm_policy.environments.frozen_lake import grid_text
from llm_policy.environments.gym_env import GymEnvironment, lake_grid
from llm_policy.errors import InputError
from llm_policy.policy_search.parameters import Parameters, PolicySpace

ROLE = (
    "You are a good global optimiser. You look for the parameters of a policy that earn the highest return, by "
    "proposing parameters and learning from the returns of those tried before."
)
TABULAR = "The parameters are {count} integers from 0 to {highest}: the action taken in state 0, 1, ..., {last_state}."
LINEAR_ACTION = {
    True: "the action is the index, from 0, of the largest of the {outputs} components of W s + b",
    False: "the action is W s + b, {outputs} components, cut at their bounds",
}
LINEAR = (
    "The parameters are {count} numbers from -6.0 to 6.0 with one decimal: the {outputs} x {inputs} matrix W row by "
    "row, then the vector b. On observing the vector s, {action}."
)
HISTORY = {
    "whole": "Tried so far, in this order, with the mean return {over} episodes:",
    "best_and_recent": "The best and the latest ones tried so far, worst first, best last, with the mean return "
    "{over} episodes:",
}
OVER = {False: "over {episodes}", True: "(+- its standard error) over at least {episodes}"}  # whether they are pooled
OPTIMUM = "The best possible return is about {optimum:.4g}."
TURN = (
    "This is iteration {iteration} of {iterations}. Propose parameters that are not in the list: early ones may be far "
    "from all of them, to explore; late ones should be close to the best."
)
# No line of it looks like an answer: the embedded model would repeat "parameters: 16 integers ..." word for word.
ANSWER = "Answer with exactly one line: the word `parameters`, a colon and {count} {kind}, separated by commas."
REASON = " Then one line more: the word `reason`, a colon and one short sentence."
ANSWER_PREFIX = "parameters:"
CORRECTION = "This cannot be used: {error}. {answer}"

_SLIPPERY = "Slippery: you move as chosen or to either side of it, each with probability 1/3."
_NOT_SLIPPERY = "Not slippery: you always move as chosen."
_LAKE = (
    "An agent crosses a frozen lake, {rows} by {columns} cells, to the goal: {map} (S start, F ice, H hole, G goal). "
    "The state is row * {columns} + column, both from 0. Actions: 0 left, 1 down, 2 right, 3 up. {dynamics} Entering "
    "the goal earns 1, anything else 0. An episode ends in the goal, in a hole or after {horizon} steps."
)
_MUJOCO_TIME = "An episode ends after {horizon} steps"
DESCRIPTIONS = {
    "CliffWalking-v1": (
        "An agent walks on a grid of 4 rows and 12 columns. The state is row * 12 + column, both from 0. It starts at "
        "state 36 (lower left) and wants to reach state 47 (lower right); states 37 to 46 between them are a cliff. "
        "Actions: 0 up, 1 right, 2 down, 3 left; a step off the grid leaves it where it is. Each step earns -1, one "
        "into the cliff -100 and a return to the start. An episode ends at state 47 or after {horizon} steps."
    ),
    "CartPole-v1": (
        "A pole stands on a cart that moves along a track. The observation is (cart position, cart velocity, pole "
        "angle in radians, pole's angular velocity); 0 is the middle and upright. Actions: 0 pushes the cart to the "
        "left, 1 to the right. Each step earns 1. An episode ends when the pole leans more than 0.21 radians, the cart "
        "is more than 2.4 from the middle, or after {horizon} steps."
    ),
    "MountainCar-v0": (
        "A weak car stands in a valley and has to reach the top of the right hill by swinging. The observation is "
        "(position from -1.2 to 0.6, velocity from -0.07 to 0.07); the valley is at -0.5. Actions: 0 accelerates to "
        "the left, 1 not at all, 2 to the right. Each step earns -1. An episode ends at position 0.5 or after "
        "{horizon} steps."
    ),
    "MountainCarContinuous-v0": (
        "A weak car stands in a valley and has to reach the top of the right hill by swinging. The observation is "
        "(position from -1.2 to 0.6, velocity from -0.07 to 0.07); the valley is at -0.5. The action is one force "
        "from -1 (left) to 1 (right). Each step costs 0.1 times the squared force; reaching position 0.45 earns 100 "
        "and ends the episode, as do {horizon} steps."
    ),
    "InvertedPendulum-v5": (
        "A pole stands on a cart that moves along a track. The observation is (cart position, pole angle in radians, "
        "cart velocity, pole's angular velocity); 0 is the middle and upright. The action is one force on the cart "
        "from -3 (left) to 3 (right). Each step earns 1. An episode ends when the pole leans more than 0.2 radians or "
        "after {horizon} steps."
    ),
    "Swimmer-v5": (
        "A swimmer of three links in a row moves in a viscous fluid. The observation is (angle of the front link, "
        "angle of the first joint, angle of the second joint, velocity along x, velocity along y, angular velocity of "
        "the front link, of the first joint, of the second joint). The action is two torques from -1 to 1, on the "
        "first and on the second joint. A step earns the velocity along x less a small cost of the torques: swim "
        "forwards as fast as possible. " + _MUJOCO_TIME + "."
    ),
    "Hopper-v5": (
        "A leg with one foot hops along x. The observation is (height of the torso, angle of torso, thigh joint, leg "
        "joint, foot joint, then the velocities: along x, along z, of torso, thigh, leg and foot). The action is three "
        "torques from -1 to 1, on thigh, leg and foot joint. A step earns 1 for standing plus the velocity along x, "
        "less a small cost of the torques. " + _MUJOCO_TIME + " or when the hopper falls."
    ),
}


def environment_description(environment: GymEnvironment) -> str:
    """What ProPS+ tells of the environment: actions, reward, end of an episode.

    `InputError` for an environment, or options of one, that are not described here.
    """
    lake_options = {"map_name", "desc", "is_slippery"}
    if environment.env_id in ("FrozenLake-v1", "FrozenLake8x8-v1") and set(environment.options) <= lake_options:
        rows = lake_grid(environment.env)
        return _LAKE.format(
            rows=len(rows),
            columns=len(rows[0]),
            map=grid_text(rows),
            dynamics=_SLIPPERY if environment.options.get("is_slippery", True) else _NOT_SLIPPERY,
            horizon=environment.horizon_steps,
        )
    if environment.env_id not in DESCRIPTIONS or environment.options:
        raise InputError(
            f"--describe_environment true: {environment.env_id} with options {dict(environment.options)} has no "
            f"description here; write one and name its file with --description_file (described are: FrozenLake-v1, "
            f"{', '.join(DESCRIPTIONS)})"
        )
    return DESCRIPTIONS[environment.env_id].format(horizon=environment.horizon_steps)


def parameters_text(space: PolicySpace) -> str:
    """What the parameters are, their format and their bounds."""
    if space.is_tabular:
        return TABULAR.format(count=space.count, highest=space.outputs - 1, last_state=space.count - 1)
    action = LINEAR_ACTION[space.action_bounds is None].format(outputs=space.outputs)
    return LINEAR.format(count=space.count, outputs=space.outputs, inputs=space.inputs, action=action)


def tried_text(space: PolicySpace, parameters: Parameters, mean: float, standard_error: float | None) -> str:
    """One policy of the history. The return stands first, so that a model that continues the list names parameters."""
    spread = "" if standard_error is None else f" +- {standard_error:.3g}"
    return f"return: {mean:.4g}{spread}\nparameters: {space.text(parameters)}"


def search_messages(
    space: PolicySpace,
    tried: Sequence[str],
    *,
    history: str,
    is_pooled: bool,
    episodes: int,
    iteration: int,
    iterations: int,
    optimum: float | None = None,
    description: str | None = None,
    ask_reason: bool = False,
) -> Messages:
    """The prompt of one iteration.

    Args:
        tried: the history, one `tried_text` per policy.
        history: which of `HISTORY` it is.
        is_pooled: parameters that were tried again stand once, with all their episodes.
        optimum: the best return, as a hint; None says nothing of it.
        description: ProPS+ has one, `environment_description`; ProPS has None.
        ask_reason: ask for a line of reasoning after the parameters.
    """
    over = OVER[is_pooled].format(episodes=episodes)
    parts = [
        parameters_text(space),
        description,
        None if optimum is None else OPTIMUM.format(optimum=optimum),
        TURN.format(iteration=iteration, iterations=iterations),
        answer_text(space, ask_reason),
        # Last, so that a well-formed answer is also how the list would continue
        "\n".join([HISTORY[history].format(over=over), *tried]) if tried else "Nothing was tried so far.",
    ]
    user = "\n\n".join(part for part in parts if part)
    return [{"role": "system", "content": ROLE}, {"role": "user", "content": user}]


def answer_text(space: PolicySpace, ask_reason: bool) -> str:
    """What an answer has to look like."""
    kind = f"integers from 0 to {space.outputs - 1}" if space.is_tabular else "numbers from -6.0 to 6.0"
    return ANSWER.format(count=space.count, kind=kind) + (REASON if ask_reason else "")


def corrected_messages(messages: Messages, answer: str, error: str, space: PolicySpace, ask_reason: bool) -> Messages:
    """The prompt after an answer that cannot be used: what was said and what is wrong with it."""
    correction = CORRECTION.format(error=error, answer=answer_text(space, ask_reason))
    said = answer.strip() or "(nothing)"  # some chat templates and servers refuse an empty turn
    return [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": correction}]
