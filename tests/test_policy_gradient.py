"""PPO and TRPO: what the actors may not do to a model, known figures of the algorithms, the script and its files."""

import copy
import io
import json
import math
import os
import shutil
import signal
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import build_tiny_model
from torch.testing import assert_close
from tqdm import tqdm

pytest.importorskip("sb3_contrib", reason="requirements-policy-gradient.txt")

from peft.tuners.lora import LoraLayer
from sb3_contrib import TRPO
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import GPT2Config, GPT2LMHeadModel

import evaluate_policy
from llm_policy.environments.gym_env import make_gym_environment
from llm_policy.errors import EXIT_INTERRUPTED, InputError
from llm_policy.models import load_model, load_tokenizer
from llm_policy.policy_gradient import judge, progress, run
from llm_policy.policy_gradient import learner as learners
from llm_policy.policy_gradient.arguments import CONFIGS, PolicyGradientArguments, default_config, read_arguments
from llm_policy.policy_gradient.environments import (
    EnvironmentSpec,
    check_spaces,
    make_vec_env,
    set_statistics,
    statistics_of,
)
from llm_policy.policy_gradient.judge import load_run, policy_table, table_of
from llm_policy.policy_gradient.learner import make_learner
from llm_policy.policy_gradient.trpo import FewPassesTRPO
from llm_policy.run_files import METRICS_FILE
from train_policy_gradient import main

ACTORS = ("mlp", "frozen", "lora", "random")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama", seed=7)  # "random" has 0


def small(model, folder, *more) -> list[str]:
    """Arguments of a run of seconds; what stands in `more` wins."""
    options = {
        "env_id": "CartPole-v1", "timesteps": 256, "n_envs": 2, "n_steps": 32, "batch_size": 32, "judge_episodes": 3,
        "output_dir": folder, "schedule": "constant", "horizon_steps": 30,
    }  # fmt: skip
    if any(actor in more for actor in ACTORS[1:]):
        options["model_name_or_path"] = model
    if "lora" in more:
        options["lora_r"] = 2
    return [str(text) for name, value in options.items() for text in (f"--{name}", value)] + [*map(str, more)]


def arguments_of(model, *more) -> PolicyGradientArguments:
    return read_arguments(small(model, "unused", *more), "a test")[0]


class Counting(gymnasium.Env):
    """Ends by its limit alone; a reward of 1 per step. Options make it fail or say what is no number."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fails: str = "") -> None:
        self.fails, self.steps = fails, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.normal(size=2).astype(np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.fails == "raises":
            raise ZeroDivisionError("by design")
        observation = np.full(2, np.nan if self.fails == "state" else self.steps, np.float32)
        observation = {"no state": None, "long state": np.zeros(3)}.get(self.fails, observation)
        return observation, {"reward": math.inf, "no reward": None}.get(self.fails, 1.0), False, False, {}


gymnasium.register("Counting-v0", Counting, max_episode_steps=10)


# The actors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["ppo", "trpo"])
@pytest.mark.parametrize("actor", ["frozen", "lora"])
def test_pretrained_weights_stay_as_they_are(model, algorithm, actor):
    """Neither orthogonal initialisation nor training reaches them; an adapter's do change."""
    learner = make_learner(arguments_of(model, "--actor", actor, "--algorithm", algorithm))
    stored = load_model(model, dtype="float32").get_decoder().state_dict()

    def distances() -> list[float]:
        own = learner.reader.encoder.decoder.state_dict()
        names = {name.replace(".base_layer", ""): name for name in own if "lora_" not in name}
        assert set(names) == set(stored)
        return [float((own[names[name]].float() - stored[name]).abs().max()) for name in stored]

    tolerance = 0.0 if actor == "lora" else 2e-2  # frozen ones may be bfloat16
    assert max(distances()) <= tolerance
    adapter = [parameter.clone() for parameter in learner.reader.encoder.parameters]
    learner.algorithm.learn(128)
    assert max(distances()) <= tolerance
    changed = [not torch.equal(a, b) for a, b in zip(adapter, learner.reader.encoder.parameters, strict=True)]
    assert (actor == "lora") == any(changed)


def test_random_is_the_same_architecture_with_other_weights(model):
    frozen, first, second = (
        make_learner(arguments_of(model, "--actor", actor, "--dtype", "float32", "--seed", seed)).reader.encoder
        for actor, seed in (("frozen", 0), ("random", 0), ("random", 0))
    )
    shapes = [{n: w.shape for n, w in e.decoder.state_dict().items()} for e in (frozen, first)]
    assert shapes[0] == shapes[1]
    texts = ["pole angle 0.10", "pole angle -0.20"]
    assert not torch.allclose(frozen.read(texts), first.read(texts), atol=1e-2)
    assert_close(first.read(texts), second.read(texts))


def test_only_what_is_trained_counts_as_a_parameter(model):
    names = {
        actor: {name for name, _ in make_learner(arguments_of(model, "--actor", actor)).policy.named_parameters()}
        for actor in ACTORS
    }
    assert names["frozen"] == names["random"] == names["mlp"]
    assert {name.partition("adapter")[1] for name in names["lora"] - names["mlp"]} == {"adapter"}


@pytest.mark.parametrize("actor", ACTORS)
def test_the_heads_are_orthogonal_and_the_last_layer_small(model, actor):
    policy = make_learner(arguments_of(model, "--actor", actor)).policy
    weight = policy.mlp_extractor.value_net[2].weight
    assert_close(weight @ weight.T, 2 * torch.eye(len(weight)), atol=1e-4, rtol=0)
    assert policy.action_net.weight.norm(dim=1).max() < 0.011


