"""The expert's CSV: made bit for bit, read in every form, and refused with one line where it is wrong."""

import csv
import os
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings, strategies

from llm_policy.environments.expert_q import (
    ExpertOptions,
    all_columns,
    expert_q,
    learn_q,
    main,
    q_columns,
    read_expert_csv,
)
from llm_policy.environments.frozen_lake import (
    ACTIONS,
    CANONICAL_GRIDS,
    FrozenLake,
    acting_states,
    lake_mdp,
    parse_state_text,
    random_grids,
    state_text,
)
from llm_policy.environments.mdp import greedy_policy, optimal_actions, optimal_q, policy_return
from llm_policy.environments.toy_text import CliffWalking, Taxi
from llm_policy.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = ROOT / "expert_demos_batched_avg_q.csv"
GRID = CANONICAL_GRIDS["4x4"]
ACTING = acting_states(GRID)
HEADER = "state_str,action,q_value_left,q_value_down,q_value_right,q_value_up"
GOOD_ROW = "AFFF|FHFH|FFFH|HFFG,0,0.4,0.3,0.2,0.1"


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "expert.csv"
    path.write_bytes("\n".join(lines).encode())
    return path


def test_committed_file_is_regenerated_bit_for_bit(tmp_path):
    path = tmp_path / "again.csv"
    command = [sys.executable, "-m", "llm_policy.environments.expert_q", "--output", str(path), "--overwrite"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert path.read_bytes() == COMMITTED.read_bytes()
    assert "11 of 11 states" in done.stdout
    assert "0.7402 (best possible 0.7442)" in done.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["again.csv"]


FLAWS = {
    # flags: in how many of the 11 states the expert's action stays optimal
    (): 11,
    ("--wrong_states", "0.1"): 10,
    ("--wrong_states", "1"): 1,  # where two actions tie, the second stays
    ("--labels_only", "true"): 11,
    ("--noise", "1e-9"): 11,
}


@pytest.mark.parametrize("flags", FLAWS, ids=" ".join)
def test_flaws_of_the_expert(flags, tmp_path):
    path = tmp_path / "expert.csv"
    main(["--rows", "states", "--output", str(path), *flags])
    table = read_expert_csv(path)
    exact_SA = optimal_q(lake_mdp(GRID), gamma=0.99)
    found_PA, exact_PA = np.array(table["q_values"].tolist()), exact_SA[table["state"]]
    assert optimal_actions(exact_PA)[range(11), table["action"]].sum() == FLAWS[flags]
    if "--labels_only" in flags:
        assert (np.sort(found_PA) == [0, 0, 0, 1]).all()
    elif "--wrong_states" in flags:  # the same values in another order
        np.testing.assert_allclose(np.sort(found_PA), np.sort(exact_PA), atol=1e-9)


def test_the_share_of_wrong_states_is_that_of_all_maps_together(tmp_path):
    flags = ["--random_maps", "50", "--rows", "states"]
    tables = []
    for share in ("0", "0.03"):
        path = tmp_path / f"{share}.csv"
        main([*flags, "--wrong_states", share, "--output", str(path)])
        with warnings.catch_warnings(action="ignore"):
            tables.append(read_expert_csv(path))
    is_changed = [one != other for one, other in zip(*(table["q_values"] for table in tables), strict=True)]
    assert sum(is_changed) == round(0.03 * len(is_changed))


def test_noise_on_the_experts_values(tmp_path):
    """In units of the largest |Q|; another seed gives other noise."""
    drawn = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.csv"
        main(["--random_maps", "200", "--rows", "states", "--noise", "0.1", "--seed", seed, "--output", str(path)])
        with warnings.catch_warnings(action="ignore"):
            table = read_expert_csv(path)
        lakes = {lake: optimal_q(lake.mdp, 0.99) for lake in set(table["environment"])}
        places = zip(table["environment"], table["state"], strict=True)
        exact_PA = [lakes[lake][state] / lakes[lake].max() for lake, state in places]
        scale_P = [lakes[lake].max() for lake in table["environment"]]
        noise_PA = np.array(table["q_values"].tolist()) / np.array(scale_P)[:, None] - exact_PA
        drawn.append((noise_PA.mean(), noise_PA.std()))
    for mean, std in drawn:
        assert abs(mean) < 0.01
        assert std == pytest.approx(0.1, rel=0.05)
    assert drawn[0] != drawn[1]


def test_committed_file_holds_the_exact_expert():
    table = read_expert_csv(COMMITTED)
    q_SA = optimal_q(lake_mdp(GRID), gamma=0.99)
    assert sorted(table["state"]) == ACTING
    assert 2000 <= table["count"].sum() <= 5000
    assert COMMITTED.stat().st_size < 700_000
    for row in table.itertuples():
        assert row.environment == FrozenLake(GRID)
        assert row.state_str == state_text(GRID, row.state)
        assert row.action == greedy_policy(q_SA)[row.state].argmax()
        assert row.q_values == pytest.approx(q_SA[row.state].tolist(), abs=1e-10)


def test_rows_are_the_steps_of_gymnasium_episodes():
    with COMMITTED.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == all_columns(ACTIONS)
    table = gym.make("FrozenLake-v1").unwrapped.P
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        outcomes = [(o[1], float(o[2]), o[3]) for o in table[int(row["state"])][int(row["action"])]]
        assert (int(row["next_state"]), float(row["reward"]), row["done"] == "True") in outcomes
        assert row["action_text"] == ACTIONS[int(row["action"])]
        if following and row["done"] == "True":
            assert following["state"] == "0"
    assert [int(row["batch_idx"]) for row in rows] == sorted(int(row["batch_idx"]) for row in rows)
    # success of 80 episodes within four standard errors of the exact 0.7402
    successes = sum(float(row["reward"]) for row in rows)
    assert successes / 80 == pytest.approx(0.7402, abs=4 * (0.74 * 0.26 / 80) ** 0.5)


def test_options_reach_the_file(tmp_path):
    lake = tmp_path / "lake.txt"
    lake.write_text("SFF\nFFG\n")
    path = tmp_path / "a.csv"
    short = ["--map", str(lake), "--is_slippery", "false", "--batches", "2", "--episodes_per_batch", "3"]
    main([*short, "--gamma", "0.5", "--output", str(path)])
    table = read_expert_csv(path)
    # three steps to the goal, the last one earns 1
    assert [max(q) for q in table["q_values"]] == pytest.approx([0.25, 0.5, 1.0])
    assert table["count"].tolist() == [6, 6, 6]
    assert read_csv_column(path, "batch_idx") == ["0"] * 9 + ["1"] * 9
    main([*short, "--gamma", "0.5", "--horizon_steps", "2", "--overwrite", "--output", str(path)])
    assert len(read_csv_column(path, "done")) == 12
    assert set(read_csv_column(path, "done")) == {"False"}


def test_seed_changes_the_slips_and_only_them(tmp_path):
    paths = [tmp_path / f"{name}.csv" for name in "abc"]
    for path, seed in zip(paths, "445", strict=True):
        main(["--seed", seed, "--batches", "1", "--output", str(path)])
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].read_bytes() != paths[2].read_bytes()


