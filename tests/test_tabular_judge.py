"""`TableJudge`: a model's completions as policy tables, and what is said of them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from tiny_models import build_tiny_model

from llm_policy.chat import Reader
from llm_policy.completions import parse_completion
from llm_policy.environments.frozen_lake import ACTIONS, CANONICAL_GRIDS, FrozenLake, acting_states
from llm_policy.environments.pictures import thoughts_figure
from llm_policy.environments.policy_table import best_actions, constant_policy, expert_policy, uniform_policy
from llm_policy.environments.toy_text import CliffWalking, Taxi
from llm_policy.errors import InputError
from llm_policy.models import load_model, load_tokenizer
from prompts import format_example, policy_messages
from tasks import cliff_walking, frozen_lake, tabular_judge, taxi
from tasks.frozen_lake import exchanged, lake_words
from tasks.tabular_judge import TableJudge

GRID = CANONICAL_GRIDS["4x4"]
LAKE = FrozenLake(GRID)
STATES = acting_states(GRID)
LEFT, DOWN, RIGHT, UP = range(4)
EXPERT = expert_policy(LAKE)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = build_tiny_model(tmp_path_factory.mktemp("models") / "llama")
    return load_model(folder, dtype="float32"), load_tokenizer(folder)


class Scripted:
    """A reader whose model says what stands in `texts`, over and over, whatever it is asked."""

    def __init__(self) -> None:
        self.asked: list = []

    def completions(self, texts, prompts, samples, guesses):
        assert len(prompts) == len(guesses)
        self.asked.append((prompts, samples, guesses))
        count = len(prompts) * max(samples, 1)
        return (list(texts) * count)[:count]


def judge_of(lakes=(LAKE,), reader=None, **options) -> TableJudge:
    return TableJudge(list(lakes), lake_words("coordinates"), reader or Scripted(), {}, **options)


def scripted(texts: list[str], samples: int, lakes=(LAKE,)) -> tuple[list[np.ndarray], float]:
    """The policy tables and the format validity of a model that says `texts`."""
    answers = judge_of(lakes).answers(texts, samples)
    assert json.loads(json.dumps(answers)) == answers, "fit for a file"
    return [np.array(policy) for policy in answers["policies"]], answers["format_validity"]


def reply(answer: str) -> str:
    return f"<think>ice</think><answer>{answer}</answer>"


# What a model says -----------------------------------------------------------------------------------------------


def test_greedy_completions_become_a_one_hot_table():
    texts = [format_example(GRID, state, i % 4) for i, state in enumerate(STATES)]
    (policy_SA,), validity = scripted(texts, samples=0)
    assert policy_SA[STATES].argmax(1).tolist() == [i % 4 for i in range(11)]
    assert set(np.unique(policy_SA[STATES])) == {0.0, 1.0}
    np.testing.assert_array_equal(np.delete(policy_SA, STATES, axis=0), 0.25)
    assert validity == 1.0


def test_the_exact_answers_of_samples_become_their_mean(monkeypatch):
    # Per state: LEFT, LEFT, UP, unreadable (a uniformly random action); tests/test_answers.py has where they come from
    rows_GA = np.array([[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0.25] * 4])
    found = np.zeros((11, 4)), np.tile(rows_GA, (11, 1, 1)), 0.75
    monkeypatch.setattr(tabular_judge, "sampled_answers", lambda *_: found)
    answers = judge_of().answers(None, samples=4)
    assert json.loads(json.dumps(answers)) == answers, "fit for a file"
    policy_SA = np.array(answers["policies"][0])
    np.testing.assert_allclose(policy_SA[STATES], [[2.25 / 4, 0.25 / 4, 0.25 / 4, 1.25 / 4]] * 11)
    np.testing.assert_allclose(policy_SA.sum(1), 1.0)
    assert answers["format_validity"] == 0.75
    # Each sample alone is a quarter of four: always LEFT twice, always UP, random
    assert answers["success_of_parts"] == pytest.approx([0.0, 0.0, 0.0, 0.0139], abs=1e-4)


def test_what_is_left_to_chance_is_printed_below_the_table(capsys):
    judge = judge_of()
    answers = {"policies": [EXPERT.tolist()], "format_validity": 1.0, "success_of_parts": [0.6, 0.7, 0.65, 0.62]}
    comparison = judge.compare({"trained, sampled": answers})
    line = "trained, sampled: exact answers behind sampled thoughts; a quarter of the thoughts gives 0.6000 to "
    assert f"{line}0.7000 within the limit." in comparison.text
    assert line in capsys.readouterr().out


VALIDITIES = [
    # completion, share that counts as valid, row of the table
    (reply("UP"), 1.0, [0, 0, 0, 1]),
    # An answer in a malformed reply moves the agent and is still invalid
    ("<answer>UP</answer>", 0.0, [0, 0, 0, 1]),
    # Well-formed without an action
    (reply("UP or LEFT"), 0.0, [0.25] * 4),
    ("", 0.0, [0.25] * 4),
]


@pytest.mark.parametrize(("text", "validity", "row"), VALIDITIES)
def test_format_validity(text, validity, row):
    (policy_SA,), found = scripted([text], samples=0)
    assert found == validity
    np.testing.assert_array_equal(policy_SA[STATES], [row] * 11)


def test_several_maps_of_different_sizes():
    lakes = (FrozenLake(("SFG",)), LAKE)
    policies_SA, _ = scripted([reply(ACTIONS[i % 4]) for i in range(13)], 0, lakes)
    assert [policy_SA.shape for policy_SA in policies_SA] == [(3, 4), (16, 4)]
    assert policies_SA[0].argmax(1)[:2].tolist() == [LEFT, DOWN]
    assert policies_SA[1][STATES].argmax(1).tolist() == [(i + 2) % 4 for i in range(11)]


def test_what_is_asked():
    """The prompt of each acting state in turn; the guess is what the warm start teaches there."""
    reader = Scripted()
    judge_of([LAKE, FrozenLake(("SFG",), is_slippery=False)], reader).answers([""])
    ((prompts, samples, guesses),) = reader.asked
    assert samples == 0
    assert prompts[:11] == [policy_messages(GRID, state, True) for state in STATES]
    assert prompts[11:] == [policy_messages(("SFG",), state, False) for state in (0, 1)]
    assert guesses[:11] == [format_example(GRID, state, 0) for state in STATES]


def test_a_real_model_is_asked_for_every_state(tiny):
    model, tokenizer = tiny
    reader = Reader(tokenizer, max_completion_tokens=4, rows_per_batch=5)
    judge, texts, ask = judge_of(reader=reader), [], Reader.completions

    def recorded(*arguments):
        texts.extend(ask(*arguments))
        return texts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "completions", recorded)
        (policy_SA,) = judge.answers(model, samples=2)["policies"]
    assert len(texts) == 22
    np.testing.assert_allclose(np.sum(policy_SA, axis=1), 1.0)
    assert judge.first_prompt() == reader.prompt(policy_messages(GRID, 0, True))


def test_actions_are_read_by_name_in_every_environment():
    """Gymnasium's order differs: UP is 0 on the cliff and 3 on the lake, and the taxi knows no LEFT."""
    for module, environment in ((cliff_walking, CliffWalking()), (taxi, Taxi())):
        for action, name in enumerate(environment.actions):
            judge = module.make_judge({}, Scripted(), episodes=5, seed=0)
            answers = judge.answers([reply(name.lower())])
            (policy,) = answers["policies"]
            rows_PA = np.array(policy)[environment.acting_states]
            assert (rows_PA == np.eye(len(environment.actions))[action]).all()
            assert answers["format_validity"] == 1.0
    answers = taxi.make_judge({}, Scripted(), episodes=5, seed=0).answers([reply("LEFT")])
    assert answers["format_validity"] == 0.0
    np.testing.assert_allclose(answers["policies"][0], 1 / 6)


