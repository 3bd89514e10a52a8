"""All completions of one prompt are a tree of tokens: what they have in common is computed once.

Axes: P rows, L places in a row, K places of the shared prefix, Q prompts that stand before rows, J places of those,
M = K + J + L keys, N scored tokens, U different ones, T tokens of a tree.

Two tokens are one where all before them is equal, too: a prompt stands once before all its completions, and
completions that begin alike (after the warm start they all do) part where they differ. A token sees itself and what
leads to it, and predicts whatever comes next in each completion that runs through it:

    prompt p0 p1 p2, completions a b c, a b d and e f

    row       p0 p1 p2 a  b  e
    follows   -  p0 p1 p2 a  p2
    position  0  1  2  3  4  3
    predicts        a  b  c  f
                    e     d

The last token of a completion predicts nothing and is not there. On a CPU all trees stand in one row, through which
attention goes piece by piece. Elsewhere rows are as long as the longest tree, and short trees share one, so that little
of it is padding. What all prompts begin with (chat template, rules of the game) is computed once for all rows and
stands before them as a key-value cache, through which the gradient flows: of 116 prompt tokens of the 4x4 lake 88 are
the same everywhere.

In such rows every token is compared with every other, and many long completions have little in common. Where that
costs more than it saves, each completion has a row of its own, and its prompt stands before it as a cache, too
(`Prompts`).

A branch ("what if the answer had been UP?") is one more path through the tree. Log-probabilities, entropies and
gradients equal those of one row per completion (tests/test_packing.py, and `check_against_stock` on the real model
before training).
"""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from peft.helpers import disable_input_dtype_casting
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import DynamicCache, PreTrainedModel

from llm_policy.grpo.head import TokenLogProbabilities, finds_gradient_on_the_way
from llm_policy.grpo.tree_attention import FEWEST_PLACES, Piece, Sight, going_by_piece, takes_blocks
from llm_policy.prompt_cache import mask_by_layer, turns_by_length
from llm_policy.sampling import TokenIds, common_prefix

# Measured on two threads of an AMD EPYC, when a CPU had such rows, too: with it 11 x 8 completions of 32 tokens are
# trees, which were a tenth faster
PAIRS_PER_COPIED_KEY = 170


def may_share_prefix(model: PreTrainedModel) -> bool:
    """Whether a pass may be cut in two, as `pack_groups` does: recomputation drops the cache in the middle of one."""
    return not model.is_activation_checkpointing and not turns_by_length(model)


@dataclass(frozen=True)
class Branch:
    """Continue completion `completion` with `token_ids` instead of its own tokens from `start` on."""

    completion: int
    start: int
    token_ids: tuple[int, ...]


@dataclass
class Prompts:
    """Q prompts, without what all of them begin with and without their last token, computed before the rows."""

    input_ids_QJ: torch.Tensor
    position_ids_QJ: torch.Tensor
    sight: Sight  # of M = K + J keys
    prompt_P: torch.Tensor  # which one stands before each row