def read_csv_column(path: Path, name: str) -> list[str]:
    with path.open(newline="") as file:
        return [row[name] for row in csv.DictReader(file)]


def test_existing_file_is_left_alone(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("mine")
    with pytest.raises(InputError, match="--overwrite"):
        main(["--output", str(path)])
    assert path.read_text() == "mine"
    with pytest.raises(InputError, match="no folder"):
        main(["--output", str(tmp_path / "none" / "a.csv")])
    path.write_text("SG\n")
    with pytest.raises(InputError, match="is the map itself"):
        main(["--map", str(path), "--output", str(path), "--overwrite", "true"])
    assert path.read_text() == "SG\n"
    path.write_text("seed: 1\n")
    with pytest.raises(InputError, match="is the configuration itself"):
        main(["--config", str(path), "--output", str(path), "--overwrite", "true"])
    path.write_text("SG\n")
    (tmp_path / "hard").hardlink_to(path)
    with pytest.raises(InputError, match="is the map itself"):
        main(["--map", str(path), "--output", str(tmp_path / "hard"), "--overwrite", "true"])


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
def test_what_is_no_regular_file_is_left_alone(kind, tmp_path):
    path, other = tmp_path / "a.csv", tmp_path / "other.csv"
    if "link" in kind:
        path.symlink_to(other)
    if kind == "link":
        other.write_text("mine")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    before = sorted(tmp_path.iterdir())
    for flags in ([], ["--overwrite", "true"]):
        with pytest.raises(InputError, match=r"a\.csv: is no regular file and is left as it is"):
            main(["--rows", "states", "--output", str(path), *flags])
    assert sorted(tmp_path.iterdir()) == before
    assert kind != "link" or (path.is_symlink() and other.read_text() == "mine")


def test_no_file_of_others_stands_in_the_way(tmp_path):
    """A name may be nearly as long as a disk takes, and what is unfinished has a name of its own."""
    (tmp_path / "a.csv.unfinished").write_text("mine")
    (tmp_path / "b.csv.unfinished").mkdir()
    for name in ("a.csv", "b.csv", f"{'c' * 236}.csv"):
        main(["--rows", "states", "--output", str(tmp_path / name)])
        assert len(read_expert_csv(tmp_path / name)) == 11
    assert (tmp_path / "a.csv.unfinished").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize(
    "flags",
    [
        ["--gamma", "1.5"],
        ["--batches", "0"],
        ["--seed", "-1"],
        ["--map", "9x9"],
        ["--horizon_steps", "0"],
        ["--noise", "-0.1"],
        ["--noise", "nan"],
        ["--wrong_states", "1.1"],
        ["--batches", "100000", "--episodes_per_batch", "100000"],
        ["--batches", "100000", "--episodes_per_batch", "1", "--method", "q_learning"],
        ["--random_maps", "100000", "--map_size", "64"],
        ["--map_size", "8"],
        ["--q_learning_steps", "3000"],
        ["--batches", "50", "--rows", "states"],
        ["--episodes_per_batch", "4", "--rows", "states"],
        ["--map", "8x8", "--random_maps", "5"],
        ["--random_maps", "3", "--env_id", "Taxi-v4"],
        ["--is_slippery", "false", "--env_id", "CliffWalking-v1"],
        ["--is_slippery", "true", "--env_id", "CliffWalking-v1"],
    ],
)
def test_bad_options(tmp_path, flags):
    with pytest.raises(InputError) as error:
        main([*flags, "--output", str(tmp_path / "a.csv")])
    assert flags[1] in str(error.value).lower()
    assert not list(tmp_path.iterdir())


def test_q_learning_approaches_the_exact_q():
    """Largest error of five averaged learners, seeds 0-2: 0.04-0.06 after 100,000 steps, 0.03-0.05 after 200,000."""
    lake, exact_SA = lake_mdp(GRID), optimal_q(lake_mdp(GRID), gamma=0.99)
    q_RSA = learn_q(FrozenLake(GRID), 0.99, runs=5, learner_steps=150_000, seed=0)
    error = abs(q_RSA.mean(axis=0) - exact_SA).max()
    assert error < 0.08
    # independent learners: the average is closer than the typical one
    assert error < np.mean([abs(q_SA - exact_SA).max() for q_SA in q_RSA])
    assert (q_RSA[:, lake.terminal_S] == 0).all()
    assert policy_return(lake, greedy_policy(q_RSA.mean(axis=0))) > 0.78
    short = [learn_q(FrozenLake(GRID), 0.99, runs=2, learner_steps=500, seed=seed) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(short[0], short[1])
    assert (short[0] != short[2]).any()


def test_q_learning_as_the_options_say():
    options = ExpertOptions(method="q_learning", q_learning_steps=300, batches=2, seed=1, gamma=0.5)
    own = learn_q(FrozenLake(GRID), 0.5, runs=2, learner_steps=300, seed=1).mean(axis=0)
    np.testing.assert_array_equal(expert_q(FrozenLake(GRID), options), own)


def test_q_learning_is_exact_without_slips(tmp_path):
    exact_SA = optimal_q(lake_mdp(GRID, is_slippery=False), gamma=0.9)
    q_RSA = learn_q(FrozenLake(GRID, False), 0.9, runs=2, learner_steps=60_000, seed=0)
    np.testing.assert_allclose(q_RSA[:, ACTING], np.broadcast_to(exact_SA[ACTING], (2, 11, 4)), atol=1e-3)
    path = tmp_path / "learned.csv"
    main(["--method", "q_learning", "--q_learning_steps", "20000", "--is_slippery", "false", "--output", str(path)])
    assert read_expert_csv(path)["action"].tolist() == [1, 1, 2, 1, 2, 2]


def test_merges_rows_by_grid_and_state(tmp_path):
    other = "AFG|FFF,UP,0,0,0,1"
    rows = [GOOD_ROW, other, "AFFF|FHFH|FFFH|HFFG, left ,0.6,0.3,0.2,0.1", "SAG|FFF,2.0,0,0,1,0"]
    table = read_expert_csv(write(tmp_path, HEADER, *rows))
    assert table["state_str"].tolist() == ["AFFF|FHFH|FFFH|HFFG", "AFG|FFF", "SAG|FFF"]
    small = FrozenLake(("SFG", "FFF"))
    assert table["environment"].tolist() == [FrozenLake(GRID), small, small]
    assert table["state"].tolist() == [0, 0, 1]
    assert table["action"].tolist() == [0, 3, 2]
    assert table["count"].tolist() == [2, 1, 1]
    assert table["q_values"][0] == pytest.approx([0.5, 0.3, 0.2, 0.1])


def test_ansi_bom_crlf_extra_columns_and_any_order(tmp_path):
    env = gym.make("FrozenLake-v1", is_slippery=False, render_mode="ansi")
    env.reset(seed=0)
    texts = [env.render()]
    for action in (1, 1, 2):
        env.step(action)
        texts.append(env.render())
    path = tmp_path / "seed.csv"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, lineterminator="\r\n")
        writer.writerow(
            ["note", *[f"q_value_{name}" for name in ("up", "right", "down", "left")], "state_str", "action"]
        )
        for text, action in zip(texts, ("Down", "DOWN", "right", "1"), strict=True):
            best = {"down": "1", "right": "1"}.get(action.lower(), "")
            up_right_down_left = [0, 1, 0, 0] if action == "right" else [0, 0, 1, 0]
            writer.writerow([f"extra {best}", *up_right_down_left, text, action])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = read_expert_csv(path)
    assert table["state_str"].tolist() == [state_text(GRID, state) for state in (0, 4, 8, 9)]
    assert table["action"].tolist() == [1, 1, 2, 1]
    assert table["q_values"][2] == [0, 0, 1, 0]


def bad_row(column: int, value: str) -> list[str]:
    fields = GOOD_ROW.split(",")
    fields[column] = value
    return [HEADER, GOOD_ROW, ",".join(fields)]


WITH_STATE = HEADER + ",state"
ANSI_ROWS = '"\x1b[41mS\x1b[0mFF\nFHG",0,1,0,0,0'


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([""], ["is empty"]),
        ([HEADER], ["no rows"]),
        ([HEADER, "", ""], ["no rows"]),
        ([HEADER.replace(",q_value_up", ""), "AFG,0,1,1,1"], ["q_value_up", "missing"]),
        ([HEADER.replace(",", ";"), GOOD_ROW.replace(",", ";")], ["missing", "commas"]),
        ([HEADER + ",action", GOOD_ROW + ",0"], ["column action", "2 times"]),
        ([HEADER, GOOD_ROW, GOOD_ROW + ",7"], ["line 3", "7 fields", "expected 6"]),
        ([HEADER, GOOD_ROW.rpartition(",")[0]], ["line 2", "5 fields"]),
        (bad_row(2, "nan"), ["line 3", "q_value_left", "'nan'", "finite"]),
        (bad_row(3, "-inf"), ["line 3", "q_value_down", "'-inf'"]),
        (bad_row(4, "1e400"), ["line 3", "q_value_right", "'1e400'"]),
        (bad_row(5, ""), ["line 3", "q_value_up", "''"]),
        (bad_row(2, "high"), ["line 3", "q_value_left", "'high'"]),
        (bad_row(2, "True"), ["line 3", "q_value_left", "'True'"]),
        (bad_row(1, "4"), ["line 3", "column action", "'4'", "0-3 or LEFT, DOWN, RIGHT, UP"]),
        (bad_row(1, "0.5"), ["line 3", "column action", "'0.5'"]),
        (bad_row(1, "-1"), ["line 3", "column action", "'-1'"]),
        (bad_row(1, "nan"), ["line 3", "column action", "'nan'"]),
        (bad_row(1, "JUMP"), ["line 3", "column action", "'JUMP'"]),
        (bad_row(0, "SFFF|FHFH|FFFH|HFFG"), ["line 3", "state_str", "no agents"]),
        (bad_row(0, "AFFF|FAFH|FFFH|HFFG"), ["line 3", "state_str", "2 agents"]),
        (bad_row(0, "AFFF|FHFH|FFFH|HFFF"), ["line 3", "state_str", "no goal"]),
        (bad_row(0, "AFFF|FHF|FFFH|HFFG"), ["line 3", "state_str", "row 2", "'FHF'"]),
        (bad_row(0, "AFFF|FHFx|FFFH|HFFG"), ["line 3", "state_str", "'x'"]),
        (bad_row(0, "SFF|F\x1b[41mH\x1b[0mG"), ["line 3", "state_str", "in a hole"]),
        (bad_row(0, "SFF|FG\x1b[41mG\x1b[0m"), ["line 3", "state_str", "at the goal"]),
        ([WITH_STATE, GOOD_ROW + ",0", GOOD_ROW + ",5"], ["line 3", "column state", "5", "state 0"]),
        ([WITH_STATE, GOOD_ROW + ",0", GOOD_ROW + ",x"], ["line 3", "column state", "'x'"]),
        ([WITH_STATE, GOOD_ROW + ",inf"], ["line 2", "column state", "'inf'"]),
        # an editor counts the lines inside quotes: the third row begins on line 6
        ([HEADER, ANSI_ROWS, ANSI_ROWS, bad_row(1, "9")[2]], ["line 6", "column action", "'9'"]),
        ([HEADER, '"AFFF|FHFH,0,1,1,1,1'], ["no CSV", "expected comma-separated"]),
    ],
)
def test_bad_csv(tmp_path, lines, words):
    path = write(tmp_path, *lines)
    with pytest.raises(InputError) as error:
        read_expert_csv(path)
    message = str(error.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    for word in words:
        assert word in message


ANY_FOLDER = settings(max_examples=300, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
GOOD_FILE = "\n".join([WITH_STATE, GOOD_ROW + ",0", ANSI_ROWS + ",0", "AFG|FFF,UP,0,-1e3,.5,1,0"]).encode()


def read_or_refuse(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # actions that are not the best
        try:
            table = read_expert_csv(path)
        except InputError as error:
            line = str(error)
        else:
            assert len(table) > 0
            assert np.isfinite(np.stack(table["q_values"])).all()
            return
    assert line.startswith(f"{path}: ")
    assert len(line.splitlines()) == 1


@ANY_FOLDER
@given(content=strategies.binary() | strategies.text().map(lambda text: f"{HEADER}\n{text}".encode()))
def test_any_file_is_read_or_refused_in_one_line(content, tmp_path):
    (tmp_path / "any.csv").write_bytes(content)
    read_or_refuse(tmp_path / "any.csv")


@ANY_FOLDER
@given(
    start=strategies.integers(0, len(GOOD_FILE)),
    length=strategies.integers(0, 20),
    instead=strategies.binary(max_size=8) | strategies.sampled_from([b",", b'"', b"\n", b"\r", b"nan", b"9" * 400]),
)
def test_any_damage_is_read_or_refused_in_one_line(start, length, instead, tmp_path):
    (tmp_path / "any.csv").write_bytes(GOOD_FILE[:start] + instead + GOOD_FILE[start + length :])
    read_or_refuse(tmp_path / "any.csv")


@pytest.mark.filterwarnings("ignore:.*rows disagree")
@ANY_FOLDER
@given(
    rows=strategies.lists(
        strategies.tuples(
            strategies.sampled_from(ACTING),
            strategies.lists(strategies.floats(-1e99, 1e99), min_size=4, max_size=4),
        ),
        min_size=1,
    )
)
def test_values_are_the_means_of_a_states_rows(rows, tmp_path):
    texts = [f"{state_text(GRID, state)},{np.argmax(q_A)},{','.join(map(repr, q_A))}" for state, q_A in rows]
    table = read_expert_csv(write(tmp_path, HEADER, *texts))
    assert table["state"].tolist() == list(dict.fromkeys(state for state, _ in rows))
    for state, q_A, count in zip(table["state"], table["q_values"], table["count"], strict=True):
        own_NA = np.array([values for other, values in rows if other == state])
        assert count == len(own_NA)
        np.testing.assert_allclose(q_A, own_NA.mean(axis=0), rtol=1e-9, atol=np.abs(own_NA).max() * 1e-9)


def test_bad_files(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_expert_csv(tmp_path / "none.csv")
    with pytest.raises(InputError, match="is a folder"):
        read_expert_csv(tmp_path)
    path = tmp_path / "latin.csv"
    path.write_bytes((HEADER + ",note\n" + GOOD_ROW + ",f\xfcr\n").encode("latin-1"))
    with pytest.raises(InputError, match="UTF-8"):
        read_expert_csv(path)


def test_one_warning_for_actions_that_are_not_best(tmp_path):
    worse = GOOD_ROW.replace(",0,", ",3,", 1)
    path = write(tmp_path, HEADER, GOOD_ROW, worse, GOOD_ROW, worse, GOOD_ROW)
    with pytest.warns(UserWarning, match="not the best") as caught:
        table = read_expert_csv(path)
    (message,) = [str(warning.message) for warning in caught]
    assert f"{path}: in 2 of 5 rows" in message
    assert "line 3: UP, where LEFT is best" in message
    assert table["action"].tolist() == [0]  # the most frequent one
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_expert_csv(COMMITTED)


def test_one_warning_for_rows_that_disagree_on_the_best_action(tmp_path):
    """They were averaged without a word."""
    state = GOOD_ROW.partition(",")[0]
    surer, other = f"{state},0,0.9,0.3,0.2,0.1", f"{state},1,0.1,0.9,0.2,0.1"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_expert_csv(write(tmp_path, HEADER, GOOD_ROW, surer))
    path = write(tmp_path, HEADER, GOOD_ROW, surer, other)
    with pytest.warns(UserWarning, match="disagree") as caught:
        read_expert_csv(path)
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith(f"{path}: rows disagree on the best action of 1 of 1 states, and the mean of their Q")
    assert message.endswith("first in lines 2 (LEFT) and 4 (DOWN)")


def test_large_file(tmp_path):
    header, *rows = COMMITTED.read_text().splitlines()
    count = 300_000
    path = tmp_path / "large.csv"
    path.write_text("\n".join([header, *(rows * (count // len(rows) + 1))[:count]]) + "\n")
    table = read_expert_csv(path)
    assert table["count"].sum() == count
    assert table["state"].tolist() == read_expert_csv(COMMITTED)["state"].tolist()
    with path.open("a") as file:
        file.write(rows[0].replace(",LEFT,0.", ",LEFT,zero.") + "\n")
    with pytest.raises(InputError, match=r"line 300002, column q_value_left: 'zero"):
        read_expert_csv(path)


@pytest.mark.parametrize("is_slippery", ["true", "false"])
def test_one_row_for_each_state_of_many_random_maps(tmp_path, is_slippery):
    path = tmp_path / "lakes.csv"
    flags = ["--random_maps", "7", "--map_size", "5", "--seed", "3", "--rows", "states", "--is_slippery", is_slippery]
    main([*flags, "--output", str(path)])
    table = read_expert_csv(path, is_slippery=is_slippery == "true")
    lakes = [FrozenLake(grid, is_slippery == "true") for grid in random_grids(7, size=5, seed=3)]
    assert list(dict.fromkeys(table["environment"])) == lakes
    states = [(lake, state) for lake in lakes for state in acting_states(lake.grid)]
    assert list(zip(table["environment"], table["state"], strict=True)) == states
    assert (table["count"] == 1).all()
    for lake, rows in table.groupby("environment", sort=False):
        exact_SA = optimal_q(lake_mdp(lake.grid, is_slippery == "true"), 0.99)
        np.testing.assert_allclose(np.array(rows["q_values"].tolist()), exact_SA[rows["state"]], atol=1e-9)
    for row in pd.read_csv(path).to_dict("records"):  # each step is one of its state's
        grid, _ = parse_state_text(row["state_str"])
        lake = lake_mdp(grid, is_slippery == "true")
        assert row["next_state"] in lake.next_states_SAK[row["state"], row["action"]]
        assert row["done"] == lake.terminal_S[row["next_state"]]
        assert row["reward"] == ("".join(grid)[row["next_state"]] == "G")


# Other environments ----------------------------------------------------------------------------------------------


def csv_of(path: Path, env_id: str, *flags: str) -> list[dict[str, str]]:
    """The rows of a new CSV, as text."""
    main(["--env_id", env_id, *flags, "--output", str(path)])
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("environment", [CliffWalking(), Taxi()], ids=str)
def test_each_state_of_another_environment_once(environment, tmp_path, capsys):
    path = tmp_path / "expert.csv"
    rows = csv_of(path, environment.env_id, "--rows", "states")
    assert tuple(rows[0]) == all_columns(environment.actions)
    assert q_columns(environment.actions) == tuple(f"q_value_{name.lower()}" for name in environment.actions)
    exact_SA, mdp = optimal_q(environment.mdp, 0.99), environment.mdp
    for row in rows:  # each is a step of Gymnasium
        state, action, next_state = (int(row[name]) for name in ("state", "action", "next_state"))
        assert row["action_text"] == environment.actions[action]
        assert exact_SA[state, action] == pytest.approx(exact_SA[state].max())
        assert next_state == mdp.next_states_SAK[state, action, 0]
        assert float(row["reward"]) == mdp.rewards_SA[state, action]
        assert row["done"] == str(bool(mdp.terminal_S[next_state]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = read_expert_csv(path, type(environment))
    assert set(table["environment"]) == {environment}
    assert table["state"].tolist() == environment.acting_states
    assert (table["count"] == 1).all()
    np.testing.assert_allclose(np.array(table["q_values"].tolist()), exact_SA[table["state"]], atol=1e-9)
    acting = len(environment.acting_states)
    assert f"{acting} rows, {acting} of {acting} states, expert's exact return in" in capsys.readouterr().out


# Of the optimal paths: the cliff has one length, -13; Taxi's mean over its starts is 7.93
EPISODES = [
    # environment, exact return within the step limit, as the last line prints it
    (CliffWalking(), "return in 100 steps -13.0000 (best possible -13.0000)"),
    (Taxi(), "return in 200 steps 7.9300 (best possible 7.9300)"),
]


@pytest.mark.parametrize(("environment", "printed"), EPISODES, ids=["cliff", "taxi"])
def test_episodes_of_another_environment(environment, printed, tmp_path, capsys):
    path = tmp_path / "expert.csv"
    rows = csv_of(path, environment.env_id, "--batches", "2", "--episodes_per_batch", "3")
    assert printed in capsys.readouterr().out
    assert sum(row["done"] == "True" for row in rows) == 6, "each episode arrives"
    assert [row["batch_idx"] for row in rows if row["done"] == "True"] == ["0"] * 3 + ["1"] * 3
    for row, following in pairwise(rows):
        if row["done"] == "False":
            assert following["state"] == row["next_state"]
        else:
            assert environment.mdp.start_S[int(following["state"])] > 0
    table = read_expert_csv(path, type(environment))
    assert table["count"].sum() == len(rows)
    exact_SA = optimal_q(environment.mdp, 0.99)
    np.testing.assert_allclose(np.array(table["q_values"].tolist()), exact_SA[table["state"]], atol=1e-9)
    returns = np.add.reduceat([float(row["reward"]) for row in rows], [0, *_after_ends(rows)])
    if environment == CliffWalking():
        assert returns.tolist() == [-13.0] * 6
    else:
        assert returns.min() >= 20 - 30  # two ways across the room with a pickup and a dropoff
        assert returns.max() <= 20 - 4


def _after_ends(rows: list[dict[str, str]]) -> list[int]:
    return [number for number, row in enumerate(rows[:-1], start=1) if row["done"] == "True"]


def test_learned_q_values_of_the_cliff_approach_the_exact_ones():
    """Its rewards are the actions' own, and no reward for the goal. The first guess, 0, is forgotten slowly."""
    cliff = CliffWalking()
    states, exact_SA = cliff.acting_states, optimal_q(cliff.mdp, 0.9)
    short, long = (learn_q(cliff, 0.9, runs=2, learner_steps=steps, seed=0) for steps in (20_000, 80_000))
    errors = [abs(q_RSA - exact_SA)[:, states].mean() for q_RSA in (short, long)]
    assert errors[1] < 0.1 < errors[0]
    assert policy_return(cliff.mdp, greedy_policy(long.mean(axis=0)), horizon_steps=100) == -13


WRONG_KIND = [
    # what is read as what: words of the error
    ("FrozenLake-v1", CliffWalking, ["AFFF|FHFH|FFFH|HFFG", "is no state of CliffWalking-v1"]),
    ("FrozenLake-v1", Taxi, ["q_value_south", "missing"]),
    ("Taxi-v4", FrozenLake, ["q_value_left", "missing"]),
]


@pytest.mark.parametrize(("env_id", "kind", "words"), WRONG_KIND)
def test_a_csv_of_another_environment(env_id, kind, words, tmp_path):
    path = tmp_path / "expert.csv"
    csv_of(path, env_id, "--rows", "states")
    with pytest.raises(InputError) as error:
        read_expert_csv(path, kind)
    assert str(error.value).startswith(f"{path}: line ")
    for word in words:
        assert word in str(error.value)


def test_unknown_environment(tmp_path):
    with pytest.raises(
        InputError, match=r"^--env_id 'Taxi-v9': expected one of FrozenLake-v1, CliffWalking-v1, Taxi-v"
    ):
        main(["--env_id", "Taxi-v9", "--output", str(tmp_path / "a.csv")])
    assert not list(tmp_path.iterdir())