# What is said of it ----------------------------------------------------------------------------------------------


def test_figures_of_two_maps():
    """One solved and one walked DOWN."""
    policies = [EXPERT.tolist(), constant_policy(16, 1, 4).tolist()]
    judgement = judge_of([LAKE] * 2).judgement({"policies": policies, "format_validity": 0.5})
    figures = dict(judgement.metrics)
    assert figures.pop("mutual_information") > 0
    assert figures == pytest.approx(
        {
            "success_probability": (14 / 17 + 0.04949) / 2,
            "success_at_horizon": (0.74018 + 0.04944) / 2,
            "percent_of_optimal": (100 + 6.0048) / 2,
            "optimal_states": 11 + 2,
            "format_validity": 0.5,
        },
        abs=1e-3,
    )
    assert judgement.verdict.startswith("partly learned: 13/22 states, 53 % of optimal")


NEARLY = EXPERT.copy()
NEARLY[10] = np.eye(4)[RIGHT]  # into the hole beside it, at times
OPTIMA = [
    # policies of two equal maps, whether nothing is left to learn
    ([EXPERT, EXPERT], True),
    ([EXPERT, NEARLY], False),
    # One map at its optimum is not all of them
    ([EXPERT, constant_policy(16, 1, 4)], False),
    ([uniform_policy(16, 4)] * 2, False),
]