@dataclass
class PackedGroups:
    """P rows of L tokens behind K tokens that they share, and where in the rows the N scored tokens are predicted.

    Scored tokens are ordered: all completions in the order given, token by token, then all branches. What several of
    them share is scored once: U different ones.
    """

    prefix_ids_K: torch.Tensor
    input_ids_PL: torch.Tensor
    position_ids_PL: torch.Tensor
    sight: Sight  # of M keys: prefix, prompt, row
    predictor_U: torch.Tensor  # index into the flattened P * L positions
    labels_U: torch.Tensor  # token ids
    scored_N: torch.Tensor  # index into the U
    completion_lengths: list[int]
    branch_lengths: list[int]
    prompts: Prompts | None = None  # None: each row begins with its prompt
    by_piece: bool = False  # a single row, through which attention goes piece by piece

    def split(self, values_N: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Per-token values -> one tensor per completion and one per branch."""
        pieces = values_N.split(self.completion_lengths + self.branch_lengths)
        return list(pieces[: len(self.completion_lengths)]), list(pieces[len(self.completion_lengths) :])


def pack_groups(
    prompts: Sequence[TokenIds],
    completions: Sequence[TokenIds],
    branches: Sequence[Branch] = (),
    pad_token_id: int = 0,
    device: torch.device | str = "cpu",
    share_prefix: bool = True,
    silent: Collection[int] = (),
    pairs_per_token: float = math.inf,
    by_piece: bool = False,
) -> PackedGroups:
    """Pack B completions with their B prompts; equal prompts are computed once, whichever completion they belong to.

    Args:
        prompts: token ids of each completion's prompt (B lists, at least one token each).
        completions: token ids of each completion (B lists, at least one token each).
        branches: alternatives to score; their tokens come after the completions'.
        share_prefix: whether what all prompts begin with is taken out of the rows.
        silent: completions (by number) that are not scored; only what their branches need of them is computed.
        pairs_per_token: so many comparisons of two tokens cost as much as the rest of the model does for one token
            (`pairs_per_token` of a model). It decides whether completions share a tree.
        by_piece: all trees stand in one row, through which attention goes piece by piece (`goes_by_piece` of a model).
    """
    shared = len(common_prefix([prompt[:-1] for prompt in prompts])) if share_prefix else 0
    scored = [() if i in silent else completion for i, completion in enumerate(completions)]
    # (completion, its tokens before the scored ones, scored tokens)
    paths: list[tuple[int, TokenIds, TokenIds]] = [(i, (), completion) for i, completion in enumerate(scored)]
    paths += [(b.completion, completions[b.completion][: b.start], b.token_ids) for b in branches]
    paths = [path for path in paths if path[2]]
    trees = _Rows.grown([(tuple(prompts[i]), prompts[i][shared:], kept, tokens) for i, kept, tokens in paths])
    trees.join(sum(trees.lengths) if by_piece else max(trees.lengths))
    alone = _Rows.grown([((i, *prompts[i]), prompts[i][-1:], kept, tokens) for i, kept, tokens in paths])
    before = list(dict.fromkeys(tuple(prompts[i]) for i, _, _ in paths))  # prompts in order of arrival
    rests = [prompt[shared:-1] for prompt in before]
    places = max(map(len, rests))
    # Recomputation (`share_prefix` False) leaves no room for a cache
    is_tree = by_piece or not (share_prefix and places)
    is_tree = is_tree or _trees_are_cheaper(trees, alone, rests, shared, pairs_per_token)

    rows = trees if is_tree else alone
    tokens_PL, depths_PL, numbers_PL, ends_PL = rows.padded(pad_token_id, device)
    positions_K = torch.arange(shared, device=device)
    positions_before_PK = positions_K.expand(len(tokens_PL), -1)
    firsts_P1 = torch.full((len(tokens_PL), 1), shared, device=device)
    packed_prompts, is_real_PJ = None, None
    if not is_tree:
        of_rests = _Rows.grown([(prompt, (), (), rest) for prompt, rest in zip(before, rests, strict=True)], whole=True)
        rests_QJ, rest_depths_QJ, rest_numbers_QJ, rest_ends_QJ = of_rests.padded(pad_token_id, device)
        positions_QJ = rest_depths_QJ + shared
        before_prompts = _behind(positions_K.expand(len(rests), -1), positions_QJ, rest_numbers_QJ, rest_ends_QJ)
        prompt_P = torch.tensor([before.index(key[1:]) for key in alone.trees], device=device)
        packed_prompts = Prompts(rests_QJ, positions_QJ, before_prompts, prompt_P)
        lengths_P = torch.tensor([len(rest) for rest in rests], device=device)[prompt_P]
        is_real_PJ = torch.arange(places, device=device) < lengths_P[:, None]
        positions_before_PK = torch.cat([positions_before_PK, positions_QJ[prompt_P]], dim=1)
        firsts_P1 = firsts_P1 + lengths_P[:, None]
    positions_PL = depths_PL + firsts_P1
    sight = _behind(positions_before_PK, positions_PL, numbers_PL, ends_PL, is_real_PJ)
    tokens_N = [token for _, _, tokens in paths for token in tokens]
    pairs = list(zip(rows.predictors(), tokens_N, strict=True))
    different = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
    predictor_U = torch.tensor([place for place, _ in different], device=device)
    return PackedGroups(
        prefix_ids_K=torch.tensor(prompts[0][:shared], dtype=torch.long, device=device),
        input_ids_PL=tokens_PL,
        position_ids_PL=positions_PL,
        sight=sight,
        predictor_U=predictor_U,
        labels_U=torch.tensor([token for _, token in different], device=device),
        scored_N=torch.tensor([different[pair] for pair in pairs], device=device),
        completion_lengths=[len(completion) for completion in scored],
        branch_lengths=[len(branch.token_ids) for branch in branches],
        prompts=packed_prompts,
        by_piece=by_piece,
    )


def _trees_are_cheaper(
    trees: "_Rows", alone: "_Rows", rests: Sequence[TokenIds], shared: int, pairs_per_token: float
) -> bool:
    """Whether completions of a prompt in one tree cost less than rows of their own behind the rests of the prompts."""
    places = max(map(len, rests))
    prompts = len(rests) * places * (1 + (shared + places) / pairs_per_token)
    return _cost(trees, shared, pairs_per_token) <= prompts + _cost(alone, shared + places, pairs_per_token)


def _cost(rows: "_Rows", before: int, pairs_per_token: float) -> float:
    """Of rows behind so many tokens, whose keys are copied to each row, in tokens."""
    pairs = rows.length * (before + rows.length) + before * PAIRS_PER_COPIED_KEY
    return rows.count * (rows.length + pairs / pairs_per_token)


def pairs_per_token(model: PreTrainedModel) -> float:
    """How many comparisons of two tokens cost as much as the rest of a layer does for one.

    About 12 H^2 multiplications in a layer's matrices, against 2 H for a pair. Pairs that do not see each other cost
    nothing where blocks of them are left out.
    """
    return math.inf if takes_blocks(model) else 6.0 * model.config.get_text_config().hidden_size


def _behind(
    positions_before_PK: torch.Tensor,
    positions_PL: torch.Tensor,
    numbers_PL: torch.Tensor,
    ends_PL: torch.Tensor,
    is_real_PJ: torch.Tensor | None = None,
) -> Sight:
    """What each token of a row sees: in the row, and all that stands before it.

    Args:
        is_real_PJ: False where the last J places before a row are padding.
    """
    ends_before_PK = torch.full_like(positions_before_PK, numbers_PL.size(1))
    if is_real_PJ is not None:
        ends_before_PK[:, -is_real_PJ.size(1) :] *= is_real_PJ
    return Sight(
        numbers_PL,
        positions_PL,
        firsts_PM=torch.cat([torch.zeros_like(positions_before_PK), numbers_PL], dim=1),
        ends_PM=torch.cat([ends_before_PK, ends_PL], dim=1),
        key_positions_PM=torch.cat([positions_before_PK, positions_PL], dim=1),
    )


@dataclass
class _Rows:
    """Token trees by key, and (tree, its nodes) that predict the scored tokens of each path."""

    trees: "dict[tuple[int, ...], _TokenTree]"
    scored: "list[tuple[_TokenTree, list[int]]]"

    @staticmethod
    def grown(paths: Sequence[tuple[tuple[int, ...], TokenIds, TokenIds, TokenIds]], whole: bool = False) -> "_Rows":
        """From paths of (key, trunk of the key's tree, tokens before the scored ones, scored tokens).

        Args:
            whole: the last token of a path, which predicts none of it, has its place as well.
        """
        rows = _Rows({}, [])
        for key, trunk, before, tokens in paths:
            tree = rows.trees.get(key)
            if tree is None:  # the trunk, a prompt of a thousand tokens maybe, is walked once
                tree = rows.trees[key] = _TokenTree(row=len(rows.trees))
                tree.trunk = tree.add(trunk)
            nodes = tree.add([*before, *(tokens if whole else tokens[:-1])])
            rows.scored.append((tree, [*tree.trunk[-1:], *nodes][-len(tokens) :]))
        return rows

    @property
    def lengths(self) -> list[int]:
        """Of the trees."""
        return [len(tree.tokens) for tree in self.trees.values()]

    @property
    def length(self) -> int:
        """Of each row, with its padding."""
        return max(tree.first + len(tree.tokens) for tree in self.trees.values())

    @property
    def count(self) -> int:
        return 1 + max(tree.row for tree in self.trees.values())

    def join(self, length: int) -> None:
        """Let trees share rows of this length: the longest first, each into the first row that has room for it."""
        filled: list[int] = []  # places taken of each row
        for tree in sorted(self.trees.values(), key=lambda tree: -len(tree.tokens)):
            size = len(tree.tokens)
            tree.row = next((row for row, end in enumerate(filled) if end + size <= length), len(filled))
            if tree.row == len(filled):
                filled.append(0)
            tree.first = filled[tree.row]
            filled[tree.row] += size

    def padded(self, pad_token_id: int, device) -> tuple[torch.Tensor, ...]:
        """Tokens, depths, numbers in a walk, and the number behind all that follows each token; (P, L) each.

        Padding is seen by itself.
        """
        numbers_PL = np.tile(np.arange(self.length), (self.count, 1))
        tokens_PL, depths_PL, ends_PL = np.full_like(numbers_PL, pad_token_id), numbers_PL.copy(), numbers_PL + 1
        for tree in self.trees.values():
            here = tree.row, slice(tree.first, tree.first + len(tree.tokens))
            tokens_PL[here], depths_PL[here] = tree.tokens, tree.depths
            numbers_T, ends_T = tree.walk()
            numbers_PL[here], ends_PL[here] = numbers_T + tree.first, ends_T + tree.first
        return tuple(torch.from_numpy(array).to(device) for array in (tokens_PL, depths_PL, numbers_PL, ends_PL))

    def predictors(self) -> list[int]:
        """Places in the flattened rows."""
        length = self.length
        return [tree.row * length + tree.first + node for tree, nodes in self.scored for node in nodes]


class _TokenTree:
    """Tokens in order of arrival, each behind the one that it follows, from place `first` of a row on."""

    def __init__(self, row: int) -> None:
        self.row, self.first = row, 0
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self.followed: list[int] = []  # index of the token before; -1 at the beginning
        self.trunk: list[int] = []  # indices of what all paths begin with
        self._index: dict[tuple[int, int], int] = {}  # (token before, token) -> index

    def add(self, tokens: Sequence[int]) -> list[int]:
        """The indices of `tokens`, one after the other behind the trunk; those not yet there are added."""
        path, before = [], self.trunk[-1] if self.trunk else -1
        for depth, token in enumerate(tokens, len(self.trunk)):
            here = self._index.setdefault((before, token), len(self.tokens))
            if here == len(self.tokens):
                self.tokens.append(token)
                self.depths.append(depth)
                self.followed.append(before)
            path.append(here)
            before = here
        return path

    def walk(self) -> tuple[np.ndarray, np.ndarray]:
        """Each token's number in a walk, and the number behind all that follows it."""
        count = len(self.tokens)
        numbers_T = np.zeros(count, dtype=np.int64)
        sizes_T = np.ones(count, dtype=np.int64)  # a token and all that follows it
        for here in range(count - 1, 0, -1):
            sizes_T[self.followed[here]] += sizes_T[here]
        free_T = numbers_T + 1  # the next number behind each token
        for here, before in enumerate(self.followed[1:], start=1):
            numbers_T[here] = free_T[before]
            free_T[here] = numbers_T[here] + 1
            free_T[before] += sizes_T[here]
        return numbers_T, numbers_T + sizes_T


Mask = torch.Tensor | BlockMask


def attention_mask(model: PreTrainedModel, sight: Sight) -> Mask | dict[str, Mask]:
    """`sight` in the form that the model's attention takes (one mask, or one for each kind of layer)."""
    config = model.config.get_text_config()

    def mask(window: int | None) -> Mask:
        if takes_blocks(model) and sight.numbers_PL.size(1) >= FEWEST_PLACES:
            return sight.blocks(window)
        visible = sight.visible(window)[:, None]
        if config._attn_implementation != "eager":
            return visible
        return torch.zeros(visible.shape, dtype=model.dtype, device=visible.device).masked_fill_(
            ~visible, torch.finfo(model.dtype).min
        )

    return mask_by_layer(config, mask)


def pieces_by_layer(model: PreTrainedModel, sight: Sight) -> dict[str, object]:
    """`sight` as `attend_by_piece` takes it: a list of pieces for each kind of layer, and which of them is whose."""
    pieces: list[list[Piece]] = []

    def number(window: int | None) -> torch.Tensor:
        pieces.append(sight.pieces(window))
        return torch.full((1, 1, 1, 1), len(pieces) - 1)  # four dimensions: transformers hands it on as it is

    return {"attention_mask": mask_by_layer(model.config.get_text_config(), number), "pieces": pieces}


@contextmanager
def packed_pass(model: PreTrainedModel, packed: PackedGroups) -> Iterator[dict]:
    """Inside, `model` called with the keywords that this gives computes the rows.

    Its backbone computes what stands before them first: its keys and values, with gradient. This is a hook, so that it
    happens within the call of whatever wraps the model for several processes.
    """

    def compute_prefix(module, arguments, keywords):
        cache = DynamicCache()  # told of no sliding windows: what a layer sees is the mask's business
        if len(packed.prefix_ids_K):
            module.forward(input_ids=packed.prefix_ids_K.unsqueeze(0), past_key_values=cache, use_cache=True)
            cache.batch_repeat_interleave(len(packed.prompts.input_ids_QJ if packed.prompts else packed.input_ids_PL))
        if packed.prompts:
            module.forward(
                input_ids=packed.prompts.input_ids_QJ,
                position_ids=packed.prompts.position_ids_QJ,
                attention_mask=attention_mask(model, packed.prompts.sight),
                past_key_values=cache,
                use_cache=True,
            )
            cache.batch_select_indices(packed.prompts.prompt_P)
        return arguments, {**keywords, "past_key_values": cache}

    inputs: dict[str, object] = {"input_ids": packed.input_ids_PL, "position_ids": packed.position_ids_PL}
    if packed.by_piece:
        inputs |= pieces_by_layer(model, packed.sight)
    else:
        inputs["attention_mask"] = attention_mask(model, packed.sight)
    with ExitStack() as stack:
        if len(packed.prefix_ids_K) or packed.prompts:
            handle = model.base_model.register_forward_pre_hook(compute_prefix, with_kwargs=True)
            stack.callback(handle.remove)
        if packed.by_piece:
            stack.enter_context(going_by_piece(model))
        yield inputs


@contextmanager
def only_positions(backbone: nn.Module, positions_N: torch.Tensor) -> Iterator[None]:
    """Inside, `backbone` hands on (1, N, H) hidden states at `positions_N` of its flattened (P, L), not all of them.

    The projection to the vocabulary is then paid for scored tokens only. A position may stand in the list repeatedly.
    """

    def select(_module, _arguments, output):
        output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[positions_N].unsqueeze(0)
        return output

    handle = backbone.register_forward_hook(select)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def kept_from_head(backbone: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Inside, the hidden states of `backbone` go to the list, and none to the head."""
    kept: list[torch.Tensor] = []

    def keep(_module, _arguments, output):
        kept.append(output.last_hidden_state)
        output.last_hidden_state = output.last_hidden_state[:, :0]
        return output

    handle = backbone.register_forward_hook(keep)
    try:
        yield kept
    finally:
        handle.remove()


def packed_log_probabilities(
    model: nn.Module,
    plain_model: PreTrainedModel,
    packed: PackedGroups,
    temperature: float = 1.0,
    own_head: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy (nats) of each scored token, both (N,).

    PEFT casts the input of each LoRA layer to float32. Under autocast, which casts it back, that only costs memory: a
    fifth of the peak (LOG.md).

    Args:
        model: what to call: the model itself, or its wrapper for several processes.
        plain_model: the transformers model inside, after `trl.trainer.utils.add_fused_lm_head`.
        temperature: as the fused head has it.
        own_head: the entropies need no gradient, so that llm_policy/grpo/head.py may stand in for TRL's head.
    """
    backbone = plain_model.base_model
    is_autocast = torch.is_autocast_enabled(packed.input_ids_PL.device.type)
    is_recomputed = plain_model.is_activation_checkpointing  # after this block, with the casts
    uncast = disable_input_dtype_casting(model, active=is_autocast and not is_recomputed)
    with packed_pass(plain_model, packed) as inputs, only_positions(backbone, packed.predictor_U), uncast:
        if own_head and finds_gradient_on_the_way(plain_model):
            with kept_from_head(backbone) as hidden:
                model(**inputs, use_cache=False)
            weight_VH = plain_model.get_output_embeddings().weight
            log_p_U, entropy_U = TokenLogProbabilities.apply(hidden[0][0], weight_VH, packed.labels_U, temperature)
        else:
            output = model(**inputs, shift_labels=packed.labels_U.unsqueeze(0), fused_lm_head=True)
            log_p_U, entropy_U = output.log_probs[0], output.entropy[0]
    return log_p_U[packed.scored_N], entropy_U[packed.scored_N]
