"""Teaches the form of a reply and nothing else: supervised on well-formed replies that prefer no answer.

A task gives prompts, and for each of them replies that differ in their answer alone. All replies to a prompt are in the
batch together, so no label leaks: the best that the model can do is to write a well-formed reply and give all answers
the same probability. GRPO then starts with readable answers and with variance in every group.

Axes: N scored tokens.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from peft import LoraConfig, PeftModel
from tqdm import tqdm
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from llm_policy import adapters, processes
from llm_policy.chat import Messages, Reader, reply_token_ids
from llm_policy.checkpoints import COMPLETE_MARK, damage, read_state, written_whole
from llm_policy.errors import InputError
from llm_policy.grpo.arguments import WarmStartArguments
from llm_policy.grpo.packing import may_share_prefix, pack_groups, packed_log_probabilities
from llm_policy.grpo.tree_attention import goes_by_piece
from llm_policy.hardware import give_memory_back
from llm_policy.sampling import common_prefix, evaluating

Lesson = tuple[Messages, Sequence[str]]
"""A prompt and well-formed replies to it that differ in their answer alone."""
IsReply = Callable[[Messages, str], bool]
"""Whether a completion to a prompt is as taught: well-formed, and its answer means something in this task."""

REPORT_FILE = "report.json"
SAMPLED_PROMPTS = 32  # for the estimate of the format validity
CHECK_EVERY_STEPS, CHECKS = 5, 12  # at the shortest, and about so many
# A bound on memory: the embedded model takes 1.3 GB for 1,000 of them, and twice as many are no faster (LOG.md)
TOKENS_PER_PASS = 2048
COMPARED, REPLIES_COMPARED = 12, 4  # lessons of which some are compared, and replies of each
SAME_LOSS = 0.1  # nats a token: so far rounding goes, packed against plain rows


def warm_started(
    model: PreTrainedModel, lora: LoraConfig, reader: Reader, lessons: Sequence[Lesson],
    is_reply: IsReply | None, script: WarmStartArguments, seed: int, folder: Path,
    should_stop: Callable[[], bool], has_begun: bool, made_from: str = "",
) -> tuple[PreTrainedModel, dict]:  # fmt: skip
    """Teach the form where `--warm_start` asks for it; the model that stands on it, and what the warm start reported.

    GRPO then trains a fresh adapter on top: with the warm start's own the first steps were five times as large and the
    policy state-blind for ten of them (LOG.md). An interrupted run finds adapter and report in `folder`, and so does
    another run that shares it.

    Args:
        has_begun: GRPO has taken steps already, which stand on the warm start that was made then, or on none.
        made_from: checksum of model, lessons and settings; what was made from others is refused.
    """
    if processes.from_main((folder / COMPLETE_MARK).exists):
        other = "--warm_start_folder" if script.warm_start_folder and not has_begun else "--output_dir"
        if wrong := processes.from_main(lambda: damage(folder)):
            remedy = "the run stands on it;" if has_begun else f"delete {folder}, or"
            raise InputError(f"{wrong}; {remedy} choose another {other}")
        processes.wait_for_files(folder)
        report = json.loads((folder / REPORT_FILE).read_text())
        if report.get("made_from", made_from) != made_from:
            raise InputError(
                f"{folder}: was made with another model, other lessons or settings; choose another {other}"
            )
        print(f"warm start: taken from {folder}", flush=True)
        return adapters.stood_on(model, folder), report
    if script.warm_start == "always" and has_begun:
        raise InputError(f"{folder}: is gone, and the checkpoints stand on it; choose another --output_dir")
    if script.warm_start == "never" or has_begun or not lessons:  # steps without a warm start: none was needed
        return model, {"steps": 0}
    unfinished = Unfinished(folder.with_name(f"{folder.name}.partial"), made_from)
    if script.warm_start == "auto" and not processes.from_main(lambda: unfinished.state() is not None):
        validity = sampled_format_validity(model, reader, lessons, is_reply)
        needed = script.warm_start_threshold
        print(f"warm start: {validity:.0%} of sampled completions are as taught ({needed:.0%} needed)", flush=True)
        if validity >= needed:
            return model, {"steps": 0, "format_validity": validity}
    is_shared = script.warm_start_folder and processes.is_main()
    with alone_at(folder) if is_shared else nullcontext():
        if is_shared and (folder / COMPLETE_MARK).exists():
            raise InputError(
                f"--warm_start_folder {folder.parent}: another run has just made {folder.name}; start again"
            )
        student = adapters.fresh(model, lora)
        processes.take_from_main(p for p in student.parameters() if p.requires_grad)
        report = teach_format(
            student,
            reader,
            lessons,
            is_reply,
            max_steps=script.warm_start_steps,
            prompts_per_step=script.warm_start_prompts,
            learning_rate=script.warm_start_learning_rate,
            threshold=script.warm_start_threshold,
            seed=seed,
            should_stop=should_stop,
            unfinished=unfinished,
        )
        if should_stop():
            return model, report
        if report["format_validity"] < script.warm_start_threshold and processes.is_main():
            print(
                f"warm start: {report['format_validity']:.0%} are as taught after {report['steps']} steps, not "
                f"{script.warm_start_threshold:.0%}: training goes on from there (--warm_start_steps for more)",
                flush=True,
            )
        if processes.is_main():
            with written_whole(folder):
                adapters.save(student, folder)
                report["made_from"] = made_from
                (folder / REPORT_FILE).write_text(json.dumps(report) + "\n")
            unfinished.file.unlink(missing_ok=True)
        processes.wait_for_files(folder)
    return adapters.stood_on(student.unload(), folder), report


@contextmanager
def alone_at(folder: Path) -> Iterator[None]:
    """`InputError` where another run makes the warm start in `folder` now."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f".{folder.name}.lock"))
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InputError(
            f"--warm_start_folder {folder.parent}: another run is making {folder.name}; start again when it is there, "
            "or name another folder"
        ) from error
    except OSError as error:
        raise InputError(
            f"--warm_start_folder {folder.parent}: cannot be written ({error}); name another folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


def sampled_format_validity(
    model: PeftModel, reader: Reader, lessons: Sequence[Lesson], is_reply: IsReply | None
) -> float:
    """Share of `SAMPLED_PROMPTS` or more sampled completions (temperature 1) that are as the lessons teach them.

    Args:
        is_reply: None: a completion has to be one of the lesson's replies, word for word.
    """
    count = min(SAMPLED_PROMPTS, len(lessons))
    chosen = [lessons[i * len(lessons) // count] for i in range(count)]
    prompts, guesses = [prompt for prompt, _ in chosen], [replies[0] for _, replies in chosen]
    samples = -(-SAMPLED_PROMPTS // len(chosen))
    texts = reader.completions(model, prompts, samples, guesses)
    asked = [chosen[i // samples] for i in range(len(texts))]
    pairs = zip(asked, texts, strict=True)
    return sum(is_reply(p, text) if is_reply else text in replies for (p, replies), text in pairs) / len(texts)


def teach_format(
    model: PeftModel,
    reader: Reader,
    lessons: Sequence[Lesson],
    is_reply: IsReply | None,
    *,
    max_steps: int,
    prompts_per_step: int,
    learning_rate: float,
    threshold: float,
    seed: int,
    should_stop: Callable[[], bool] = lambda: False,
    unfinished: "Unfinished | None" = None,
) -> dict[str, float]:
    """Fine-tune the adapter until `threshold` of sampled completions are as taught, or for `max_steps`.

    Args:
        lessons: prompts to draw from, with the replies that each is taught.
        is_reply: as for `sampled_format_validity`. With None nothing is sampled: the probability of the replies to a
            step's prompts, before the step, says how many would be as taught.
        prompts_per_step: distinct prompts per step, each with all its replies.
        learning_rate: over the second half of `max_steps` it falls linearly to nothing.
        should_stop: asked after every step; True leaves early (the caller then throws the adapter away).
        unfinished: where an interrupted call left off, and where this one leaves what it has.

    Returns:
        `steps`, `loss` (nats per token, last step) and `format_validity` (last check).
    """
    base_model = model.get_base_model()
    add_fused_lm_head(base_model, outputs=("log_probs", "entropy"))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    report = {"steps": 0, "loss": float("nan"), "format_validity": 0.0}
    check_every = max(CHECK_EVERY_STEPS, max_steps // CHECKS)
    if unfinished:
        unfinished.take_up(model, optimizer, generator, report)
    model.train()
    # No total: it usually ends after five steps, and a bar that counts to `max_steps` would promise the longest case.
    what = f"warm start, at most {max_steps} steps"
    is_hidden = not processes.is_main()
    progress = tqdm(desc=what, unit="step", disable=is_hidden, initial=report["steps"], **processes.bar_pace())
    try:
        packed = packs(model, reader, lessons)
        last = max_steps if report["format_validity"] < threshold else 0  # killed between the last step and the end
        for step in range(report["steps"] + 1, last + 1):
            for group in optimizer.param_groups:  # at the full rate a long thought stays unsure
                group["lr"] = learning_rate * min(1.0, 2 * (1 - (step - 1) / max_steps))
            order = torch.randperm(len(lessons), generator=generator)[:prompts_per_step].tolist()
            loss, as_taught = add_gradient(model, reader, [lessons[i] for i in order], packed)
            share_gradient(parameters)
            processes.add_up([loss, as_taught])
            if not math.isfinite(loss):
                remedy = f"lower --warm_start_learning_rate {learning_rate:g}"
                raise InputError(f"warm start, step {step}: the loss is no number; {remedy}")
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            report.update(steps=step, loss=loss.item())
            progress.update()
            progress.set_postfix(loss=f"{report['loss']:.3f}", as_taught=f"{report['format_validity']:.0%}")
            is_due = step % check_every == 0 or step == max_steps
            if (is_left := should_stop()) or is_due:
                if is_due and is_reply is None:
                    report["format_validity"] = as_taught.item()
                elif is_due:
                    report["format_validity"] = sampled_format_validity(model, reader, lessons, is_reply)
                    model.train()
                if unfinished:
                    unfinished.keep(model, optimizer, generator, report)
                if is_left or report["format_validity"] >= threshold:
                    break
    finally:
        progress.close()
        vars(base_model).pop("forward", None)  # the fused head closes over settings of this stage only
        give_memory_back()
    return report


class Unfinished:
    """A file with the state of a warm start that is under way; the main process writes it.

    Args:
        made_from: a file that was made from something else is written over.
    """

    def __init__(self, file: Path, made_from: str) -> None:
        self.file, self.made_from = file, made_from

    def keep(
        self, model: PeftModel, optimizer: torch.optim.Optimizer, generator: torch.Generator, report: dict
    ) -> None:
        if not processes.is_main():
            return
        state = {
            **adapters.learning_state(model, optimizer),
            "made_from": self.made_from,
            "order": generator.get_state(),
            "report": report,
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        writing = self.file.with_name(f"{self.file.name}.partial")
        torch.save(state, writing)
        writing.replace(self.file)

    def state(self) -> dict | None:
        """What the file holds; None, and why in a line, where it is damaged or of another warm start."""
        if not self.file.exists():
            return None
        try:
            state = read_state(self.file)
        except InputError:
            print(f"{self.file}: cannot be read; the warm start begins again", flush=True)
            return None
        if state["made_from"] != self.made_from:
            print(f"{self.file}: of another model, lessons or settings; the warm start begins again", flush=True)
            return None
        return state

    def take_up(
        self, model: PeftModel, optimizer: torch.optim.Optimizer, generator: torch.Generator, report: dict
    ) -> None:
        """Bring everything to where the file left it; nothing where it is of no use."""
        state = self.state()
        if state is None:
            return
        adapters.restore_learning_state(state, model, optimizer)
        generator.set_state(state["order"])
        report.update(state["report"])
        print(f"warm start: goes on after step {report['steps']}", flush=True)


def add_gradient(
    model: PeftModel, reader: Reader, lessons: Sequence[Lesson], packed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the gradient of the lessons' `reply_loss` to the parameters', in passes that all processes share.

    Returns:
        What this process computed of the loss, and of the probability that a lesson's reply, any of them, is sampled.
    """
    device = next(model.parameters()).device
    before = [len(reader.prompt(prompt)) for prompt, _ in lessons]
    replies = [[reply_token_ids(reply, reader.tokenizer) for reply in of_one] for _, of_one in lessons]
    # Those of a pass are alike in length, or much of it would be padding
    order = sorted(range(len(lessons)), key=lambda i: before[i] + max(map(len, replies[i])))
    tokens = [sum(map(len, replies[i])) for i in order]

    def computed(chunk: slice) -> int:
        """Tokens of a pass, with padding; what all prompts begin with is counted for each lesson."""
        if not packed:
            rows = [before[i] + len(reply) for i in order[chunk] for reply in replies[i]]
            return len(rows) * max(rows)
        again = [(len(replies[i]) - 1) * len(common_prefix(replies[i])) for i in order[chunk]]
        return sum(before[i] for i in order[chunk]) + sum(tokens[chunk]) - sum(again)

    at_once = TOKENS_PER_PASS * (4 if device.type == "cuda" else 1)  # a GPU takes more at a time
    chunks = even_parts(len(lessons), processes.count(), lambda chunk: computed(chunk) <= at_once)
    loss, as_taught = (torch.zeros((), device=device) for _ in range(2))
    for chunk in chunks[processes.index() :: processes.count()]:  # not all long ones to the last process
        batch = [(lessons[i][0], reply) for i in order[chunk] for reply in lessons[i][1]]
        log_probabilities = reply_log_probabilities(model, reader, batch, packed)
        chunk_loss = -torch.cat(log_probabilities).mean() * (sum(tokens[chunk]) / sum(tokens))
        chunk_loss.backward()
        loss += chunk_loss.detach()
        as_taught += sum(log_p.detach().sum().exp() for log_p in log_probabilities) / len(lessons)
    return loss, as_taught


def even_parts(count: int, multiple: int, fits: Callable[[slice], bool]) -> list[slice]:
    """As few parts of `count` things as fit, the same number for each of `multiple` processes if it is large enough.

    >>> even_parts(11, 4, lambda part: part.stop - part.start <= 3)
    [slice(0, 2, None), slice(2, 5, None), slice(5, 8, None), slice(8, 11, None)]
    """
    wanted = multiple
    while True:
        bounds = [count * i // wanted for i in range(wanted + 1)]
        parts = [slice(first, end) for first, end in pairwise(bounds) if first < end]
        if all(part.stop - part.start == 1 or fits(part) for part in parts):
            return parts
        wanted += multiple


def reply_loss(
    model: PeftModel, reader: Reader, batch: Sequence[tuple[Messages, str]], packed: bool = True
) -> torch.Tensor:
    """Mean of minus `reply_log_probabilities`, over all tokens."""
    return -torch.cat(reply_log_probabilities(model, reader, batch, packed)).mean()


def reply_log_probabilities(
    model: PeftModel, reader: Reader, batch: Sequence[tuple[Messages, str]], packed: bool
) -> list[torch.Tensor]:
    """Of each token of each reply behind its prompt, in nats.

    Inside `add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy"))`.

    Args:
        packed: the replies of a prompt are one tree; else each has a row of its own.
    """
    base_model, device = model.get_base_model(), next(model.parameters()).device
    prompts = [reader.prompt(prompt) for prompt, _ in batch]
    replies = [reply_token_ids(reply, reader.tokenizer) for _, reply in batch]
    pad = reader.tokenizer.pad_token_id
    with torch.autocast(device.type, torch.bfloat16, enabled=base_model.dtype == torch.bfloat16):
        if packed:
            groups = pack_groups(
                prompts,
                replies,
                pad_token_id=pad,
                device=device,
                share_prefix=may_share_prefix(base_model),
                by_piece=goes_by_piece(base_model),
            )
            log_probabilities_N, _ = packed_log_probabilities(model, base_model, groups)
            return groups.split(log_probabilities_N.float())[0]
        length = max(len(prompt) + len(reply) for prompt, reply in zip(prompts, replies, strict=True))

        def filled(parts: list[list[int]], fill: int) -> torch.Tensor:
            return torch.tensor([[*part, *[fill] * (length - len(part))] for part in parts], device=device)

        pairs = list(zip(prompts, replies, strict=True))
        ids_BT = filled([[*prompt, *reply] for prompt, reply in pairs], pad)
        mask_BT = filled([[1] * (len(prompt) + len(reply)) for prompt, reply in pairs], 0)
        labels_BT = filled([[*[-100] * len(prompt), *reply] for prompt, reply in pairs], -100)
        logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT).logits[:, :-1]
        labels_BT = labels_BT[:, 1:]
        nats_N = torch.nn.functional.cross_entropy(
            logits_BTV.float().flatten(0, 1), labels_BT.flatten(), reduction="none"
        )
        nats_BT = nats_N.view_as(labels_BT)
        return [-nats_T[labels_T != -100] for nats_T, labels_T in zip(nats_BT, labels_BT, strict=True)]


@torch.no_grad()
def packs(model: PeftModel, reader: Reader, lessons: Sequence[Lesson]) -> bool:
    """Whether replies in one row have the loss that they have alone; where not, says so.

    Layers that mix neighbouring tokens (LFM2) see other branches of the tree, and some architectures take no such mask.
    Compared are two short ones of the first lessons, whose trees share a row if any do, and the longest.
    """
    first_ones = [lessons[i] for i in range(min(len(lessons), COMPARED))]  # some tasks make lessons without end
    by_length = sorted(first_ones, key=lambda lesson: len(lesson[1][0]))
    compared = [*by_length[:2], by_length[-1]]
    batch = [(prompt, reply) for prompt, replies in compared for reply in replies[:REPLIES_COMPARED]]
    with evaluating(model):  # under LoRA's dropout no two passes agree
        # One by one: the logits of all their prompts and tokens together took 8 GB with maps of 8x8 cells
        plain_ones = [p for one in batch for p in reply_log_probabilities(model, reader, [one], packed=False)]
        plain, reason = -torch.cat(plain_ones).mean(), ""
        try:
            difference = abs(reply_loss(model, reader, batch) - plain).item()
            reason = f"their losses differ by {difference:.2g}" if difference > SAME_LOSS else ""
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
    if reason and processes.is_main():
        print(f"replies are taught in rows of their own, which is slower: packed, {reason}", flush=True)
    return not reason


def share_gradient(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Add the processes' gradients up; one that had nothing to compute counts as zero."""
    if processes.count() > 1:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        processes.add_up(p.grad for p in parameters)