@pytest.mark.parametrize(("policies_SA", "is_optimal"), OPTIMA)
def test_the_optimum_is_one_of_every_map(policies_SA, is_optimal):
    answers = {"policies": [policy_SA.tolist() for policy_SA in policies_SA], "format_validity": 1.0}
    assert judge_of([LAKE] * 2).judgement(answers).is_optimal is is_optimal


@pytest.mark.parametrize(("percents", "is_optimal"), [((100.0, 99.95), True), ((100.0, 99.8), False), ((50.0,), False)])
def test_what_counts_as_the_optimum(percents, is_optimal, monkeypatch):
    left = iter(percents)
    score_policy = tabular_judge.score_policy

    def scored(*arguments):
        return replace(score_policy(*arguments), percent_of_optimal=next(left), optimal_states=10)

    monkeypatch.setattr(tabular_judge, "score_policy", scored)
    answers = {"policies": [EXPERT.tolist()] * len(percents), "format_validity": 1.0}
    assert judge_of([LAKE] * len(percents)).judgement(answers).is_optimal is is_optimal


def test_what_the_expert_does_in_every_state_is_the_optimum_though_its_discount_costs_something():
    lake = FrozenLake(CANONICAL_GRIDS["8x8"])
    answers = {"policies": [expert_policy(lake).tolist()], "format_validity": 1.0}
    judgement = judge_of([lake]).judgement(answers)
    assert judgement.metrics["percent_of_optimal"] == pytest.approx(89.4, abs=0.1)
    assert judgement.verdict == "learned what the expert does: 53/53 states, 89 % of optimal"
    assert judgement.is_optimal


def test_the_picture_says_the_verdict():
    judgement = judge_of().judgement({"policies": [EXPERT.tolist()], "format_validity": 1.0})
    titles = [" ".join(text.get_text().split()) for text in judgement.draw("step 7").texts]
    assert "step 7: learned: 11/11 states, 100 % of optimal" in titles


def test_the_return_of_the_cliff_is_among_the_figures():
    cliff = CliffWalking()
    judge = cliff_walking.make_judge({}, Scripted(), episodes=5, seed=0)
    judgement = judge.judgement({"policies": [expert_policy(cliff).tolist()], "format_validity": 1.0})
    assert judgement.metrics["return_at_horizon"] == -13.0
    assert judgement.metrics["percent_of_optimal"] == pytest.approx(100.0)
    assert (judgement.is_optimal, judgement.metrics["optimal_states"]) == (True, 37)
    assert "return_at_horizon" not in judge_of().judgement({"policies": [EXPERT], "format_validity": 1.0}).metrics


# Beside each other -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["constant:NORTH", "constant", "constant:", "expert:now", "random:1", "oracle", ""])
def test_unknown_baselines(name):
    with pytest.raises(InputError, match=f"--policies '{name}': expected a run folder, a model or one of random"):
        judge_of().baseline_answers(name)


def test_baselines_have_no_format_validity():
    answers = judge_of([LAKE] * 2).baseline_answers("constant:up")
    assert list(answers) == ["policies"]
    np.testing.assert_array_equal(answers["policies"], [constant_policy(16, UP, 4)] * 2)


def test_baselines_follow_the_judges_seed(monkeypatch):
    seeds = []

    def recorded(name, environment, seed):
        seeds.append(seed)
        return uniform_policy(16, 4)

    monkeypatch.setattr(tabular_judge, "baseline_policy", recorded)
    judge_of([LAKE] * 2, seed=5).baseline_answers("q-learning")
    assert seeds == [5, 5]


