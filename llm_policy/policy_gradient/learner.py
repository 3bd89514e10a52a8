"""Arguments -> environment, actor and algorithm; and all that a run needs to go on, as one file.

PPO is stable-baselines3's, TRPO sb3-contrib's; of neither is anything written here but what trpo.py says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path

import numpy as np
import torch
from gymnasium.spaces import Discrete
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from sb3_contrib import TRPO
from stable_baselines3 import PPO
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize
from transformers import AutoModelForCausalLM

from llm_policy.adapters import check_head
from llm_policy.environments.gym_env import GymEnvironment, seed_of
from llm_policy.errors import InputError
from llm_policy.hardware import cuda_random_states, restore_cuda_random_states, this_device
from llm_policy.interruption import RESUME
from llm_policy.models import context_tokens, load_model, load_tokenizer
from llm_policy.number_format import faster_format
from llm_policy.policy_gradient.arguments import ACTIVATIONS, STATES_PER_GRAPH, PolicyGradientArguments
from llm_policy.policy_gradient.environments import (
    EnvironmentSpec,
    Replayable,
    make_vec_env,
    set_statistics,
    statistics_of,
)
from llm_policy.policy_gradient.policy import Policy, StateReader
from llm_policy.policy_gradient.state_text import text_of_states
from llm_policy.policy_gradient.text_encoder import TextEncoder
from llm_policy.policy_gradient.trpo import FewPassesTRPO
from llm_policy.run_files import EVALUATION_FILE, let_umask_decide, run_settings

LIKELY_STATES = 64  # whose texts say what all texts have in common
POLICY_FILE, STATISTICS_FILE, STATE_FILE = "policy.safetensors", "normalizer.json", "training_state.pt"


@dataclass
class Learner:
    """What trains: an algorithm of stable-baselines3, its environments, and the reader if its actor reads text."""

    algorithm: PPO | TRPO
    env: VecNormalize
    environment: GymEnvironment
    reader: StateReader | None

    @property
    def policy(self) -> Policy:
        policy = self.algorithm.policy
        assert isinstance(policy, Policy)
        return policy


def spec_of(arguments: PolicyGradientArguments) -> EnvironmentSpec:
    return EnvironmentSpec(arguments.env_id, arguments.options, arguments.horizon_steps)


def training_env(arguments: PolicyGradientArguments, count: int) -> VecNormalize:
    return make_vec_env(
        spec_of(arguments),
        count,
        normalizes_observations=arguments.normalize or arguments.reads_text,
        normalizes_rewards=arguments.normalize,
        gamma=arguments.gamma,
    )


def make_learner(arguments: PolicyGradientArguments) -> Learner:
    """The learner at its first step.

    `InputError` for spaces that no algorithm takes, a rollout or a batch that does not come out even, and a model that
    cannot be loaded or reads less than a state.
    """
    environment = spec_of(arguments).make()
    if isinstance(environment.env.action_space, Discrete):
        for name in ("use_sde", "log_std_init"):
            if value := getattr(arguments, name):
                given = f"--{name} {str(value).lower()}"
                raise InputError(f"{given}: {arguments.env_id} has discrete actions; it is for continuous ones")
    make: type[PPO] | type[TRPO] = PPO if arguments.algorithm == "ppo" else FewPassesTRPO
    defaults = {name: parameter.default for name, parameter in signature(make).parameters.items()}
    options = {name: defaults[name] for name in ("n_steps", "batch_size")} | arguments.algorithm_options()
    rollout = options["n_steps"] * arguments.n_envs
    check_rollout(rollout, options["batch_size"], arguments)
    env = training_env(arguments, arguments.n_envs)
    torch.manual_seed(arguments.seed)
    reader = make_reader(arguments, environment, env) if arguments.reads_text else None
    if make is FewPassesTRPO and arguments.actor == "lora":
        options.setdefault("sub_sampling_factor", max(1, rollout // STATES_PER_GRAPH))
    rate: float | LinearSchedule = arguments.learning_rate or defaults["learning_rate"]
    if arguments.schedule == "linear":
        rate = LinearSchedule(rate, 0.0, 1.0)
        if make is PPO:
            options["clip_range"] = LinearSchedule(options.get("clip_range", defaults["clip_range"]), 0.0, 1.0)
    algorithm = make(
        Policy,
        env,
        learning_rate=rate,
        use_sde=arguments.use_sde,
        sde_sample_freq=arguments.sde_sample_freq,
        policy_kwargs={
            "reader": reader,
            "net_arch": list(arguments.hidden_sizes),
            "activation_fn": ACTIVATIONS[arguments.activation],
            "log_std_init": arguments.log_std_init,
            "ortho_init": arguments.ortho_init,
        },
        seed=arguments.seed,
        device="cpu" if reader is None else reader.encoder.device,
        **options,
    )
    env.seed(seed_of(arguments.seed, "environments"))  # copies count on from it: --seed 1 and 2 would share them
    return Learner(algorithm, env, environment, reader)


def check_rollout(steps: int, batch_size: int, arguments: PolicyGradientArguments) -> None:
    """`InputError` where an update has no whole number of minibatches, too few steps, or is longer than the run."""
    if steps < 2:
        raise InputError(f"--n_steps, --n_envs: an update has {steps} step; expected at least 2")
    if arguments.algorithm == "ppo" and batch_size < 2:
        raise InputError(f"--batch_size {batch_size}: expected at least 2, because advantages are normalised")
    factor = arguments.sub_sampling_factor or 1
    if -(-steps // factor) < 2:
        raise InputError(f"--sub_sampling_factor {factor}: leaves 1 of an update's {steps} steps; expected at least 2")
    if steps % batch_size:
        raise InputError(
            f"--batch_size {batch_size}: an update has {steps} steps (n_steps {steps // arguments.n_envs} x n_envs "
            f"{arguments.n_envs}); expected a divisor of that"
        )
    if arguments.timesteps < steps:
        raise InputError(
            f"--timesteps {arguments.timesteps}: one update alone takes {steps} (n_steps {steps // arguments.n_envs} x "
            f"n_envs {arguments.n_envs}); give more, or lower one of these"
        )
    if arguments.schedule == "linear" and arguments.timesteps == steps:
        raise InputError(
            f"--schedule linear with --timesteps {steps}: is one update, and the last one's rate is 0; give more, or "
            "--schedule constant"
        )


def make_reader(arguments: PolicyGradientArguments, environment: GymEnvironment, env: VecNormalize) -> StateReader:
    """The language model that `--actor` names. Weights that are trained are a LoRA adapter's in float32."""
    name, is_trained = arguments.model_name_or_path, arguments.actor == "lora"
    device, dtype = this_device(), arguments.dtype
    if dtype == "auto":  # a run that is resumed or judged keeps its format: another one reads otherwise
        begun_with = run_settings(str(arguments.output_dir)).get("dtype")
        dtype = begun_with or ("float32" if is_trained else faster_format(device.type == "cuda")[0])
    tokenizer = load_tokenizer(name)
    # The attention kernels have no second derivative, which TRPO's Fisher products need
    attention = "eager" if is_trained and arguments.algorithm == "trpo" else None
    model = load_model(name, dtype, attention, device=device)
    if isinstance(model, PeftModel):
        check_head(model, f"--model_name_or_path {name}")
        model = model.merge_and_unload()
    model.requires_grad_(False)
    if arguments.actor == "random":
        model = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype).to(device).requires_grad_(False)
    if is_trained:
        lora = LoraConfig(
            r=arguments.lora_r,
            lora_alpha=arguments.lora_alpha,
            lora_dropout=0.0,  # else the ratio is not 1 before a step
            target_modules="all-linear",
            task_type=TaskType.CAUSAL_LM,
        )
        get_peft_model(model, lora)  # puts the adapter into the model itself
    text_of = text_of_states(environment)
    reader = StateReader(text_of, TextEncoder(model, tokenizer, arguments.pooling))
    check_length(reader, env, context_tokens(model))
    if arguments.center:
        reader.encoder.center([text_of(vector) for vector in likely_vectors(environment, env)])
    return reader


