"""What a search prints while it runs, and what its answers cost."""

from collections.abc import Mapping, Sequence

import numpy as np

from llm_policy.policy_search.answer_log import AnswerLog
from llm_policy.policy_search.search import SearchSettings, Step
from llm_policy.tables import counted


def progress_line(step: Step, settings: SearchSettings, log: AnswerLog) -> str | None:
    """One line per iteration, and one for the whole warm-up."""
    if step.iteration < 0:
        return None
    if step.iteration == 0:
        return f"warm-up: {settings.warm_up} random policies, best mean return {step.best_mean:.4g}"
    attempts = [log.answer(step.iteration, attempt) for attempt in range(settings.retries + 1)]
    answers = [record for record in attempts if record is not None]
    if step.returns is None:
        outcome = f"failed, {step.error}"
    else:
        outcome = f"return {np.mean(step.returns):.4g}{' (repeated policy)' if step.is_repeat else ''}"
    return (
        f"iteration {step.iteration}/{settings.iterations}: {outcome}; best {step.best_mean:.4g}; "
        f"{counted(len(answers), 'call')}, {sum(record['tokens_out'] for record in answers)} tokens out, "
        f"{sum(record['seconds'] for record in answers):.1f} s"
    )


def cost_of(log: AnswerLog, steps: Sequence[Step], settings: SearchSettings, seconds: float) -> dict:
    """What the answers cost, those from before a kill included; `seconds` is the whole time of this call."""
    answers = log.answers
    return {
        "calls": len(answers),
        "tokens_in": sum(record["tokens_in"] for record in answers),
        "tokens_out": sum(record["tokens_out"] for record in answers),
        "answer_seconds": round(sum(record["seconds"] for record in answers), 1),
        "seconds": round(seconds, 1),
        "episodes": steps[-1].episodes,
        "unusable_answers": sum(record["error"] is not None for record in answers),
        "failed_iterations": sum(step.returns is None for step in steps),
        "repeated_policies": sum(step.is_repeat for step in steps if step.iteration > 0),
        "iterations": settings.iterations,
    }


def cost_text(cost: Mapping) -> str:
    return (
        "cost: {calls} calls, {tokens_in} tokens in, {tokens_out} out, {answer_seconds} s of answers, {seconds} s "
        "in this call; {unusable_answers} answers could not be used, {failed_iterations} of {iterations} iterations "
        "failed, {repeated_policies} repeated a policy"
    ).format(**cost)
