"""The GRPO trainer of this project: each prompt computed once per group, exact expected advantage at the answer.

Axes: B completions of a batch, T tokens of a completion, F reward functions, N scored tokens of a packed pass.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler, split_tensor_dict

from llm_policy import processes
from llm_policy.checkpoints import keep_newest, written_whole
from llm_policy.errors import InputError
from llm_policy.grpo.expected import (
    REWARD_ROUNDING,
    SUPERVISED,
    ExpectedObjective,
    luck_of_actions,
    without_answers,
)
from llm_policy.grpo.packing import (
    Branch,
    may_share_prefix,
    pack_groups,
    packed_log_probabilities,
    pairs_per_token,
)
from llm_policy.grpo.tree_attention import ATTENTION, FEWEST_PLACES, goes_by_piece, prefer_blocks
from llm_policy.sampling import sample_completions

# Mean |difference| of log-probabilities, packed against stock, that rounding explains; a wrong mask gives over 0.3.
PACKED_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
LEAST_WEIGHT = 0.05  # of an unlikely token in that mean
STD_EPSILON = 1e-4  # TRL's


class PolicyTrainer(GRPOTrainer):
    """GRPO (Shao et al. 2024, arXiv 2402.03300) through TRL, for prompts whose legal actions all have known rewards.

    Departures from TRL's trainer:

    1. Sampling: the prompt is computed and kept once per group (llm_policy/prompt_cache.py), guessed completions are
       scored many tokens at a time (`guesses`, llm_policy/sampling.py), and the adapter is merged into a copy of the
       weights, so that decoding runs plain matrices (`merged_sampling`; through the adapter where a GPU has no room for
       the copy). TRL's own path is used with vLLM, continuous batching, or `packed=False`.
    2. Training pass: a prompt and its group are one tree of tokens, and trees share a row; or completions have rows
       of their own behind their prompt, whichever is cheaper (llm_policy/grpo/packing.py). Completions whose
       advantage is zero skip the pass, or what follows their answer, where nothing else in the loss needs them. On a
       CPU the head finds its gradient on the way (llm_policy/grpo/head.py). Equal to stock up to rounding;
       `packed=False` takes TRL's pass.
    3. Completions are not shuffled (TRL shuffles them one by one): packing needs groups that stay together.
    4. Other objectives: at the answer all legal actions count in place of the sampled one (llm_policy/grpo/expected.py
       has the formulas). Needs the reward of every action (`action_rewards`). Under `natural` the luck of the sampled
       action is taken out of the other tokens' advantage, too, where the thoughts of a group agree. Under `cloning` and
       `distillation` nothing is sampled: the guesses stand in place of the completions.
    5. The order of the rows depends on seed and epoch alone, so that a resumed run sees what it would have seen.
    6. Rewards are float64 until they are advantages: the mean of equal ones is then exact, and a unanimous group has no
       variance. In float32 rounding errors of 1e-7 make advantages of 1e-3, and unanimous groups count as varied.
    7. Several processes sample with random numbers of the main one, so that one process and many with the same batch
       learn the same.
    8. `frac_reward_zero_std` is the share of groups in which all completions earn the same, under every
       `scale_rewards`; with "batch" and with normalised rewards TRL logs whether the whole batch does.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        reward_funcs: list,
        args: GRPOConfig,
        *,
        objective: str = "grpo",
        packed: bool = True,
        merged_sampling: bool = True,
        actions: Sequence[str] = (),
        action_rewards: Callable[[list[dict]], "torch.Tensor"] | None = None,
        action_entropy_coef: float = 0.0,
        form_coef: float = 0.0,
        thought_coef: float = 0.0,
        action_baseline: float = 0.0,
        guesses: Callable[[list[dict]], list[list[int]]] | None = None,
        stands_on: Sequence[Path] = (),
        **kwargs,
    ) -> None:
        """See `GRPOTrainer` for the rest. What cannot be had together, llm_policy/grpo/arguments.py refuses.

        Args:
            actions: what may stand in the answer, in the order of `action_rewards`' columns.
            action_rewards: dataset rows -> (rows, actions) tensor: reward of a well-formed completion per action.
            action_entropy_coef: c in the formulas of llm_policy/grpo/expected.py.
            form_coef: weight of the form's log-odds there.
            thought_coef: weight there of the thought that is taught, the one of `guesses`.
            action_baseline: share of each action's mean reward in a batch that is taken off at first (expected.py).
            guesses: dataset rows -> token ids of a likely completion of each (llm_policy/sampling.py).
            stands_on: files and folders of the run that one which resumes from a checkpoint needs besides.
        """
        assert objective == "grpo" or (packed and actions and action_rewards is not None)
        assert guesses is not None or not (objective in SUPERVISED or thought_coef)
        super().__init__(model=model, reward_funcs=reward_funcs, args=args, **kwargs)
        if objective != "grpo" and self.aux_loss_enabled:
            raise InputError(
                f"--objective {objective}: a mixture of experts with its balancing loss is not packed; use "
                "--router_aux_loss_coef 0, or --objective grpo"
            )
        self.packed = packed
        # Compiling takes 40 s. Where a prompt's completions alone are shorter, the dense mask is cheap at any length
        is_long = self.num_generations * self.max_completion_length >= FEWEST_PLACES
        if packed and is_long and not self.use_transformers_continuous_batching:  # which knows no other attention
            plain = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
            line = prefer_blocks(plain)
            if line and self.accelerator.is_main_process:
                print(line, flush=True)
        self.expected: ExpectedObjective | None = None
        if objective != "grpo":
            self.expected = ExpectedObjective(
                self._tokenizer, actions, action_entropy_coef, objective, form_coef, thought_coef
            )
        self.is_supervised = objective in SUPERVISED
        self.action_rewards = action_rewards
        self.action_baseline = 0.0 if self.is_supervised else action_baseline  # else labels would be others
        self.guesses = guesses
        self.stands_on = stands_on
        self._guessed_B: list[list[int]] | None = None  # for the rows that are being sampled
        self._unanimous_share = 0.0  # of the groups that were rewarded last
        self._reward_B: torch.Tensor | None = None  # of the completions that were rewarded last
        self._merged = merged_sampling and MergedCopy.is_possible(self.model)
        self._merged_copy: MergedCopy | None = None
        self._skipped_B: torch.Tensor | None = None  # completions without advantage, set around a training pass
        self._branches: list[Branch] = []  # what else the next packed pass scores, and what it found
        self._branch_log_probabilities: list[torch.Tensor] = []
        self._own_log_probabilities: dict[int, torch.Tensor] = {}  # of the completions that it scored

    # Data order ------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset=None):
        return EpochRepeatSampler(
            epoch=lambda: int(self.state.epoch or 0),
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=self.num_generations,
            batch_size=self.args.generation_batch_size // self.num_generations,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )

    def _prepare_inputs(self, generation_batch):
        """TRL's buffering of one generation batch over several passes, less the shuffle that scatters groups."""
        if not self.packed or not self.model.training:
            return super()._prepare_inputs(generation_batch)
        steps = self.args.steps_per_generation
        if self._step % (steps * self.num_iterations) == 0 or self._buffered_inputs is None:
            self._buffered_inputs = split_tensor_dict(self._generate_and_score_completions(generation_batch), steps)
        return self._buffered_inputs[self._step % steps]

    # Sampling --------------------------------------------------------------------------------------------------

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, **kwargs):
        if self.is_supervised:
            return self._guessed_B, None
        own_path = self.packed and not (self.use_vllm or self.use_transformers_continuous_batching or images)
        if not own_path:
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, **kwargs)
        guessed = self._guessed_B and self._guessed_B[::num_generations]
        unique = prompt_ids[::num_generations]  # the sampler repeats each row num_generations times in a run
        if [p for p in unique for _ in range(num_generations)] != list(prompt_ids):
            unique, num_generations, guessed = prompt_ids, 1, self._guessed_B  # groups split over processes
        model = self.accelerator.unwrap_model(self.model)
        if self._merged and self._merged_copy is None:
            self._merged = MergedCopy.has_room(model)
            if self._merged:
                self._merged_copy = MergedCopy(model)
            else:
                print("no GPU memory for merged weights: decoding through the adapter, which is slower")
        if self._merged_copy is not None:
            model = self._merged_copy.refreshed()
        rows = len(prompt_ids)  # as many in every process
        noise_RT = processes.uniform_from_main(rows * processes.count(), self.generation_config.max_new_tokens)
        noise_RT = noise_RT[rows * processes.index() :][:rows]
        with self.accelerator.autocast():
            sampled = sample_completions(
                model, unique, self.generation_config, num_generations, guesses=guessed, noise_RT=noise_RT
            )
        return sampled, None

    def forget_merged_weights(self) -> None:
        """Free the copy that sampling makes; the next sampling makes it again."""
        self._merged_copy = None

    @property
    def last_rewards(self) -> torch.Tensor:
        """Of the completions that were rewarded last, (B,), float64."""
        assert self._reward_B is not None, "nothing was rewarded yet"
        return self._reward_B

    def _calculate_rewards(self, *arguments, **keywords):
        rewards_BF = super()._calculate_rewards(*arguments, **keywords).double()
        reward_B = (rewards_BF * self.reward_weights.to(rewards_BF)).nansum(1)
        group = self.num_generations if self.model.training else self.num_generations_eval
        lowest, highest = reward_B.view(-1, group).aminmax(dim=1)
        self._unanimous_share = (lowest == highest).double().mean().item()
        self._reward_B = reward_B
        return rewards_BF

    def _generate_and_score_completions(self, inputs):
        self._guessed_B = self.guesses and self.guesses(inputs)
        if self.is_supervised:
            self._guessed_B = self.expected.labelled(self._guessed_B, self.action_rewards(inputs))
        output = super()._generate_and_score_completions(inputs)
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["frac_reward_zero_std"][-1] = self._unanimous_share
        output["advantages"] = output["advantages"].float()
        if self.is_supervised:  # what is taught stands here: no answers of the model's, so no rewards
            output["advantages"] = torch.ones_like(output["advantages"])
            for name in [name for name in metrics if name.startswith(("reward", "frac_reward", "sampled/"))]:
                del metrics[name]
        if self.expected:
            rewards_BA = torch.as_tensor(self.action_rewards(inputs), device=output["advantages"].device)
            output["action_rewards"] = rewards_BA.float()
            baseline_A = self._baseline_A(rewards_BA)
            output["action_baseline"] = baseline_A.float().expand_as(rewards_BA)  # a row each: it is cut like the rest
            if self.expected.name == "natural":
                output["advantages"] = self._advantages_without_luck(output, rewards_BA, baseline_A)
            if self.expected.thought_coef:
                taught = [torch.tensor(ids, device=rewards_BA.device) for ids in self._guessed_B]
                output["taught_ids"] = pad_sequence(
                    taught, batch_first=True, padding_value=self._tokenizer.pad_token_id
                )
                output["taught_mask"] = pad_sequence([torch.ones_like(ids) for ids in taught], batch_first=True)
        return output

    def _advantages_without_luck(self, output, rewards_BA: torch.Tensor, baseline_A: torch.Tensor) -> torch.Tensor:
        """TRL's group advantages (B,), of rewards without what the sampled action earned above its state's mean.

        Where thoughts differ the action stays in, less the baseline: else they would be taught what pays everywhere.
        """
        group = self.num_generations if self.model.training else self.num_generations_eval
        named = self.expected.named_actions(output["completion_ids"], output["completion_mask"])
        first = self.accelerator.process_index * len(rewards_BA)
        reward_B = self._reward_B[first : first + len(rewards_BA)].clone()
        for n in named:
            reward_B[n.completion] -= baseline_A[n.action]
        luck_B = luck_of_actions(rewards_BA - baseline_A, named, output["completion_ids"], group)
        reward_PG = (reward_B - luck_B).view(-1, group)
        above_PG = reward_PG - reward_PG.mean(dim=1, keepdim=True)
        above_PG = above_PG.where(above_PG.abs() > REWARD_ROUNDING, torch.zeros_like(above_PG))
        if self.scale_rewards == "group":
            above_PG = above_PG / (reward_PG.std(dim=1, keepdim=True) + STD_EPSILON)
        elif self.scale_rewards == "batch":
            above_PG = above_PG / (self.accelerator.gather(reward_PG).std() + STD_EPSILON)
        return above_PG.flatten().float()

    # Training pass ---------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **kwargs
    ):
        """TRL's per-token log-probabilities and entropies, (B, T) each, from packed rows."""
        if not self.packed or any(value is not None and value is not False for value in kwargs.values()):
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **kwargs
            )
        lengths_B = attention_mask[:, -logits_to_keep:].sum(1).tolist()
        skipped_B = [False] * len(lengths_B) if self._skipped_B is None else self._skipped_B.tolist()
        # Without advantage a completion is computed as far as its answer, for what could stand there, or not at all.
        branched = {branch.completion for branch in self._branches}
        scored = [i for i, n in enumerate(lengths_B) if i in branched or (n > 0 and not skipped_B[i])]
        if not scored and self.accelerator.num_processes > 1:  # where others have something, all must take part
            scored, lengths_B[0], skipped_B[0] = [0], max(1, lengths_B[0]), False
        log_probabilities_BT = torch.zeros(input_ids[:, -logits_to_keep:].shape, device=input_ids.device)
        entropies_BT = torch.zeros_like(log_probabilities_BT)
        if not scored:  # nothing to learn from: a differentiable zero, and an entropy that the log leaves out
            zero = sum(p.sum() * 0.0 for p in model.parameters() if p.requires_grad)
            entropies_BT.masked_fill_(attention_mask[:, -logits_to_keep:].bool(), torch.nan)
            return log_probabilities_BT + zero, entropies_BT, None

        prompt_ids, prompt_mask = input_ids[:, :-logits_to_keep], attention_mask[:, :-logits_to_keep].bool()
        row_of = {index: row for row, index in enumerate(scored)}
        plain_model = self.accelerator.unwrap_model(model)
        plain_model = plain_model.get_base_model() if hasattr(plain_model, "get_base_model") else plain_model
        packed = pack_groups(
            [prompt_ids[i][prompt_mask[i]].tolist() for i in scored],
            [input_ids[i, prompt_ids.size(1) :][: lengths_B[i]].tolist() for i in scored],
            [Branch(row_of[b.completion], b.start, b.token_ids) for b in self._branches],
            self._tokenizer.pad_token_id,
            input_ids.device,
            share_prefix=may_share_prefix(plain_model),
            silent={row_of[i] for i in scored if skipped_B[i]},
            pairs_per_token=pairs_per_token(plain_model),
            by_piece=goes_by_piece(plain_model),
        )
        with self.accelerator.autocast():
            own_head = not (self._entropy_bonus_enabled or self.args.cast_lm_head_to_fp32)
            log_probabilities_N, entropies_N = packed_log_probabilities(
                model, plain_model, packed, self.temperature, own_head
            )
        completions, self._branch_log_probabilities = packed.split(log_probabilities_N.float())
        self._own_log_probabilities = dict(zip(scored, completions, strict=True))
        entropies, _ = packed.split(entropies_N.float())

        def into_rows(values: list[torch.Tensor], rows_BT: torch.Tensor) -> torch.Tensor:
            rows_BT = rows_BT.clone()
            for i, value_T in zip(scored, values, strict=True):
                rows_BT[i, : len(value_T)] = value_T
            return rows_BT

        # Completions that skip the pass are given the mean entropy of the others: the metric stays their mean
        found = torch.cat(entropies).detach()
        if len(found):
            entropies_BT += found.mean()
        else:  # only branches were computed
            entropies_BT.masked_fill_(attention_mask[:, -logits_to_keep:].bool(), torch.nan)
        return into_rows(completions, log_probabilities_BT), into_rows(entropies, entropies_BT), None

    def _compute_loss(self, model, inputs):
        if not self.packed:
            return super()._compute_loss(model, inputs)
        named, exemplars, taught = [], [], []
        if self.expected:
            named = self.expected.named_actions(inputs["completion_ids"], inputs["completion_mask"])
            if self.expected.form_coef:
                exemplars = self.expected.exemplars(named, self.num_generations)
            advantages_BT = without_answers(inputs["advantages"], inputs["completion_ids"], named)
            self._branches = self.expected.branches(named)
            if self.expected.thought_coef:
                taught = self.expected.named_actions(inputs["taught_ids"], inputs["taught_mask"])
                taught = self.expected.exemplars(taught, self.num_generations)
                rows, masks = inputs["taught_ids"], inputs["taught_mask"].bool()
                replies = [rows[n.completion][masks[n.completion]].tolist() for n in taught]
                taught, rehearsed = self.expected.rehearsed(taught, replies)
                self._branches += rehearsed
            inputs = {**inputs, "advantages": advantages_BT}
        only_advantages = self.beta == 0.0 and not self._entropy_bonus_enabled
        only_advantages &= self.top_entropy_quantile == 1.0  # a quantile over all tokens, of skipped completions too
        self._skipped_B = inputs["advantages"].reshape(len(inputs["advantages"]), -1).eq(0).all(1)
        self._skipped_B[[n.completion for n in exemplars]] = False
        if not only_advantages or not model.training:
            self._skipped_B = None
        elif "old_per_token_logps" in inputs:  # skipped completions have log-probability 0 on both sides: ratio 1
            old = inputs["old_per_token_logps"].masked_fill(self._skipped_B.unsqueeze(1), 0.0)
            inputs = {**inputs, "old_per_token_logps": old}
        try:
            loss = super()._compute_loss(model, inputs)
            if self.expected:
                rewards_BA = inputs["action_rewards"]
                answers = len(self._branch_log_probabilities) - len(taught)
                own = self._branch_log_probabilities[:answers]
                term, sums = self.expected.loss(own, rewards_BA, named, inputs["action_baseline"][0])
                self._log_means(sums, len(named))
                groups = -(-len(rewards_BA) // self.num_generations)  # one that is cut counts, as in `exemplars`
                form = [self._own_log_probabilities[n.completion] for n in exemplars]
                thoughts = self._branch_log_probabilities[answers:]
                for coef, loss_of, log_p, which in (
                    (self.expected.form_coef, self.expected.form_loss, form, exemplars),
                    (self.expected.thought_coef, self.expected.thought_loss, thoughts, taught),
                ):
                    if coef:
                        further, sums = loss_of(log_p, which, groups, rewards_BA.device)
                        term = term + further
                        self._log_means(sums, len({n.completion for n in which}))
                loss = loss + term / (self.current_gradient_accumulation_steps if self.model.training else 1)
        finally:
            self._skipped_B, self._branches, self._branch_log_probabilities = None, [], []
            self._own_log_probabilities = {}
        return loss

    def _baseline_A(self, rewards_BA: torch.Tensor) -> torch.Tensor:
        """What is taken off each action's reward now, (A,), 0 in the mean; nothing once the training is over."""
        share = self.action_baseline * max(0.0, 1 - self.state.global_step / max(1, self.state.max_steps))
        if not share:
            return rewards_BA.new_zeros(rewards_BA.size(1))
        mean_A = self.accelerator.gather(rewards_BA).mean(0)
        return share * (mean_A - mean_A.mean())

    def _log_means(self, sums: dict[str, torch.Tensor], count: int) -> None:
        """Log each sum over `count`, both over all processes: each must stop where the others do."""
        values = torch.stack([*sums.values(), next(iter(sums.values())).new_tensor(count)])
        *totals, everywhere = self.accelerator.reduce(values).tolist()
        if everywhere:
            for name, total in zip(sums, totals, strict=True):
                self._metrics["train" if self.model.training else "eval"][name].append(total / everywhere)

    # Checkpoints -----------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """PEFT reads an adapter in float32, TRL trains one on quantised weights in bfloat16: a resumed run, too."""
        dtypes = {name: p.dtype for name, p in self.model.named_parameters() if p.requires_grad}
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        for name, parameter in self.model.named_parameters():
            parameter.data = parameter.data.to(dtypes.get(name, parameter.dtype))

    def _save_checkpoint(self, model, trial):
        checkpoint = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        # Transformers would count and delete every folder checkpoint-*, and before this one is marked as whole
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            with written_whole(checkpoint, self.stands_on) if processes.is_main() else nullcontext():
                processes.wait_for_all()  # the others write into the folder once it is marked as begun
                super()._save_checkpoint(model, trial)
                processes.wait_for_all()  # the list is made when all have written
        finally:
            self.args.save_total_limit = limit
        if limit and processes.is_main():
            keep_newest(checkpoint.parent, limit)
        processes.wait_for_all()

    def log(self, logs, start_time=None):
        """TRL's log, of the micro-batches that had a value: no entropy where nothing was trained on."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, values in list(metrics.items()):
            if known := [value for value in values if not math.isnan(value)]:
                metrics[name] = known
            else:
                del metrics[name]
        super().log(logs, start_time)

    # Checks ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def check_against_stock(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> float:
        """Score each completion after each prompt, packed and with TRL's pass; mean |difference|, or `InputError`.

        Give several prompts: what they share is then computed apart from them, as in training.
        """
        device = self.accelerator.device
        length = max(map(len, completions))
        prompt_length = max(map(len, prompts))
        pairs = [(prompt_length - len(p), p, c, length - len(c)) for p in prompts for c in completions]
        ids = torch.tensor([[*[0] * left, *p, *c, *[0] * right] for left, p, c, right in pairs], device=device)
        mask = [[0] * left + [1] * (len(p) + len(c)) + [0] * right for left, p, c, right in pairs]
        mask = torch.tensor(mask, device=device)
        config = self.accelerator.unwrap_model(self.model).config.get_text_config()
        try:
            own, _, _ = self._get_per_token_logps_and_entropies(self.model, ids, mask, length)
        except Exception as error:  # a kernel for this length may fail in any way
            if config._attn_implementation != ATTENTION:
                reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
                raise InputError(
                    f"{config.model_type}: the packed pass failed ({reason}): this architecture needs "
                    "--objective grpo --packed false"
                ) from error
            config._attn_implementation = "sdpa"
            print(f"packed rows with a dense mask: FlexAttention failed ({type(error).__name__})", flush=True)
            own, _, _ = self._get_per_token_logps_and_entropies(self.model, ids, mask, length)
        stock, _, _ = super()._get_per_token_logps_and_entropies(self.model, ids, mask, length)
        weights = mask[:, -length:] * stock.exp().clamp(min=LEAST_WEIGHT)  # an unlikely token's is rough in 16 bits
        difference = ((own - stock).abs() * weights).sum() / weights.sum()
        computed_in = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else self.model.dtype
        tolerance = PACKED_TOLERANCE[computed_in]
        if not difference <= tolerance:
            raise InputError(
                f"{self.model.config.model_type}: packed log-probabilities differ from TRL's by {difference:.3g} "
                f"(at most {tolerance} expected): this architecture needs --objective grpo --packed false"
            )
        return difference.item()


class EpochRepeatSampler(RepeatSampler):
    """TRL's sampler with an order drawn from seed and epoch: resuming in epoch k gives its order, not the first."""

    def __init__(self, epoch: Callable[[], int], **kwargs) -> None:
        super().__init__(**kwargs)
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed((self.seed or 0) * 1_000_003 + self.epoch())
        return super().__iter__()


class MergedCopy:
    """A copy of the base model whose weights are base + adapter, brought up to date before each sampling.

    A copy, because merging and unmerging in place in bf16 would wear the base weights down.
    """

    @staticmethod
    def is_possible(model) -> bool:
        """Plain LoRA on unquantised linear layers; anything else is decoded through its adapter."""
        layers = [m for m in model.modules() if isinstance(m, LoraLayer)]
        bases = [m.get_base_layer() for m in layers]
        linear = all(isinstance(base, torch.nn.Linear) and base.weight.is_floating_point() for base in bases)
        plain = linear and not any(any(m.use_dora.values()) for m in layers)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        matrices = all(".lora_" in name and name.endswith(".weight") for name in trained)  # no biases, whole modules
        return bool(layers) and plain and matrices

    @staticmethod
    def has_room(model) -> bool:
        """Whether the GPU has memory for the copy, and a fifth more for decoding; a CPU's is taken for granted."""
        if model.device.type != "cuda":
            return True
        torch.cuda.empty_cache()  # what judging and the warm start have freed would count as taken
        free, _ = torch.cuda.mem_get_info(model.device)
        return free > 1.2 * sum(p.numel() * p.element_size() for p in model.parameters())

    def __init__(self, peft_model) -> None:
        self._layers = {
            name: module
            for name, module in peft_model.get_base_model().named_modules()
            if isinstance(module, LoraLayer)
        }
        self._copy = copy.deepcopy(peft_model).unload()
        # TRL's fused head is an instance attribute that closes over the original model.
        vars(self._copy).pop("forward", None)
        self._copy.requires_grad_(False).eval()

    @torch.no_grad()
    def refreshed(self) -> PreTrainedModel:
        """The copy with the adapter as it is now."""
        for name, layer in self._layers.items():
            delta = sum(layer.get_delta_weight(adapter) for adapter in layer.active_adapters)
            self._copy.get_submodule(name).weight.copy_(layer.get_base_layer().weight + delta)
        return self._copy