@pytest.mark.parametrize("actor", ACTORS)
def test_each_state_has_its_own_action_probabilities(model, actor):
    """The original made one text of a whole batch of states."""
    learner = make_learner(arguments_of(model, "--actor", actor, "--env_id", "FrozenLake-v1"))
    with torch.no_grad():
        learner.policy.action_net.weight.mul_(30)  # else all are nearly uniform
    table_SA = policy_table(learner, is_greedy=False)
    distances = np.abs(table_SA[:, None] - table_SA[None]).max(-1) + np.eye(len(table_SA))
    assert distances.min() > 1e-5
    assert_close(table_SA.sum(1), np.ones(len(table_SA)))


@pytest.mark.parametrize(("algorithm", "actor"), [("ppo", "frozen"), ("trpo", "lora")])
def test_gpt_2_is_an_actor(model, tmp_path, algorithm, actor):
    """The model of the original, in small: linear layers of another kind, learned positions, no padding token."""
    tokenizer = load_tokenizer(model)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=128, n_embd=32, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "gpt2")
    learner = make_learner(
        arguments_of(tmp_path / "gpt2", "--actor", actor, "--algorithm", algorithm, "--timesteps", 64)
    )
    before = [parameter.clone() for parameter in learner.policy.parameters()]
    learner.algorithm.learn(64)
    assert learner.reader.encoder.size == 32
    changed = [not torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True)]
    assert sum(changed) > 4


# The algorithms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("actor", ACTORS)
def test_the_ratio_is_one_before_a_step(model, actor):
    """One minibatch of one pass: what PPO calls its KL is of the policy that has acted."""
    learner = make_learner(
        arguments_of(model, "--actor", actor, "--n_epochs", 1, "--batch_size", 64, "--timesteps", 64)
    )
    learner.algorithm.learn(64)
    assert learner.algorithm.logger.name_to_value["train/approx_kl"] < 1e-9
    assert learner.algorithm.logger.name_to_value["train/clip_fraction"] == 0


@pytest.mark.parametrize("actor", ACTORS)
def test_the_kl_of_a_step_stays_within_the_target(model, actor, monkeypatch):
    """Measured again by the test, before and after each update; a step that the search refuses changes nothing."""
    learner = make_learner(arguments_of(model, "--algorithm", "trpo", "--actor", actor, "--target_kl", 0.002))
    algorithm, policy, found = learner.algorithm, learner.policy, []
    train = algorithm.train

    def measured():
        state = np.random.get_state()
        states = next(algorithm.rollout_buffer.get(None)).observations  # in an order drawn at each call
        np.random.set_state(state)
        with torch.no_grad():
            before = policy.get_distribution(states).distribution
        train()
        policy.set_training_mode(False)
        with torch.no_grad():
            after = policy.get_distribution(states).distribution
        found.append(float(torch.distributions.kl_divergence(after, before).mean()))

    monkeypatch.setattr(algorithm, "train", measured)
    algorithm.learn(256)
    assert len(found) == 4
    assert max(found) <= 0.002 + 1e-6
    assert max(found) > 1e-5


def test_two_passes_give_what_the_library_gives(model):
    """Parameters, gradients and shapes of sb3-contrib's own loop over the parameters."""
    learner = make_learner(arguments_of(model, "--algorithm", "trpo", "--actor", "lora"))
    learner.algorithm.collect_rollouts(*_collecting(learner))
    learner.policy.set_training_mode(True)
    data = next(learner.algorithm.rollout_buffer.get(None))
    found = []
    for compute in (FewPassesTRPO._compute_actor_grad, TRPO._compute_actor_grad):
        with torch.no_grad():
            old = copy.copy(learner.policy.get_distribution(data.observations).distribution)
        distribution = learner.policy.get_distribution(data.observations).distribution
        objective = (data.advantages * distribution.log_prob(data.actions.flatten())).mean()
        kl = torch.distributions.kl_divergence(distribution, old).mean()
        found.append(compute(learner.algorithm, kl, objective))
    (parameters, of_objective, of_kl, shapes), (same, *others, same_shapes) = found
    assert [id(parameter) for parameter in parameters] == [id(parameter) for parameter in same]
    assert shapes == [tuple(shape) for shape in same_shapes]
    assert_close((of_objective, of_kl), tuple(others))


def test_the_time_limit_is_no_end(model):
    """What a cut episode would have gone on to earn counts, by the critic's value of its last state."""
    learner = make_learner(arguments_of(model, "--env_id", "Counting-v0", "--n_envs", 1, "--horizon_steps", 10))
    with torch.no_grad():
        learner.policy.value_net.weight.zero_()
        learner.policy.value_net.bias.fill_(5.0)
    learner.algorithm.collect_rollouts(*_collecting(learner))
    rewards = learner.algorithm.rollout_buffer.rewards[:, 0]
    expected = np.ones(32, np.float32)
    expected[9::10] += learner.algorithm.gamma * 5.0
    assert_close(rewards, expected)


def _collecting(learner):
    algorithm = learner.algorithm
    _, callback = algorithm._setup_learn(64)
    return algorithm.env, callback, algorithm.rollout_buffer, algorithm.n_steps


# Environments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1", "Pendulum-v1", "HalfCheetah-v5"])
def test_an_episode_comes_back_where_it_was(env_id):
    if env_id.startswith("Half"):
        pytest.importorskip("mujoco", reason="requirements-mujoco.txt")
    spec = EnvironmentSpec(env_id, {}, None)

    def make():
        return make_vec_env(spec, 2, normalizes_observations=False, normalizes_rewards=False, gamma=0.9)

    first, second = make(), make()
    first.seed(3)
    first.reset()
    actions = np.random.default_rng(0)

    def play(env, steps, generator):
        return [env.step(np.array([env.action_space.sample() for _ in range(2)])) for _ in range(steps)]

    first.action_space.seed(1)
    play(first, 37, actions)  # over the end of an episode, on the lake and with the pole
    states = json.loads(json.dumps([wrapper.state() for wrapper in learners.replayables(first)]))
    second.reset()
    for wrapper, state in zip(learners.replayables(second), states, strict=True):
        wrapper.restore(state)
    for env in (first, second):
        env.action_space.seed(2)
    for one, other in zip(play(first, 60, actions), play(second, 60, actions), strict=True):
        for a, b in zip(one[:3], other[:3], strict=True):
            assert np.array_equal(a, b)


