"""The options of train_policy_gradient.py, their checks, and the configuration that belongs to an environment."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar

from torch import nn

from llm_policy.command_line import parse_arguments, read_option
from llm_policy.environments.gym_env import folder_name, read_env_options, unversioned
from llm_policy.errors import InputError, check_choices
from llm_policy.models import DTYPES, EMBEDDED_MODEL
from llm_policy.policy_gradient.text_encoder import POOLINGS
from llm_policy.run_files import ROOT

EXTRA = "requirements-policy-gradient.txt"
ALGORITHMS = ("ppo", "trpo")
ACTORS = ("mlp", "frozen", "lora", "random")
ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}
SCHEDULES = ("constant", "linear")
CONFIGS = ROOT / "configs" / "policy_gradient"
# What only one of the algorithms has; under the other it would be read by nobody
OWN_OPTIONS = {
    "ppo": ("n_epochs", "clip_range", "ent_coef", "vf_coef", "max_grad_norm"),
    "trpo": ("cg_max_steps", "cg_damping", "n_critic_updates", "line_search_max_iter", "sub_sampling_factor"),
}
# What only these actors have
MODEL_OPTIONS = {
    ("frozen", "lora", "random"): ("model_name_or_path", "dtype", "pooling", "center"),
    ("lora",): ("lora_r", "lora_alpha"),
}
SHARED_OPTIONS = ("n_steps", "batch_size", "gamma", "gae_lambda", "target_kl")
# What may differ when a run is resumed: where things are, and how often it says and saves something
FREE_TO_CHANGE = {"output_dir", "resume_from_checkpoint", "logging_steps", "save_steps"}
SAVES = 20  # checkpoints of a run
LINES = 200  # of metrics.jsonl
STATES_PER_GRAPH = 64


@dataclass
class PolicyGradientArguments:
    """What is trained on what, and with which settings. Those of the algorithms have stable-baselines3's names."""

    rare: ClassVar[tuple[str, ...]] = (
        *OWN_OPTIONS["ppo"], *OWN_OPTIONS["trpo"], "gae_lambda", "target_kl", "use_sde", "sde_sample_freq",
        "log_std_init", "ortho_init", "lora_r", "lora_alpha",
    )  # fmt: skip

    env_id: str = field(default="CartPole-v1", metadata={"help": "A Gymnasium environment."})
    algorithm: str = field(default="ppo", metadata={"help": f"{' or '.join(ALGORITHMS)}."})
    actor: str = field(
        default="mlp",
        metadata={
            "help": "mlp: a network that reads numbers; frozen: a language model that reads text; lora: the same, "
            "trained through an adapter; random: the same with random weights, the control."
        },
    )
    # A YAML file may hold a mapping; with None among the types, the parser takes text
    env_options: dict | str | None = field(
        default="{}", metadata={"help": 'JSON for gymnasium.make: {"is_slippery": false}.'}
    )
    horizon_steps: int | None = field(
        default=None, metadata={"help": "Step limit. Default: the environment's, else 100."}
    )
    model_name_or_path: str = field(
        default=str(EMBEDDED_MODEL), metadata={"help": "Hub id, folder or GGUF file of the language model."}
    )
    dtype: str = field(
        default="auto",
        metadata={
            "help": "Its weights: float32, bfloat16, float16; auto: float32 for lora, else the faster one, measured."
        },
    )
    pooling: str = field(default="last", metadata={"help": "Of its hidden states: last token, or mean over the text."})
    center: bool = field(
        default=True, metadata={"help": "Subtract what its vectors of all states have in common, and scale the rest."}
    )
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapter."})
    lora_alpha: int = field(default=32, metadata={"help": "Its scale is lora_alpha / lora_r."})
    timesteps: int = field(default=100_000, metadata={"help": "Steps in all copies of the environment together."})
    max_episodes: int | None = field(default=None, metadata={"help": "Ends the training earlier, after so many."})
    n_envs: int = field(default=1, metadata={"help": "Copies of the environment."})
    normalize: bool = field(
        default=False,
        metadata={"help": "Scale observations and rewards by running statistics. Text is always made of scaled ones."},
    )
    n_steps: int | None = field(default=None, metadata={"help": "Steps of each copy between updates."})
    batch_size: int | None = field(default=None, metadata={"help": "Steps per minibatch (trpo: of the critic)."})
    learning_rate: float | None = field(
        default=None, metadata={"help": "Of Adam (trpo: of the critic). Default: stable-baselines3's."}
    )
    schedule: str = field(
        default="constant", metadata={"help": "constant, or linear: learning rate and clip range fall to 0."}
    )
    gamma: float = field(default=0.99, metadata={"help": "Discount."})
    gae_lambda: float | None = field(default=None, metadata={"help": "Of generalised advantage estimation."})
    target_kl: float | None = field(
        default=None,
        metadata={"help": "trpo: largest KL of an update; ppo: an update stops beyond 1.5 times this."},
    )
    n_epochs: int | None = field(default=None, metadata={"help": "ppo: passes over the steps of an update."})
    clip_range: float | None = field(default=None, metadata={"help": "ppo: how far the ratio may move from 1."})
    ent_coef: float | None = field(default=None, metadata={"help": "ppo: weight of the entropy."})
    vf_coef: float | None = field(default=None, metadata={"help": "ppo: weight of the critic's loss."})
    max_grad_norm: float | None = field(default=None, metadata={"help": "ppo: largest norm of a gradient."})
    cg_max_steps: int | None = field(default=None, metadata={"help": "trpo: steps of conjugate gradients."})
    cg_damping: float | None = field(default=None, metadata={"help": "trpo: added to the Fisher matrix's diagonal."})
    n_critic_updates: int | None = field(default=None, metadata={"help": "trpo: the critic's passes per update."})
    line_search_max_iter: int | None = field(default=None, metadata={"help": "trpo: shorter steps tried at most."})
    sub_sampling_factor: int | None = field(
        default=None,
        metadata={
            "help": "trpo: the actor's update takes one step in so many. Default: 1; with lora it leaves "
            f"{STATES_PER_GRAPH} steps, all in memory at once.",
        },
    )
    use_sde: bool = field(default=False, metadata={"help": "State-dependent exploration, for continuous actions."})
    sde_sample_freq: int = field(default=-1, metadata={"help": "Steps between its draws; -1: once per update."})
    hidden_sizes: list[int] = field(
        default_factory=lambda: [64, 64], metadata={"help": "Layers of the actor's head and of the critic."}
    )
    activation: str = field(default="tanh", metadata={"help": f"{' or '.join(ACTIVATIONS)}."})
    log_std_init: float = field(default=0.0, metadata={"help": "First log standard deviation of continuous actions."})
    ortho_init: bool = field(default=True, metadata={"help": "Orthogonal weights at the start, heads only."})
    judge_episodes: int = field(default=20, metadata={"help": "Fresh episodes per policy that has no exact score."})
    seed: int = field(default=0, metadata={"help": "Of weights, actions, minibatches and environments."})
    logging_steps: int | None = field(
        default=None, metadata={"help": f"Steps between lines. Default: at most {LINES} in a run."}
    )
    save_steps: int | None = field(
        default=None, metadata={"help": f"Steps between checkpoints. Default: at most {SAVES}."}
    )
    output_dir: str | None = field(
        default=None, metadata={"help": "Default: runs/policy_gradient/ENV_ID-ALGORITHM-ACTOR."}
    )
    resume_from_checkpoint: str | None = field(default=None, metadata={"help": "auto: resume, or show the result."})

    def __post_init__(self) -> None:
        self.env_options, self.options = read_env_options(self.env_options)
        check_choices(
            self,
            {
                "algorithm": ALGORITHMS, "actor": ACTORS, "pooling": POOLINGS, "activation": ACTIVATIONS,
                "schedule": SCHEDULES, "dtype": DTYPES,
            },
        )  # fmt: skip
        if self.resume_from_checkpoint is not None:
            check_choices(self, {"resume_from_checkpoint": ("auto",)})
        for algorithm, names in OWN_OPTIONS.items():
            for name in names:
                if algorithm != self.algorithm and getattr(self, name) is not None:
                    raise InputError(f"--{name} {getattr(self, name)}: is for --algorithm {algorithm} alone")
        defaults = {f.name: f.default for f in fields(self)}
        for actors, own in MODEL_OPTIONS.items():
            for name in own if self.actor not in actors else ():
                if getattr(self, name) != defaults[name]:
                    raise InputError(f"--{name} {getattr(self, name)}: is for --actor {' or '.join(actors)} alone")
        if self.sde_sample_freq != defaults["sde_sample_freq"] and not self.use_sde:
            raise InputError(f"--sde_sample_freq {self.sde_sample_freq}: is for --use_sde true")
        if self.sde_sample_freq == 0:
            raise InputError("--sde_sample_freq 0: expected -1, once per rollout, or at least 1 step")
        if not self.hidden_sizes:
            raise InputError("--hidden_sizes: expected at least one layer")
        if self.output_dir is None:
            self.output_dir = f"runs/policy_gradient/{folder_name(self.env_id)}-{self.algorithm}-{self.actor}"

    @property
    def reads_text(self) -> bool:
        return self.actor != "mlp"

    def algorithm_options(self) -> dict:
        """What was named of the algorithm's own options; the others keep stable-baselines3's defaults."""
        names = [*SHARED_OPTIONS, *OWN_OPTIONS[self.algorithm]]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def default_config(env_id: str, algorithm: str, actor: str = "mlp") -> Path | None:
    """The settings for an environment, whatever its version, and for an actor if it has its own; None without any."""
    name = unversioned(env_id).removesuffix("8x8")  # with the namespace of an environment of one's own
    files = [CONFIGS / algorithm / f"{name}{suffix}.yaml" for suffix in (f"-{actor}", "")]
    return next((file for file in files if file.is_file()), None)


def read_arguments(argv: Sequence[str], description: str) -> tuple[PolicyGradientArguments, str]:
    """Command line and YAML file -> arguments, and the file's path. One-line `InputError`s."""
    (arguments,), config = read_groups(argv, (PolicyGradientArguments,), description)
    return arguments, config


def read_groups(argv: Sequence[str], groups: Sequence[type], description: str) -> tuple[list, str]:
    """The same with further groups of options."""
    defaults = {f.name: f.default for f in fields(PolicyGradientArguments)}
    names = ("env_id", "algorithm", "actor")
    env_id, algorithm, actor = (read_option(argv, name, default=str(defaults[name])) for name in names)
    default = default_config(env_id, algorithm, actor) if algorithm in ALGORITHMS and actor in ACTORS else None
    return parse_arguments(argv, groups, description=description, default_config=default)
