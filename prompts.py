"""State -> chat messages. Every word that the model is told stands in this file.

The prompt names what the original left out: where the agent stands (rows and columns, not a colour code), how the ice
behaves, what the letters mean and what an answer looks like.
"""

from transformers import PreTrainedTokenizerBase

from llm_policy.errors import InputError
from llm_policy.environments.frozen_lake import ACTIONS, MOVES, Cell, Grid

Messages = list[dict[str, str]]

SYSTEM_PROMPT = (
    "Cross the frozen lake to the goal. S start, F ice, H hole, G goal, A you. {dynamics} "
    "Reply <think>thought</think><answer>ACTION</answer>, ACTION is LEFT, DOWN, RIGHT or UP."
)
SLIPPERY = "Slippery: you move as chosen or to either side of it, each with probability 1/3."
NOT_SLIPPERY = "Not slippery: you always move as chosen."

# Warm start and nothing else: what a well-formed reply looks like. It repeats the observation and names no action.
THOUGHT = "I am at row {row}, column {column}."

OBSERVATIONS = ("grid", "coordinates", "neighbours", "spaced", "ways", "original")

# The faults of the original's prompt in words of our own: the agent's place is nothing but a colour code, the ice is
# not said to be slippery, and the three examples answer RIGHT, DOWN, DOWN where the expert goes LEFT, UP, LEFT
# (`--check` reports all of that). The published one has no chat template, writes its examples as spaced grids with the
# S moved to the agent (cells 0, 2, 10), and was cut to 512 tokens.
ORIGINAL_PROMPT = (
    "You are an agent on a frozen lake. S is the start, F frozen, H a hole, G the goal. Reach the goal without falling "
    "into a hole. Think in <think></think> tags, then give one of LEFT, DOWN, RIGHT, UP in <answer></answer> tags."
)
ORIGINAL_EXAMPLES = (
    (0, "The goal is to the right and below, I move right.", "RIGHT"),
    (1, "The goal is below, I move down.", "DOWN"),
    (4, "Below is frozen ice, I move down.", "DOWN"),
)
_LETTER_NAMES = {"S": "ice", "F": "ice", "H": "hole", "G": "goal"}


def observation_text(grid: Grid, state: int, observation: str = "coordinates") -> str:
    """What the agent sees of `grid` standing on cell `state` (row-major index).

    Args:
        observation: `grid` shows the map with the agent as A; `coordinates` puts row and column (from 0) above it;
            `neighbours` adds what lies one step away in each direction; `spaced` is that with a space between cells,
            so that each is one token (a tokenizer makes SF, HF of SFHF and H, FF, F of HFFF, which hides the columns);
            `ways` adds to that on how many sides ice or the goal follows behind each neighbour of ice;
            `original` marks the agent's cell with an ANSI colour, as Gymnasium's text rendering does.
    """
    if observation not in OBSERVATIONS:
        raise InputError(f"--observation {observation!r}: expected one of {', '.join(OBSERVATIONS)}")
    row, column = divmod(state, len(grid[0]))
    agent = f"\x1b[41m{grid[row][column]}\x1b[0m" if observation == "original" else "A"
    lines = [line[:column] + agent + line[column + 1 :] if r == row else line for r, line in enumerate(grid)]
    if observation in ("spaced", "ways"):
        lines = [" ".join(line) for line in lines]
    if observation in ("coordinates", "neighbours", "spaced", "ways"):
        lines.insert(0, f"You are at row {row}, column {column}.")
    if observation in ("neighbours", "spaced", "ways"):
        around = [_neighbour(grid, (row, column), move, observation == "ways") for move in MOVES]
        lines.append(", ".join(f"{action}: {name}" for action, name in zip(ACTIONS, around, strict=True)) + ".")
    return "\n".join(lines)