TITLES = [
    # judge, first line of its table
    (lambda: judge_of(), "FrozenLake-v1 SFFF|FHFH|FFFH|HFFG"),
    (lambda: frozen_lake.make_judge({}, Scripted(), 5, 0), "FrozenLake-v1 SFFF|FHFH|FFFH|HFFG, slippery"),
    (
        lambda: frozen_lake.make_judge({"map": "4x4", "is_slippery": False}, Scripted(), 5, 0),
        "FrozenLake-v1 SFFF|FHFH|FFFH|HFFG, not slippery",
    ),
    (
        lambda: frozen_lake.make_judge({"maps": ["SFG", "SG"], "is_slippery": False}, Scripted(), 5, 0),
        "FrozenLake-v1 2 maps, not slippery",
    ),
    (lambda: cliff_walking.make_judge({}, Scripted(), 5, 0), "CliffWalking-v1"),
]


@pytest.mark.parametrize(("make", "title"), TITLES)
def test_comparison(make, title, tmp_path, capsys):
    judge = make()
    random = judge.baseline_answers("random")
    comparison = judge.compare({"a model, greedy": random | {"format_validity": 0.25}, "random": random})
    assert comparison.text.splitlines()[0] == title
    assert comparison.text in capsys.readouterr().out
    rows = [line for line in comparison.text.splitlines() if line.startswith(("a model, greedy", "random"))]
    assert ["25 %" in row for row in rows] == [True, False]
    comparison.save(tmp_path)
    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert content["env_id"] == judge.environments[0].env_id
    assert [p["policy"] for p in content["policies"]][3:] == ["a model, greedy", "random"]
    assert content["policies"][3]["format_validity"] == 0.25
    assert {key: content.get(key) for key in ("maps", "is_slippery")} == {
        key: judge.settings.get(key) for key in ("maps", "is_slippery")
    }


def test_the_tasks_own_baselines_stand_below():
    shortest = {"shortest path": [constant_policy(16, 1, 4)]}
    judge = judge_of(named_policies=shortest, episodes=5)
    text = judge.compare({"random": judge.baseline_answers("random")}).text
    assert "shortest path" in text.splitlines()[-3]
    assert text.splitlines()[-1].startswith("The best policy that may count its steps reaches 0.7442")


# The judge of a run ----------------------------------------------------------------------------------------------


def test_a_judge_is_made_again_from_its_own_settings():
    settings = {"maps": ["SFG", "SG"], "is_slippery": False, "observation": "spaced"}
    judge = frozen_lake.make_judge(settings | {"horizon_steps": 7, "seed": 5, "commit": "abc"}, Scripted(), 9, 3)
    assert judge.settings == settings
    assert judge.environments == [FrozenLake(("SFG",), False), FrozenLake(("SG",), False)]
    assert (judge.horizon_steps, judge.episodes, judge.seed) == (7, 9, 3)
    reader = judge.reader
    judge.answers([""])
    assert reader.asked[0][0][0] == policy_messages(("SFG",), 0, False, "spaced")
    again = frozen_lake.make_judge(judge.settings, Scripted(), 9, 3)
    assert (again.settings, again.environments) == (judge.settings, judge.environments)


def test_an_unknown_observation():
    with pytest.raises(InputError, match=r"^--observation 'pixels': expected one of grid, coordinates"):
        frozen_lake.make_judge({"observation": "pixels"}, Scripted(), 1, 0)


@pytest.mark.parametrize(("settings", "is_fixed"), [({}, True), ({"thought": "search"}, False)])
def test_a_thought_that_looks_at_the_map_is_sampled_and_not_taken_for_granted(settings, is_fixed, monkeypatch):
    asked = []

    def sampled(*arguments):
        asked.append(arguments[-1])
        return np.zeros((11, 4)), np.full((11, 1, 4), 0.25), 1.0

    monkeypatch.setattr(tabular_judge, "sampled_answers", sampled)
    tabular_judge.TableJudge([LAKE], lake_words("coordinates"), Scripted(), settings).answers(None, samples=1)
    assert asked == [is_fixed]


# Thoughts with a false word --------------------------------------------------------------------------------------


