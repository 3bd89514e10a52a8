"""Teaches the answer format and nothing else: supervised on well-formed replies whose actions are uniformly random.

For every sampled state each of the four actions stands in the batch exactly once, so no label of the expert leaks: the
best that the model can do is to answer in form and give all actions the same probability. GRPO then starts with
readable answers and with variance in every group.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.utils import add_fused_lm_head

from llm_policy.completions import parse_completion
from llm_policy.errors import InputError
from llm_policy.environments.frozen_lake import ACTIONS, Grid
from llm_policy.grpo.packing import pack_groups, packed_log_probabilities
from llm_policy.environments.policy_table import PolicyReader
from prompts import format_example

SAMPLED_PROMPTS = 32  # for the estimate of the format validity
CHECK_EVERY_STEPS = 5
UNJOINABLE = ("use_dora", "modules_to_save", "target_parameters", "layers_to_transform")  # of PEFT's LoraConfig
PROMPTS_PER_PASS = 3  # a bound on memory; two cores are as fast with 3 as with 11


def sampled_format_validity(model: PeftModel, reader: PolicyReader, cells: Sequence[tuple[Grid, int]]) -> float:
    """Share of `SAMPLED_PROMPTS` or more sampled completions (temperature 1) that are in form and name an action."""
    chosen = cells[:: max(1, len(cells) // SAMPLED_PROMPTS)][:SAMPLED_PROMPTS]
    texts = reader.completions(model, chosen, -(-SAMPLED_PROMPTS // len(chosen)))
    parsed = [parse_completion(text) for text in texts]
    return sum(p.is_well_formed and p.action is not None for p in parsed) / len(parsed)


def teach_format(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    reader: PolicyReader,
    cells: Sequence[tuple[Grid, int]],
    *,
    max_steps: int,
    prompts_per_step: int,
    learning_rate: float,
    threshold: float,
    seed: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Fine-tune the adapter until `threshold` of sampled completions are in form, or for `max_steps`.

    Args:
        cells: (map, state) pairs to draw prompts from.
        prompts_per_step: distinct prompts a step, each with all four actions.
        should_stop: asked after every step; True leaves early (the caller then throws the adapter away).

    Returns:
        `steps`, `loss` (nats a token, last step) and `format_validity` (last sample).
    """
    base_model = model.get_base_model()
    add_fused_lm_head(base_model, outputs=("log_probs", "entropy"))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    end = [tokenizer.eos_token_id]
    report = {"steps": 0, "loss": float("nan"), "format_validity": 0.0}
    device = next(model.parameters()).device
    model.train()
    progress = tqdm(range(1, max_steps + 1), desc="warm start (format only)", unit="step")
    try:
        for step in progress:
            order = torch.randperm(len(cells), generator=generator)[:prompts_per_step].tolist()
            loss = 0.0
            for first in range(0, len(order), PROMPTS_PER_PASS):
                chunk = order[first : first + PROMPTS_PER_PASS]
                batch = [(*cells[i], action) for i in chunk for action in range(len(ACTIONS))]
                packed = pack_groups(
                    [reader.prompt(grid, state) for grid, state, _ in batch],
                    [tokenizer.encode(format_example(*cell), add_special_tokens=False) + end for cell in batch],
                    pad_token_id=tokenizer.pad_token_id,
                    device=device,
                    share_prefix=not base_model.is_activation_checkpointing,
                )
                with torch.autocast(device.type, torch.bfloat16, enabled=base_model.dtype == torch.bfloat16):
                    log_probabilities_N, _ = packed_log_probabilities(model, base_model, packed)
                chunk_loss = -log_probabilities_N.float().mean() * len(chunk) / len(order)
                chunk_loss.backward()
                loss += chunk_loss.item()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            report.update(steps=step, loss=loss)
            progress.set_postfix(loss=f"{loss:.3f}", in_form=f"{report['format_validity']:.0%}")
            if should_stop():
                break
            if step % CHECK_EVERY_STEPS == 0 or step == max_steps:
                report["format_validity"] = sampled_format_validity(model, reader, cells)
                model.train()
                if report["format_validity"] >= threshold:
                    break
    finally:
        progress.close()
        vars(base_model).pop("forward", None)  # the fused head closes over settings of this stage only
    return report


def check_joinable(folder: Path, config: PeftConfig) -> None:
    """`InputError` for an adapter that `join_adapters` could not put together with another one."""
    odd = [name for name in UNJOINABLE if getattr(config, name, None)]
    if not isinstance(config, LoraConfig) or odd or isinstance(config.target_modules, str):
        kind = odd[0] if odd else "target_modules as a pattern" if isinstance(config, LoraConfig) else config.peft_type
        raise InputError(
            f"{folder}: an adapter with {kind} cannot be trained further here, for it is joined with the new one in "
            "the end; merge it into its model (PEFT's merge_and_unload) and start from that"
        )


def join_adapters(base_model: PreTrainedModel, folders: Sequence[Path]) -> PeftModel:
    """One LoRA adapter that does what those in `folders` do together: B A = [B1 B2 ...] [A1; A2; ...].

    Its rank is the sum of their ranks. What GRPO learnt stands on the warm start; joined, one adapter on the plain base
    model is all that a user of the policy has to load.
    """
    names = [f"part{i}" for i in range(len(folders))]
    model = PeftModel.from_pretrained(base_model, folders[0], adapter_name=names[0])
    for name, folder in zip(names[1:], folders[1:], strict=True):
        model.load_adapter(folder, name)
    model.peft_config[names[0]].use_rslora = False  # its scaling is in the factors by now, and must not come twice
    model.add_weighted_adapter(names, [1.0] * len(names), "default", combination_type="cat")
    model.set_adapter("default")
    for name in names:
        model.delete_adapter(name)
    return model.eval()