def _neighbour(grid: Grid, cell: Cell, move: Cell, counts_ways: bool) -> str:
    cell = cell[0] + move[0], cell[1] + move[1]
    name = _cell_name(grid, cell)
    if name != "ice" or not counts_ways:
        return name
    onward = [(rows, columns) for rows, columns in MOVES if (rows, columns) != (-move[0], -move[1])]
    behind = [_cell_name(grid, (cell[0] + rows, cell[1] + columns)) for rows, columns in onward]
    count = behind.count("ice") + behind.count("goal")
    return f"ice with {count} {'way' if count == 1 else 'ways'} on"


def _cell_name(grid: Grid, cell: Cell) -> str:
    row, column = cell
    inside = 0 <= row < len(grid) and 0 <= column < len(grid[0])
    return _LETTER_NAMES[grid[row][column]] if inside else "edge"


def policy_messages(grid: Grid, state: int, is_slippery: bool, observation: str = "coordinates") -> Messages:
    """The prompt of one state: a system turn (task, dynamics, answer form) and a user turn (the observation).

    With the observation `original` one user turn: task, three examples on the same map, observation.
    """
    if observation == "original":
        cells = "".join(grid)
        if any(cells[place : place + 1] not in ("S", "F") for place, _, _ in ORIGINAL_EXAMPLES):
            raise InputError(
                f"--observation original: its examples stand on cells 0, 1 and 4, not all of which are ice on "
                f"{'|'.join(grid)}; use another observation or the 4x4 map"
            )
        examples = [
            f"{observation_text(grid, place, observation)}\n<think>{thought}</think><answer>{action}</answer>"
            for place, thought, action in ORIGINAL_EXAMPLES
        ]
        text = "\n\n".join([ORIGINAL_PROMPT, *examples, observation_text(grid, state, observation)])
        return [{"role": "user", "content": text}]
    system = SYSTEM_PROMPT.format(dynamics=SLIPPERY if is_slippery else NOT_SLIPPERY)
    user = observation_text(grid, state, observation)
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def format_example(grid: Grid, state: int, action: int) -> str:
    """A well-formed reply for the warm start, whatever `action` is: it says where we are and takes it."""
    row, column = divmod(state, len(grid[0]))
    return f"<think>{THOUGHT.format(row=row, column=column)}</think><answer>{ACTIONS[action]}</answer>"


def accepts_system_role(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template takes a system turn. Gemma's refuses it by raising inside the template."""
    if tokenizer.chat_template is None:
        raise InputError(
            f"{tokenizer.name_or_path}: its tokenizer has no chat template; "
            "take an instruction-tuned model (a name that ends in -it, -Instruct or -chat)"
        )
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    try:
        tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # jinja2 raises TemplateError here, and templates may raise others, in words of their own
        tokenizer.apply_chat_template(turns[1:], tokenize=False)  # a template that refuses this, too, is broken
        return False
    return True


def fit_to_template(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> Messages:
    """`messages` as the chat template takes them: where it refuses a system turn, its text opens the user's turn."""
    if messages[0]["role"] != "system" or accepts_system_role(tokenizer):
        return messages
    system, user, *rest = messages
    return [{"role": "user", "content": f"{system['content']}\n\n{user['content']}"}, *rest]


def prompt_token_ids(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a prompt through the chat template, up to where the model's reply begins; BOS exactly once.

    The same call as TRL makes for conversational prompts, so that warm start, evaluation and training agree.
    """
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]


def check_prompt(
    token_ids: list[int], tokenizer: PreTrainedTokenizerBase, context_tokens: int, max_completion_tokens: int
) -> None:
    """Raise `InputError` for a prompt that the model would see cut, or with a BOS token too many."""
    if len(token_ids) + max_completion_tokens > context_tokens:
        raise InputError(
            f"prompt of {len(token_ids)} tokens + --max_completion_length {max_completion_tokens} exceed the model's "
            f"context of {context_tokens} tokens: use a smaller map, a shorter completion or another model"
        )
    if tokenizer.bos_token_id is not None and token_ids[:2] == [tokenizer.bos_token_id] * 2:
        raise InputError(
            f"{tokenizer.name_or_path}: the chat template writes {tokenizer.bos_token!r} (BOS) twice; take one of the "
            "two out of chat_template in its tokenizer files"
        )
