"""PPO or TRPO with a network or a language model as the actor, judged as everything here.

    python train_policy_gradient.py                                        # CartPole-v1, PPO, a network: half a minute
    python train_policy_gradient.py --algorithm trpo --actor frozen        # a language model reads the state as text
    python train_policy_gradient.py --env_id FrozenLake-v1 --actor frozen  # judged exactly
    python train_policy_gradient.py --env_id HalfCheetah-v5                # needs requirements-mujoco.txt
    python train_policy_gradient.py --resume_from_checkpoint auto          # after a kill; or shows the result

Needs requirements-policy-gradient.txt. Without --config the settings are those of configs/policy_gradient/ for the
algorithm and the environment; where there are none, those of stable-baselines3. Results: docs/policy_gradient.md.
"""

from llm_policy.startup import announce

announce(__name__, "PyTorch and Transformers")

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from llm_policy import run_files
from llm_policy.checkpoints import is_finished
from llm_policy.errors import check_alone, disk_errors, packages_of, run_script
from llm_policy.interruption import RESUME
from llm_policy.policy_gradient.arguments import EXTRA, FREE_TO_CHANGE, read_arguments


@disk_errors(f"free space, then {RESUME}")
def main(argv: Sequence[str] | None = None) -> int:
    arguments, config = read_arguments(sys.argv[1:] if argv is None else list(argv), __doc__)
    check_alone()
    folder = Path(str(arguments.output_dir))
    if is_finished(folder, [arguments], arguments.resume_from_checkpoint, FREE_TO_CHANGE):
        return 0
    with packages_of(EXTRA):
        run = importlib.import_module("llm_policy.policy_gradient.run")
    with run_files.only_process_in(folder):
        run.train(folder, arguments, config)
    return 0


if __name__ == "__main__":
    run_script(main)