@pytest.mark.parametrize("followed", ["thought", "prompt", "neither"])
def test_what_the_answer_follows(followed, monkeypatch):
    """Scripted models: the exchanged map's best action, the prompt's, one that is best in neither."""
    words = lake_words("cells", "neighbours")
    judge = TableJudge([FrozenLake(CANONICAL_GRIDS["4x4"], False)], words, Reader(None), {})
    (lake,) = judge.environments
    states = [state for state in lake.acting_states if exchanged(lake, state)]
    true = [words.reply(lake, state, 0) for state in states]

    def behind(_reader, _model, prompts, replies, actions):
        rows = []
        if replies == true:
            return np.array([best_actions(lake)[state] for state in states], dtype=float)
        for state, prompt, reply in zip(states, prompts, replies, strict=True):
            other = exchanged(lake, state)
            assert prompt == words.messages(lake, state)
            assert reply == words.reply(other, state, 0) != words.reply(lake, state, 0)
            best, best_there = best_actions(lake)[state], best_actions(other)[state]
            rows.append({"thought": best_there, "prompt": best, "neither": ~(best | best_there)}[followed])
        return np.array(rows, dtype=float)

    monkeypatch.setattr("tasks.tabular_judge.answers_behind", behind)
    found = judge.follows(None)
    assert found.pop("states") == len(states) >= 5
    assert found.pop("changed") == float(followed != "prompt")
    assert found == {name: float(name == followed) for name in ("thought", "prompt", "neither")}


def test_a_policy_that_reads_no_thought_changes_no_answer(monkeypatch):
    """Always UP is best on the thought's map in some states: what it follows says nothing without `changed`."""
    judge = TableJudge([FrozenLake(CANONICAL_GRIDS["4x4"], False)], lake_words("cells", "ways"), Reader(None), {})
    monkeypatch.setattr("tasks.tabular_judge.answers_behind", lambda _r, _m, prompts, *_: np.eye(4)[[3] * len(prompts)])
    found = judge.follows(None)
    assert found["thought"] > 0
    assert found["changed"] == 0
    monkeypatch.setattr("tasks.tabular_judge.MOST_EXCHANGED", 3)
    assert judge.follows(None)["states"] == 3


def test_false_thoughts_stand_below_the_table_and_in_the_file(tmp_path):
    lake = FrozenLake(CANONICAL_GRIDS["4x4"], False)
    judge = TableJudge([lake], lake_words("cells", "neighbours"), Reader(None), {"thought": "neighbours"}, episodes=1)
    followed = {"thought": 0.75, "prompt": 0.25, "neither": 0.0, "changed": 0.875, "states": 8}
    told = {"true_thoughts": 0.5, "true_words": 0.9, "behind_false_thoughts": followed}
    answers = judge.baseline_answers("random") | {"format_validity": 1.0, "shown": []} | told
    compared = judge.compare({"trained, greedy": answers, "random": judge.baseline_answers("random")})
    printed = " ".join(compared.text.split())
    assert "changes in 88% of 8 states. It is best on the thought's map in 75%, on the prompt's in 25%" in printed
    assert "50.0% of thoughts are true, 90.0% of their words." in printed
    compared.save(tmp_path)
    written = json.loads((tmp_path / "evaluation.json").read_text())
    assert written["thoughts"] == {"trained, greedy": told, "random": {}}


def test_thoughts_are_drawn_below_their_maps(tmp_path, monkeypatch):
    """A scripted model that says ice of every hole: its words stand in the picture, the false ones are told apart."""
    lakes = [FrozenLake(CANONICAL_GRIDS["4x4"], slips) for slips in (True, False)]
    judge = TableJudge(lakes, lake_words("cells", "neighbours"), Reader(None), {"thought": "neighbours"}, episodes=1)

    def completions(self, _model, _prompts, _samples, guesses):
        return [text.replace("hole", "ice") for text in guesses]

    monkeypatch.setattr(Reader, "completions", completions)
    monkeypatch.setattr(TableJudge, "follows", lambda *_: {"states": 0})
    answers = judge.answers(None)
    assert [number for number, *_ in answers["shown"]] == [1, 5, 9, 12, 16, 20]  # of 11 states of each lake
    written = []
    monkeypatch.setattr("tasks.tabular_judge.thoughts_figure", lambda *a: written.append(a) or thoughts_figure(*a))
    judge.compare({"trained, greedy": json.loads(json.dumps(answers))}).save(tmp_path)
    assert (tmp_path / "thoughts.png").stat().st_size > 10_000
    ((shown, title),) = written
    assert title.startswith("trained, greedy: 27.3% of 22 thoughts are true")
    fifth = shown[1]
    state = lakes[0].acting_states[5]
    assert (fifth.environment, fifth.state) == (lakes[0], state)
    true = parse_completion(lake_words("cells", "neighbours").reply(lakes[0], state, 0)).thought.split()
    assert [word for word, _ in fifth.words] == [word.replace("hole", "ice") for word in true]
    assert [is_true for _, is_true in fifth.words] == [not word.startswith("hole") for word in true]
    assert fifth.action_A.tolist() == [1, 0, 0, 0]