def test_statistics_come_back():
    spec = EnvironmentSpec("CartPole-v1", {}, None)
    first, second = (
        make_vec_env(spec, 3, normalizes_observations=True, normalizes_rewards=True, gamma=0.9) for _ in range(2)
    )
    first.reset()
    for _ in range(20):
        first.step(np.array([0, 1, 1]))
    set_statistics(second, json.loads(json.dumps(statistics_of(first))))
    vector = np.array([[0.1, -0.2, 0.3, 0.4]])
    assert np.array_equal(first.normalize_obs(vector), second.normalize_obs(vector))
    assert np.array_equal(first.normalize_reward(np.ones(2)), second.normalize_reward(np.ones(2)))


@pytest.mark.parametrize("variance", [math.nan, -1.0])
def test_damaged_statistics_are_refused(variance):
    env = make_vec_env(
        EnvironmentSpec("CartPole-v1", {}, None), 1, normalizes_observations=True, normalizes_rewards=True, gamma=0.9
    )
    statistics = statistics_of(env)
    statistics["obs_rms"]["var"][0] = variance
    with pytest.raises(ValueError, match="obs_rms: expected numbers, and no variance below 0"):
        set_statistics(env, statistics)


def test_a_text_is_made_of_scaled_numbers(model):
    """Rewards are scaled by the discounted return, whose discount is the algorithm's; one-hot states are no numbers."""
    options = {"mlp": (), "frozen": ("--actor", "frozen"), "lake": ("--env_id", "FrozenLake-v1", "--normalize", "true")}
    envs = {name: learners.training_env(arguments_of(model, *more), 1) for name, more in options.items()}
    assert {name: env.norm_obs for name, env in envs.items()} == {"mlp": False, "frozen": True, "lake": False}
    assert not envs["frozen"].norm_reward
    assert learners.training_env(arguments_of(model, "--gamma", "0.9"), 1).gamma == 0.9


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (gymnasium.spaces.Discrete(3, start=1), "its actions begin at 1; expected 0"),
        (gymnasium.spaces.Box(-np.inf, np.inf, (1,)), "actions Box.*; expected a vector with bounds"),
    ],
    ids=["start", "open"],
)
def test_actions_that_the_actor_cannot_take_are_refused(space, message):
    env = SimpleNamespace(observation_space=gymnasium.spaces.Discrete(2), action_space=space)
    with pytest.raises(InputError, match=message):
        check_spaces(env, "Some-v0")


def test_options_of_the_networks_reach_them(model):
    options = ("--activation", "relu", "--log_std_init", "-1", "--ortho_init", "false")
    policy = make_learner(arguments_of(model, "--env_id", "Pendulum-v1", *options)).policy
    assert isinstance(policy.mlp_extractor.value_net[1], torch.nn.ReLU)
    assert set(policy.log_std.flatten().tolist()) == {-1.0}
    assert policy.action_net.weight.norm() > 0.02  # an orthogonal one has 0.01
    decoder = make_learner(arguments_of(model, "--actor", "lora", "--lora_alpha", "8")).reader.encoder.decoder
    assert {m.scaling["default"] for m in decoder.modules() if isinstance(m, LoraLayer)} == {8 / 2}
    assert make_learner(arguments_of(model, "--actor", "frozen", "--center", "false")).reader.encoder.spread == 1.0


def test_runs_with_neighbouring_seeds_share_no_start(model):
    """Copies of an environment count on from their seed: with 20 copies seeds 1 and 2 had 19 in common."""
    starts = []
    for seed in ("1", "2"):
        arguments = arguments_of(model, "--actor", "mlp", "--seed", seed, "--n_envs", "8", "--n_steps", "16")
        learner = make_learner(arguments)
        judged = learners.training_env(arguments, 20)
        judged.seed(judge.judge_seed(arguments))
        starts.append({tuple(row) for env in (learner.env, judged) for row in env.unwrapped.reset().tolist()})
    assert [len(found) for found in starts] == [28, 28]
    assert not starts[0] & starts[1]


def test_a_linear_schedule_of_two_updates_learns_in_the_first(model):
    learner = make_learner(arguments_of(model, "--actor", "mlp", "--schedule", "linear", "--timesteps", "96"))
    before = [parameter.clone() for parameter in learner.policy.parameters()]
    learner.algorithm.learn(96)
    assert not all(map(torch.equal, before, learner.policy.parameters()))


def test_an_interval_of_few_episodes_is_wide():
    """Student's t of four degrees of freedom is 2.776, where a normal distribution has 1.96."""
    score = judge.EpisodeScore.of("a", [1.0, 2.0, 3.0, 4.0, 5.0])
    assert score.interval == pytest.approx(2.776 * (2.5 / 5) ** 0.5, rel=1e-3)


def test_judging_shows_how_far_it_is(model, monkeypatch):
    bars = []

    def shown(items, what, **options):
        bars.append(tqdm(items, what, file=io.StringIO(), **options))
        return bars[-1]

    monkeypatch.setattr(judge, "progress", shown)
    arguments = arguments_of(model, "--actor", "mlp")
    score = judge.episode_score(make_learner(arguments), arguments, "a policy", is_greedy=False)
    (bar,) = bars
    assert bar.n == round(score.mean_return * score.episodes)  # CartPole: 1 a step
    assert 0 < bar.n <= bar.total == 3 * 30


