"""Where the seconds of train_policy_gradient.py go: environment, policy, reading of texts, update.

    python benchmarks/profile_policy_gradient.py                                        # CartPole, PPO, a network
    python benchmarks/profile_policy_gradient.py --actor frozen --timesteps 4096 \\
        --output results/speed/policy_gradient/cart_pole_ppo_frozen.json

Takes the options of train_policy_gradient.py. What a line holds is not in the lines above it. Needs
requirements-policy-gradient.txt.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llm_policy.startup import announce

announce(__name__, "PyTorch and Transformers")

from figures import check_output, save_figures

from llm_policy.errors import packages_of, run_script
from llm_policy.hardware import take_granted_threads
from llm_policy.policy_gradient.arguments import EXTRA, PolicyGradientArguments, read_groups

PARTS = {  # name -> what it is
    "environment": "steps of the environments, with scaling and time limits",
    "reading": "texts to vectors of the language model, those that are known included",
    "policy": "the rest of choosing an action: networks, drawing",
    "update": "gradients and steps of the optimiser, less the reading in it",
}


@dataclass
class ProfileArguments:
    output: str | None = field(default=None, metadata={"help": "JSON file for the figures."})


class Clock:
    """Seconds per part. A part that begins inside another one interrupts it."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._open: list[tuple[str, float]] = []

    def timed(self, part: str, function: Callable) -> Callable:
        def run(*arguments, **options):
            now = time.perf_counter()
            if self._open:
                self._close(now)
            self._open.append((part, now))
            try:
                return function(*arguments, **options)
            finally:
                self._close(time.perf_counter())
                self._open.pop()
                if self._open:
                    self._open[-1] = (self._open[-1][0], time.perf_counter())

        return run

    def _close(self, now: float) -> None:
        part, since = self._open[-1]
        self.seconds[part] += now - since


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    (own, arguments), _ = read_groups(argv, (ProfileArguments, PolicyGradientArguments), __doc__)
    check_output(own.output)
    with packages_of(EXTRA):
        from stable_baselines3.common.logger import Logger

        from llm_policy.policy_gradient.learner import make_learner
    take_granted_threads(useful=None if arguments.reads_text else 1)
    learner = make_learner(arguments)
    algorithm, clock = learner.algorithm, Clock()
    algorithm.set_logger(Logger(None, []))
    learner.env.step = clock.timed("environment", learner.env.step)
    learner.policy.forward = clock.timed("policy", learner.policy.forward)
    algorithm.train = clock.timed("update", algorithm.train)
    if learner.reader is not None:
        learner.reader.encoder.read = clock.timed("reading", learner.reader.encoder.read)
    started = time.perf_counter()
    algorithm.learn(arguments.timesteps)
    whole = time.perf_counter() - started
    steps = algorithm.num_timesteps
    what = f"{arguments.env_id}, {arguments.algorithm}, actor {arguments.actor}"
    print(f"{what}: {steps:,} steps, {steps / whole:,.0f} per second")
    shares = {part: seconds / whole for part, seconds in clock.seconds.items()}
    shares["rest"] = 1 - sum(shares.values())
    for part, share in shares.items():
        print(f"{part:12} {share:4.0%}  {PARTS.get(part, 'the loop around it')}")
    if own.output:
        figures = {"steps": steps, "seconds": whole, "steps_per_second": steps / whole, "shares": shares}
        if learner.reader is not None:
            figures["cache_hit_rate"] = learner.reader.encoder.hit_rate
        save_figures(own.output, figures, on_gpu=algorithm.device.type == "cuda")


if __name__ == "__main__":
    run_script(main)