def likely_vectors(environment: GymEnvironment, env: VecNormalize) -> np.ndarray:
    """One-hot rows of all states, or of some spread over them; or normal ones, as scaled observations are."""
    space = env.observation_space
    if isinstance(environment.env.observation_space, Discrete):
        states = space.shape[0]
        chosen = np.unique(np.linspace(0, states - 1, LIKELY_STATES).astype(int))
        rows_NS = np.zeros((len(chosen), states))
        rows_NS[np.arange(len(chosen)), chosen] = 1.0
        return rows_NS
    return np.random.default_rng(0).normal(size=(LIKELY_STATES, *space.shape))


def check_length(reader: StateReader, env: VecNormalize, context: int) -> None:
    """`InputError` where a state with long numbers is more than the model can read."""
    text = reader.text_of(np.full(env.observation_space.shape, -9.99))
    tokens = len(reader.encoder.tokenizer(text)["input_ids"])
    if tokens > context:
        raise InputError(
            f"a state is {tokens} tokens of text ({text!r:.60}), and the model reads {context}; take another model"
        )


# What is trained, on disk ---------------------------------------------------------------------------------------


def save_policy(learner: Learner, folder: Path) -> None:
    """`policy.safetensors`: heads, critic, adapter. The language model itself is not in it."""
    save_file({name: tensor.contiguous() for name, tensor in learner.policy.state_dict().items()}, folder / POLICY_FILE)
    let_umask_decide(folder / POLICY_FILE)