@pytest.mark.parametrize(
    ("options", "has_table"),
    [
        ({}, True),
        ({"map_name": "8x8", "is_slippery": False}, True),
        ({"is_slippery": True, "success_rate": 0.9}, False),
    ],
)
def test_a_lake_is_judged_exactly_unless_its_ice_is_another(options, has_table):
    environment = EnvironmentSpec("FrozenLake-v1", options, None).make()
    table = table_of(environment)
    assert (table is not None) == has_table
    if table is not None:
        assert len(table.acting_states) < environment.env.observation_space.n


# The script ------------------------------------------------------------------------------------------------------

FILES = {
    "policy.safetensors", "normalizer.json", "metrics.jsonl", "evaluation.json", "result.txt", "curve.png",
    "resolved_config.yaml", "run.json", "untrained.json", "COMPLETE",
}  # fmt: skip


@pytest.mark.parametrize("algorithm", ["ppo", "trpo"])
@pytest.mark.parametrize("actor", ACTORS)
def test_a_run_and_its_files(model, tmp_path, capfd, algorithm, actor):
    out = tmp_path / "out"
    assert main(small(model, out, "--actor", actor, "--algorithm", algorithm)) == 0
    assert {path.name for path in out.iterdir() if path.is_file()} == FILES
    lines = [json.loads(line) for line in (out / METRICS_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [64, 128, 192, 256]
    assert all(0 <= line["mean_return_of_25_episodes"] <= 30 for line in lines)
    assert ("cache_hit_rate" in lines[0]) == (actor != "mlp")
    assert ("line_search_success" in lines[0]) == (algorithm == "trpo")
    assert [row["policy"] for row in json.loads((out / "evaluation.json").read_text())["policies"]][2:] == [
        "untrained, greedy", "trained, greedy", "trained, sampled",
    ]  # fmt: skip
    printed = capfd.readouterr().out
    first = next(line for line in printed.splitlines() if not line.startswith("threads: "))
    assert first.startswith(f"CartPole-v1, {algorithm.upper()}, actor {actor}, seed 0: 256 steps")
    lora = "-lora" * ((actor, algorithm) == ("lora", "ppo"))
    assert f"\nsettings: configs/policy_gradient/{algorithm}/CartPole{lora}.yaml\n" in printed
    assert ("reads: cart position" in printed) == (actor != "mlp")
    for policy in ("untrained, greedy", "trained, greedy", "trained, sampled"):
        assert f"judging {policy}: 3 fresh episodes, at most 90 steps" in printed
    assert "verdict: " in printed
    run = json.loads((out / "run.json").read_text())
    assert {"stable-baselines3", "sb3-contrib"} <= set(run["versions"])
    # A second call shows it
    assert main(small(model, out, "--actor", actor, "--algorithm", algorithm, "--resume_from_checkpoint", "auto")) == 0
    assert "holds a finished run" in capfd.readouterr().out


@pytest.mark.parametrize("kept", [{}, {"asked": "another run", "answers": {"score": {}}}, {"answers": {"x": 1}}])
def test_answers_of_another_run_and_what_are_none_are_not_taken(kept, model, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(run.run_files, "checksum", lambda _: "this run")
    (out / "untrained.json").write_text(json.dumps({"asked": "this run"} | kept))
    assert main(small(model, out)) == 0
    assert main(small(model, tmp_path / "plain")) == 0
    rows = [json.loads((folder / "evaluation.json").read_text())["policies"] for folder in (out, tmp_path / "plain")]
    assert rows[0] == rows[1]


def test_checkpoints_and_lines_come_as_often_as_asked(model, tmp_path, monkeypatch):
    saved, save = [], progress.Progress.save
    monkeypatch.setattr(progress.Progress, "save", lambda self: saved.append(self.num_timesteps) or save(self))
    assert main(small(model, tmp_path / "out", "--save_steps", 128, "--logging_steps", 128)) == 0
    assert saved == [128, 256]
    assert [line["step"] for line in metrics_of(tmp_path / "out")] == [128, 256]


def test_a_lake_is_judged_exactly(model, tmp_path, capfd):
    out = tmp_path / "out"
    assert main(small(model, out, "--env_id", "FrozenLake-v1", "--actor", "frozen", "--horizon_steps", 100)) == 0
    rows = {row["policy"]: row for row in json.loads((out / "evaluation.json").read_text())["policies"]}
    assert rows["optimal"]["success_probability"] == pytest.approx(0.8235, abs=1e-4)
    assert rows["uniform random"]["success_probability"] == pytest.approx(0.0139, abs=1e-4)
    assert (out / "policy.png").stat().st_size > 1000
    assert "reads: AFFF|FHFH|FFFH|HFFG" in capfd.readouterr().out
    learner, _ = load_run(out)
    assert np.array_equal(policy_table(learner, True), np.array(rows["trained, greedy"]["policy_SA"]))


def test_a_trained_reader_is_judged_with_its_adapter(model, tmp_path):
    """Centring reads all states of a lake before the adapter is loaded: those vectors must not count."""
    options = ["--env_id", "FrozenLake-v1", "--actor", "lora", "--learning_rate", 0.03, "--horizon_steps", 100]
    assert main(small(model, tmp_path / "out", *options)) == 0
    rows = {row["policy"]: row for row in json.loads((tmp_path / "out/evaluation.json").read_text())["policies"]}
    learner, _ = load_run(tmp_path / "out")
    table_SA = policy_table(learner, False)
    np.testing.assert_allclose(table_SA, np.array(rows["trained, sampled"]["policy_SA"]), atol=1e-4)
    learner.reader.encoder.forget()
    np.testing.assert_allclose(policy_table(learner, False), table_SA, atol=1e-6)


def test_the_noise_of_a_judgement_is_new_for_each_copy_and_as_often_as_in_training(model, monkeypatch):
    """stable-baselines3 draws state-dependent noise in training alone."""
    drawn = []
    for frequency, expected in ((4, 8), (-1, 1)):  # 30 steps of 3 copies; -1: each 32 steps, an update's
        arguments = arguments_of(model, "--env_id", "Pendulum-v1", "--use_sde", "true", "--sde_sample_freq", frequency)
        learner = make_learner(arguments)
        drawn.clear()
        draw = learner.policy.reset_noise
        monkeypatch.setattr(
            learner.policy, "reset_noise", lambda copies, draw=draw: (drawn.append(copies), draw(copies))
        )
        judge.episode_score(learner, arguments, "sampled", is_greedy=False)
        assert drawn == [3] * expected
        noise = learner.policy.action_dist.exploration_matrices
        assert not torch.equal(noise[0], noise[1])


def test_a_run_keeps_its_number_format(model, tmp_path, monkeypatch):
    monkeypatch.setattr(learners, "faster_format", lambda _: ("bfloat16", ""))
    out = tmp_path / "out"
    assert main(small(model, out, "--actor", "frozen")) == 0
    assert json.loads((out / "run.json").read_text())["dtype"] == "bfloat16"
    monkeypatch.setattr(learners, "faster_format", lambda _: ("float32", ""))
    out.rename(tmp_path / "moved")
    assert load_run(tmp_path / "moved")[0].reader.encoder.dtype == "bfloat16"
    assert make_learner(arguments_of(model, "--actor", "frozen")).reader.encoder.dtype == "float32"


def test_figures_stand_at_their_step_in_tensorboard(model, tmp_path):
    assert main(small(model, tmp_path)) == 0
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    steps = [line["step"] for line in metrics_of(tmp_path)]
    for name in ("run/kl", "train/approx_kl"):
        assert [event.step for event in events.Scalars(name)] == steps


@pytest.mark.parametrize("actor", ACTORS)
def test_a_loaded_run_acts_as_it_did(model, tmp_path, actor, monkeypatch):
    out, saved = tmp_path / "out", []
    states = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)

    def said(learner) -> np.ndarray:
        """Of each state its value and the probabilities of the actions."""
        normalized = torch.as_tensor(learner.env.normalize_obs(states))
        with torch.no_grad():
            actions = learner.policy.get_distribution(normalized).distribution.probs
            return torch.cat([learner.policy.predict_values(normalized), actions], dim=1).numpy()

    save_policy = run.save_policy
    monkeypatch.setattr(
        run, "save_policy", lambda learner, folder: saved.append(said(learner)) or save_policy(learner, folder)
    )
    assert main(small(model, out, "--actor", actor, "--normalize", "true")) == 0
    assert (np.ptp(saved[0], axis=0) > 1e-5).all()
    np.testing.assert_allclose(said(load_run(out)[0]), saved[0], atol=1e-6)


def test_the_same_seed_gives_the_same_curve(model, tmp_path):
    def curve(name, seed):
        assert main(small(model, tmp_path / name, "--seed", seed)) == 0
        return metrics_of(tmp_path / name)

    first, again, other = curve("a", 1), curve("b", 1), curve("c", 2)
    assert first == again
    assert first != other


def test_judging_a_trained_run_again_is_no_training(model, tmp_path):
    options = small(model, tmp_path, "--resume_from_checkpoint", "auto")
    assert main(options) == 0
    learner = make_learner(arguments_of(model))
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    resumed = progress.Progress(learner, tmp_path, arguments_of(model), checkpoint)
    assert (resumed.steps_left, resumed.seconds) == (0, resumed.metrics.seconds_before)


@pytest.fixture(scope="module")
def finished_once(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "out"
    assert main(small(model, folder)) == 0
    return folder


@pytest.fixture
def finished(finished_once, tmp_path):
    """A finished run, to be damaged."""
    return shutil.copytree(finished_once, tmp_path / "out")


def test_a_run_without_its_policy_is_not_finished(finished):
    for name in ("policy.safetensors", "evaluation.json"):
        (finished / name).unlink()
    with pytest.raises(InputError, match=r": is not finished; --resume_from_checkpoint auto resumes it"):
        load_run(finished)


def test_a_run_is_not_judged_behind_another_model(model, tmp_path):
    own, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(model, own)
    assert main(small(own, out, "--actor", "frozen", "--timesteps", 64)) == 0
    weights = load_file(own / "model.safetensors")
    save_file({name: w + 0.01 for name, w in weights.items()}, own / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"^{out}: the model changed since the run was begun; .*, or train again$"):
        load_run(out)


def test_max_episodes_ends_the_training(model, tmp_path, capfd):
    """Also where the run was cut off while it was judged: no step is played again."""
    options = small(model, tmp_path, "--max_episodes", 7)
    assert main(options) == 0
    first = metrics_of(tmp_path)
    assert first[-1]["episodes"] in (7, 8), "two copies may end theirs in one step"
    assert first[-1]["step"] < 256
    assert f"{first[-1]['episodes']} episodes" in capfd.readouterr().out
    (tmp_path / "evaluation.json").unlink()
    assert main([*options, "--resume_from_checkpoint", "auto"]) == 0
    assert metrics_of(tmp_path) == first


@pytest.mark.parametrize(
    ("algorithm", "actor", "env_id"),
    [
        ("ppo", "mlp", "CartPole-v1"), ("trpo", "mlp", "Pendulum-v1"), ("ppo", "frozen", "FrozenLake-v1"),
        ("trpo", "lora", "CartPole-v1"), ("ppo", "lora", "FrozenLake-v1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_resumed_run_is_the_uninterrupted_one(model, tmp_path, capfd, monkeypatch, algorithm, actor, env_id, number):
    options = [
        "--algorithm",
        algorithm,
        "--actor",
        actor,
        "--env_id",
        env_id,
        "--normalize",
        "true",
        "--horizon_steps",
        50,
    ]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(small(model, whole, *options)) == 0
    log, calls = progress.Progress.log, []

    def interrupted(self):
        log(self)
        calls.append(self)
        if len(calls) == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(progress.Progress, "log", interrupted)
    with pytest.raises(SystemExit) as left:
        main(small(model, cut, *options))
    assert left.value.code == EXIT_INTERRUPTED
    assert "checkpoint of step 128 written; --resume_from_checkpoint auto resumes from it" in capfd.readouterr().out
    monkeypatch.setattr(progress.Progress, "log", log)
    assert main(small(model, cut, *options, "--resume_from_checkpoint", "auto")) == 0
    assert (whole / "policy.safetensors").read_bytes() == (cut / "policy.safetensors").read_bytes()
    assert (whole / "normalizer.json").read_text() == (cut / "normalizer.json").read_text()
    assert (whole / "evaluation.json").read_text() == (cut / "evaluation.json").read_text()
    assert metrics_of(whole) == metrics_of(cut)


def test_a_signal_in_the_last_update_leaves_before_the_judging(model, tmp_path, capfd, monkeypatch):
    log = progress.Progress.log

    def interrupted(self):
        log(self)
        if not self.steps_left:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(progress.Progress, "log", interrupted)
        with pytest.raises(SystemExit) as left:
            main(small(model, tmp_path / "run"))
    assert left.value.code == EXIT_INTERRUPTED
    assert "judging trained, greedy" not in (printed := capfd.readouterr().out)
    assert "written; --resume_from_checkpoint auto resumes from it" in printed
    assert main(small(model, tmp_path / "run", "--resume_from_checkpoint", "auto")) == 0
    assert "judging trained, greedy: " in capfd.readouterr().out


@pytest.mark.parametrize(
    ("env_id", "options", "horizon_steps", "words"),
    [
        ("CartPole-v1", {}, None, "500 +- 0"),
        ("CartPole-v1", {}, 30, ""),
        ("CartPole-v0", {}, None, ""),
        ("FrozenLake-v1", {}, None, ".22"),
        ("FrozenLake-v1", {"is_slippery": False}, None, ""),
    ],
)
def test_published_figures_stand_beside_the_usual_environment_alone(env_id, options, horizon_steps, words):
    lines = judge.published_lines(make_gym_environment(env_id, options, horizon_steps))
    assert (words in lines[0]) if words else not lines


def metrics_of(folder) -> list[dict]:
    """All but what depends on time and on what is kept in memory."""
    lines = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    return [{k: v for k, v in line.items() if "second" not in k and "cache" not in k} for line in lines]


def test_a_run_stands_beside_others(model, tmp_path, capfd):
    """A lake's in the table of the tasks, with exact figures; others by episodes."""
    lake, first, second = (tmp_path / name for name in ("lake", "first", "second"))
    assert main(small(model, lake, "--env_id", "FrozenLake-v1", "--horizon_steps", 100)) == 0
    assert main(small(model, first)) == 0
    assert main(small(model, second, "--actor", "frozen", "--seed", 1)) == 0
    capfd.readouterr()
    assert evaluate_policy.main(["--policies", str(lake), "expert", "--output_dir", str(tmp_path / "a")]) == 0
    names = [row["policy"] for row in json.loads((tmp_path / "a" / "evaluation.json").read_text())["policies"]]
    assert names[3:] == [f"{lake}, greedy", f"{lake}, sampled", "expert"]
    assert "0.8235" in capfd.readouterr().out
    assert evaluate_policy.main(["--policies", str(lake), "--map", "4x4"]) == 0
    large, rows = tmp_path / "large", {}
    assert main(small(model, large, "--env_id", "FrozenLake-v1", "--horizon_steps", 40)) == 0
    assert evaluate_policy.main(["--policies", str(large), "--output_dir", str(tmp_path / "d")]) == 0
    for folder in (large, tmp_path / "d"):  # within the run's own limit
        policies = json.loads((folder / "evaluation.json").read_text())["policies"]
        rows[folder] = next(row for row in policies if row["policy"] == "optimal")
    assert len({row["success_at_horizon"] for row in rows.values()}) == 1
    with pytest.raises(InputError, match=r"different step limits, 40 and 100; give --horizon_steps"):
        evaluate_policy.main(["--policies", str(lake), str(large)])
    with pytest.raises(InputError, match=r"--map 8x8: .*lake knows the lake that it was trained on alone"):
        evaluate_policy.main(["--policies", str(lake), "--map", "8x8"])
    assert evaluate_policy.main(["--policies", str(first), str(second), "--output_dir", str(tmp_path / "b")]) == 0
    rows = {row["policy"]: row for row in json.loads((tmp_path / "b" / "evaluation.json").read_text())["policies"]}
    own = {row["policy"]: row for row in json.loads((first / "evaluation.json").read_text())["policies"]}
    assert len(rows) == 6
    for kind in ("greedy", "sampled"):  # the same episodes
        assert rows[f"{first}, {kind}"]["mean_return"] == own[f"trained, {kind}"]["mean_return"]
    twice = ["--policies", str(second), "--seed", "0", "--output_dir", str(tmp_path / "e")]
    assert evaluate_policy.main(twice) == 0
    alone = {row["policy"]: row for row in json.loads((tmp_path / "e" / "evaluation.json").read_text())["policies"]}
    for kind in ("greedy", "sampled"):  # those of the first run, whose seed is another
        assert rows[f"{second}, {kind}"]["mean_return"] == alone[f"{second}, {kind}"]["mean_return"]
    capfd.readouterr()
    asked = ["--episodes", "4", "--samples_per_state", "0", "--seed", "9", "--output_dir", str(tmp_path / "c")]
    assert evaluate_policy.main(["--policies", str(first), str(second), *asked]) == 0
    rows = json.loads((tmp_path / "c" / "evaluation.json").read_text())["policies"]
    assert [row["policy"] for row in rows[2:]] == [f"{first}, greedy", f"{second}, greedy"]
    assert {row["episodes"] for row in rows} == {4}
    assert "CartPole-v1, seed 9" in capfd.readouterr().out
    with pytest.raises(InputError, match=r"--observation grid: is for language models, and there is none here"):
        evaluate_policy.main(["--policies", str(lake), "--observation", "grid"])
    with pytest.raises(InputError, match=r"--episodes 1: one episode has no interval; expected at least 2"):
        evaluate_policy.main(["--policies", str(first), "--episodes", "1"])
    with pytest.raises(InputError, match=r"--horizon_steps 50: runs of train_policy_gradient.py are judged in the env"):
        evaluate_policy.main(["--policies", str(first), "--horizon_steps", "50"])
    with pytest.raises(InputError, match=r"--policies expert: the other runs are judged by episodes"):
        evaluate_policy.main(["--policies", str(first), "expert"])
    with pytest.raises(InputError, match=r"nothing: the other runs are judged by episodes"):
        evaluate_policy.main(["--policies", str(first), str(tmp_path / "nothing")])


# Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--algorithm", "sac"], r"--algorithm 'sac': expected one of ppo, trpo"),
        (["--actor", "gpt"], r"--actor 'gpt': expected one of mlp, frozen, lora, random"),
        (["--env_id", "Nonsense-v0"], r"--env_id Nonsense-v0: "),
        (["--env_id", "Blackjack-v1"], r"--env_id Blackjack-v1: observations Tuple"),
        (["--env_id", "Counting-v0", "--env_options", '{"fails": "state"}'], r"observation \[nan nan\], reward 1.0"),
        (["--env_id", "Counting-v0", "--env_options", '{"fails": "reward"}'], r"reward inf: expected an observation"),
        (["--env_id", "Counting-v0", "--env_options", '{"fails": "no reward"}'], r"reward None: expected an observ"),
        (["--env_id", "Counting-v0", "--env_options", '{"fails": "no state"}'], r"observation None, reward 1.0"),
        (["--env_id", "Counting-v0", "--env_options", '{"fails": "long state"}'], r"expected .* of shape \(2,\)"),
        (["--env_id", "Counting-v0", "--env_options", '{"fails": "raises"}'], r"its step failed: ZeroDivisionError by"),
        (["--env_options", "[1]"], r"--env_options '\[1\]': expected a JSON object"),
        (["--timesteps", "63"], r"--timesteps 63: one update alone takes 64 \(n_steps 32 x n_envs 2\); give more"),
        (["--batch_size", "48"], r"--batch_size 48: an update has 64 steps .* expected a divisor"),
        (["--n_envs", "0"], r"--n_envs 0: expected an integer of at least 1"),
        (["--gamma", "1.5"], r"--gamma 1.5: expected a number above 0, at most 1"),
        (["--hidden_sizes", "0"], r"--hidden_sizes 0: "),
        (["--use_sde", "true"], r"--use_sde true: CartPole-v1 has discrete actions; it is for continuous ones"),
        (["--log_std_init", "-2"], r"--log_std_init -2.0: CartPole-v1 has discrete actions; it is for continuous ones"),
        (["--use_sde", "true", "--sde_sample_freq", "0"], r"--sde_sample_freq 0: expected -1, once per rollout, or"),
        (["--sde_sample_freq", "4"], r"--sde_sample_freq 4: is for --use_sde true"),
        (
            ["--schedule", "linear", "--timesteps", "64"],
            r"--schedule linear with --timesteps 64: is one update, and the last one's rate is 0; give more",
        ),
        (["--batch_size", "1"], r"--batch_size 1: expected at least 2, because advantages are normalised"),
        (["--n_steps", "1", "--n_envs", "1", "--batch_size", "1"], r"an update has 1 step; expected at least 2"),
        (["--algorithm", "trpo", "--sub_sampling_factor", "64"], r"--sub_sampling_factor 64: leaves 1 of an update's"),
        (["--cg_max_steps", "5"], r"--cg_max_steps 5: is for --algorithm trpo alone"),
        (["--algorithm", "trpo", "--n_epochs", "5"], r"--n_epochs 5: is for --algorithm ppo alone"),
        (["--pooling", "mean"], r"--pooling mean: is for --actor frozen or lora or random alone"),
        (["--actor", "frozen", "--lora_alpha", "4"], r"--lora_alpha 4: is for --actor lora alone"),
        (["--max_grad_norm", "0"], "--max_grad_norm 0: expected a number above 0"),
        (["--max_episodes", "1"], r"--max_episodes 1: played within \d+ steps, before the first update; give more"),
        (["--resume_from_checkpoint", "yes"], r"--resume_from_checkpoint 'yes': expected one of auto"),
        (["--actor", "frozen", "--model_name_or_path", "/no/such"], r"/no/such: no such folder"),
        (["--timestep", "5"], r"unknown arguments: --timestep 5 \(did you mean --timesteps\?\)"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(model, tmp_path, more, words):
    with pytest.raises(InputError, match=words) as raised:
        main(small(model, tmp_path / "out", *more))
    assert "\n" not in str(raised.value)


def test_a_state_that_is_longer_than_the_model_reads(model, tmp_path):
    class Long(Counting):
        observation_space = gymnasium.spaces.Box(-1, 1, (400,), np.float32)

    gymnasium.register("Long-v0", Long, max_episode_steps=10)
    with pytest.raises(InputError, match=r"a state is \d+ tokens of text .*, and the model reads 512"):
        make_learner(arguments_of(model, "--env_id", "Long-v0", "--actor", "frozen"))


@pytest.mark.parametrize("file", ["policy.safetensors", "normalizer.json"])
@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_a_damaged_run_is_not_judged(finished, file, harm):
    if harm == "gone":
        (finished / file).unlink()
    else:
        (finished / file).write_bytes((finished / file).read_bytes()[:20])
    with pytest.raises(InputError, match=rf"{file}: cannot be"):
        load_run(finished)


def test_another_policys_file_is_refused(model, finished, tmp_path):
    other = tmp_path / "other"
    assert main(small(model, other, "--hidden_sizes", "8", "8")) == 0
    (finished / "policy.safetensors").write_bytes((other / "policy.safetensors").read_bytes())
    with pytest.raises(InputError, match=r"policy\.safetensors: cannot be loaded .*size mismatch"):
        load_run(finished)


def test_a_folder_with_another_run_is_left_alone(model, finished):
    with pytest.raises(InputError, match=r"holds a run"):
        main(small(model, finished, "--seed", 5))
    with pytest.raises(InputError, match=r"--seed 5: .* was begun with the default"):
        main(small(model, finished, "--seed", 5, "--resume_from_checkpoint", "auto"))


# Configurations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*/*.yaml")), ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_configuration_fits_its_algorithm_and_comes_out_even(model, file):
    algorithm, actor = file.parent.name, file.stem.partition("-")[2] or "mlp"
    name = file.stem.partition("-")[0]
    env_id = f"{name}-v5" if name == "HalfCheetah" else f"{name}-v1"
    if name == "HalfCheetah":
        pytest.importorskip("mujoco", reason="requirements-mujoco.txt")
    assert default_config(env_id, algorithm, actor) == file
    assert default_config(f"mine/{env_id}", algorithm, actor) is None, "another environment of that name"
    options = ["--env_id", env_id, "--algorithm", algorithm, "--actor", actor]
    options += [] if actor == "mlp" else ["--model_name_or_path", str(model)]
    arguments, config = read_arguments(options, "a test")
    assert str(config) == str(file)
    make_learner(arguments)


def test_an_environment_without_a_configuration_has_the_library_s(model):
    arguments, config = read_arguments(["--env_id", "MountainCar-v0"], "a test")
    assert (config, arguments.algorithm_options()) == ("", {"gamma": 0.99})
    for algorithm, rate in (("ppo", 3e-4), ("trpo", 1e-3)):
        learner = make_learner(arguments_of(model, "--env_id", "MountainCar-v0", "--algorithm", algorithm))
        assert learner.algorithm.lr_schedule(1.0) == rate


def test_a_linear_schedule_lowers_what_its_help_says(model):
    algorithm = make_learner(arguments_of(model, "--schedule", "linear", "--clip_range", 0.3)).algorithm
    assert [algorithm.clip_range(left) for left in (1.0, 0.5, 0.0)] == pytest.approx([0.3, 0.15, 0.0])
    options = ["--schedule", "linear", "--env_id", "MountainCar-v0"]
    algorithm = make_learner(arguments_of(model, *options)).algorithm
    assert [algorithm.clip_range(left) for left in (1.0, 0.0)] == [0.2, 0.0]
    assert [algorithm.lr_schedule(left) for left in (1.0, 0.0)] == [3e-4, 0.0]


def test_gymnasium_s_own_id_of_the_large_lake_is_a_lake(model):
    environment = EnvironmentSpec("FrozenLake8x8-v1", {}, None).make()
    assert len(table_of(environment).grid) == 8
    assert default_config("FrozenLake8x8-v1", "ppo") == default_config("FrozenLake-v1", "ppo")


@pytest.mark.slow
def test_ppo_with_a_network_solves_cart_pole(tmp_path):
    assert main(["--output_dir", str(tmp_path / "out")]) == 0
    rows = {row["policy"]: row for row in json.loads((tmp_path / "out" / "evaluation.json").read_text())["policies"]}
    assert rows["trained, greedy"]["mean_return"] == 500


def test_a_judgement_scales_states_as_the_training_did_and_no_rewards(model, monkeypatch):
    arguments, judged_in = arguments_of(model, "--normalize", "true"), []
    learner = make_learner(arguments)
    learner.env.obs_rms.mean[:] = [1, 2, 3, 4]

    def evaluate(_policy, env, *_, **__):
        judged_in.append(env)
        return [1.0, 2.0], [1, 1]

    monkeypatch.setattr(judge, "evaluate_policy", evaluate)
    judge.episode_score(learner, arguments, "a policy", is_greedy=True)
    (env,) = judged_in
    vector = np.ones((1, 4))
    assert np.array_equal(env.normalize_obs(vector), learner.env.normalize_obs(vector))
    assert (env.training, env.norm_reward) == (False, False)


OF_EPISODES = [
    # environment, mean return and half its interval, verdict
    ("CartPole-v1", 480, 9, "solved: mean return 480.0 in 5 episodes (Gymnasium asks for 475)"),
    ("CartPole-v1", 60, 9, "learned: mean return 60.0 in 5 episodes, short of the 475 that Gymnasium calls solved; b"),
    ("CartPole-v1", 45, 9, "cannot be told from b: mean return 45.0 in 5 episodes, and 30.0; their 95 % intervals"),
    ("CartPole-v1", 25, 9, "not learned: mean return 25.0 in 5 episodes; b has 30.0"),
    ("Pendulum-v1", 60, 9, "learned: mean return 60.0 in 5 episodes; b has 30.0"),
]  # fmt: skip


@pytest.mark.parametrize(("env_id", "mean", "interval", "verdict"), OF_EPISODES)
def test_verdicts_of_episodes(env_id, mean, interval, verdict):
    figures = {"a": (20, 1), "b": (30, 10), "trained, greedy": (mean, interval), "trained, sampled": (999, 0)}
    scores = [judge.EpisodeScore(name, *pair, 5, 0.0, 0.0) for name, pair in figures.items()]
    assert judge.verdict_of(scores, make_gym_environment(env_id)).startswith(verdict)
    assert judge.verdict_of(scores[:2], make_gym_environment(env_id)) == ""


def test_the_best_constant_action_is_the_best(model):
    """On the cliff RIGHT falls at each step."""
    arguments = arguments_of(model, "--env_id", "CliffWalking-v1")
    _, constant = judge.reference_scores(make_gym_environment("CliffWalking-v1", None, 30), arguments)
    assert (constant.policy, constant.mean_return) == ("best constant action (0)", -30)