def load_policy(learner: Learner, folder: Path) -> None:
    """`InputError` for a file that is gone, damaged, or of another policy."""
    file = folder / POLICY_FILE
    if not file.exists() and not (folder / EVALUATION_FILE).exists():
        raise InputError(f"{folder}: is not finished; {RESUME} resumes it")
    try:
        tensors = load_file(file)
        learner.policy.load_state_dict(tensors)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise InputError(f"{file}: cannot be loaded ({' '.join(str(error).split())[:200]}); train again") from error
    if bad := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        raise InputError(f"{file}: {bad[0]} holds values that are no numbers (nan or inf); train again")


def training_state(learner: Learner, extra: Mapping) -> dict:
    """All that a run needs to go on as if it had not been stopped, in tensors and plain values."""
    algorithm, env = learner.algorithm, learner.env
    # numpy's legacy generator shuffles minibatches
    kind, keys, *rest = np.random.get_state()
    return {
        "policy": learner.policy.state_dict(),
        "optimizer": learner.policy.optimizer.state_dict(),
        "timesteps": algorithm.num_timesteps,
        "updates": algorithm._n_updates,
        "last_observations": torch.from_numpy(np.array(algorithm._last_obs)),
        "last_episode_starts": torch.from_numpy(np.array(algorithm._last_episode_starts)),
        "statistics": statistics_of(env),
        "discounted_returns": torch.from_numpy(np.array(env.returns)),
        "environments": [wrapper.state() for wrapper in replayables(env)],
        "generators": {
            "torch": torch.get_rng_state(),
            "cuda": cuda_random_states(),
            "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
        },
        "exploration": {name: getattr(learner.policy.action_dist, name) for name in _noise_of(learner)},
        "extra": dict(extra),
    }


def _noise_of(learner: Learner) -> tuple[str, ...]:
    """What state-dependent exploration has drawn for the steps until the next update."""
    return ("exploration_mat", "exploration_matrices") if learner.policy.use_sde else ()


def restore_training(learner: Learner, state: Mapping) -> dict:
    """The inverse of `training_state` but for `restore_chance`, on a learner of the same arguments; returns `extra`."""
    algorithm, env = learner.algorithm, learner.env
    learner.policy.load_state_dict(state["policy"])
    learner.policy.optimizer.load_state_dict(state["optimizer"])
    env.reset()  # makes what the next lines fill
    for wrapper, episode in zip(replayables(env), state["environments"], strict=True):
        wrapper.restore(episode)
    set_statistics(env, state["statistics"])
    env.returns = state["discounted_returns"].numpy()
    algorithm.num_timesteps, algorithm._n_updates = state["timesteps"], state["updates"]
    algorithm._last_obs = state["last_observations"].numpy()
    algorithm._last_episode_starts = state["last_episode_starts"].numpy()
    return state["extra"]


def restore_chance(learner: Learner, state: Mapping) -> None:
    """The random numbers of `training_state`, once the algorithm has drawn what it draws before a rollout."""
    generators = state["generators"]
    torch.set_rng_state(generators["torch"])
    restore_cuda_random_states(generators["cuda"])
    kind, keys, *rest = generators["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    for name in _noise_of(learner):
        setattr(learner.policy.action_dist, name, state["exploration"][name].to(learner.policy.device))


def replayables(env: VecNormalize) -> list[Replayable]:
    """The outermost wrapper of each copy."""
    return list(env.unwrapped.envs)
