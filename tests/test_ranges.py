"""Every numeric option of every script has a range, its default is inside, and what is outside ends in one line."""

import math
from dataclasses import MISSING, dataclass, fields

import pytest
import yaml
from trl import GRPOConfig, ModelConfig

import evaluate_policy
import search_policy
import train_hindsight
from llm_policy.command_line import parse_arguments
from llm_policy.environments.expert_q import ExpertOptions
from llm_policy.errors import InputError
from llm_policy.grpo.arguments import ScriptArguments
from llm_policy.policy_gradient.arguments import PolicyGradientArguments
from llm_policy.policy_search.proposers import ProposerSettings
from llm_policy.policy_search.search import SearchSettings
from llm_policy.ranges import ANY_NUMBER, RANGES, Range, check_mappings, check_number, check_ranges, ranges_of
from tasks import TASKS, task_module

GROUPS = [
    ScriptArguments, GRPOConfig, ModelConfig, evaluate_policy.EvaluationArguments, search_policy.ScriptArguments,
    ProposerSettings, SearchSettings, ExpertOptions, PolicyGradientArguments, train_hindsight.HindsightArguments,
    *(module.Arguments for module in map(task_module, TASKS) if hasattr(module, "make_task")),
]  # fmt: skip
OPTIONS = [(group, name) for group in GROUPS for name in ranges_of(group)]
INTERVALS = {
    # interval -> what is inside, what is outside
    "[0, 1]": ([0, 0.5, 1], [-1e-9, 1 + 1e-9]),
    "(0, 1]": ([1e-9, 1], [0, 1.5]),
    "[0, 1)": ([0, 0.999], [1, -1]),
    "[-1, 100]": ([-1, 0, 100], [-2, 101]),
}


@pytest.mark.parametrize("interval", INTERVALS)
def test_intervals(interval):
    inside, outside = INTERVALS[interval]
    assert all(number in Range.parse(interval) for number in inside)
    assert not any(number in Range.parse(interval) for number in outside)


def test_intervals_in_words():
    words = {"(0, 1]": "above 0, at most 1", "[0, 1)": "of at least 0, below 1", "[1, 9]": "of at least 1, at most 9"}
    assert {interval: str(Range.parse(interval)) for interval in words} == words


@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_a_default_is_in_its_range(group, name):
    (field,) = [field for field in fields(group) if field.name == name]
    default = field.default if field.default_factory is MISSING else field.default_factory()
    check_ranges({name: default}, [group])


@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_what_is_no_number_or_out_of_range_is_refused(group, name):
    kind, allowed = ranges_of(group)[name]
    outside = [math.nan, math.inf, -math.inf, allowed.low - 1, allowed.high * 2 + 1]
    outside += [] if allowed.has_low else [allowed.low]
    outside += [] if allowed.has_high else [allowed.high]
    outside += [allowed.low + 0.5] if kind is int else []
    for number in outside:
        for value in (number, [number]):
            with pytest.raises(InputError, match=f"^--{name} .*: expected an? (integer|number) ") as caught:
                check_ranges({name: value}, [group])
            assert "\n" not in str(caught.value)


def test_no_range_is_left_over():
    """Beside those of the benchmarks and of results/run.py."""
    used = {name for _, name in OPTIONS} | {f"{group.__name__}.{name}" for group, name in OPTIONS}
    others = {"prompts", "group", "completion_tokens", "accumulation", "rounds", "lakes", "size", "seeds"}
    others |= {"processes", "batch"}
    assert set(RANGES) - used == others


def test_each_numeric_option_of_ours_has_a_range():
    assert [name for group, name in OPTIONS if ranges_of(group)[name][1] is ANY_NUMBER] == []


@dataclass
class Small:
    learning_rate: float = 0.1
    iterations: int | None = None
    seeds: list[int] | None = None
    name: str = "nan"


@pytest.mark.parametrize("way", ["flag", "file"])
@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("learning_rate", "nan", "--learning_rate nan: expected a number above 0, at most 10"),
        ("learning_rate", "-.inf", "--learning_rate -inf: expected a number above 0, at most 10"),
        ("learning_rate", "1e30", "--learning_rate 1e+30: expected a number above 0, at most 10"),
        ("iterations", "0", "--iterations 0: expected an integer of at least 1, at most 100000"),
        ("seeds", "-1", "--seeds -1: expected an integer of at least 0, at most 4294967295"),
    ],
)
def test_flags_and_files_alike(way, option, value, line, tmp_path):
    Small.__dataclass_fields__[option].metadata = {"help": "."}
    argv = [f"--{option}={value.replace('.inf', 'inf')}"]
    where = ""
    if way == "file":
        text = {"nan": ".nan"}.get(value, value)
        (tmp_path / "small.yaml").write_text(f"{option}: {f'[{text}]' if option == 'seeds' else text}\n")
        assert isinstance(yaml.safe_load((tmp_path / "small.yaml").read_text()), dict)
        argv = ["--config", str(tmp_path / "small.yaml")]
        where = f"{tmp_path / 'small.yaml'}: "
    with pytest.raises(InputError) as caught:
        parse_arguments(argv, [Small], description="small", own=[])
    assert str(caught.value) == where + line


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"generation_kwargs": {"top_k": -5}}, "--generation_kwargs top_k -5: expected a number of at least 0"),
        ({"generation_kwargs": {"other": math.nan}}, "--generation_kwargs other nan: expected a number"),
    ],
)
def test_numbers_inside_other_values(values, line):
    with pytest.raises(InputError) as caught:
        check_mappings(values)
    assert str(caught.value).startswith(line)


def test_a_number_as_text():
    with pytest.raises(InputError, match=r"^--pad_to_multiple_of 0: expected an integer of at least 1"):
        check_ranges({"pad_to_multiple_of": "0"}, [GRPOConfig])


def test_text_that_is_no_number_is_another_checks_business():
    check_ranges({"pad_to_multiple_of": "auto"}, [GRPOConfig])
    check_mappings({"generation_kwargs": {"cache": "static", "use": True}, "seed": 3})


def test_a_number_that_no_float_holds_is_one_line():
    with pytest.raises(InputError, match=r"^--seed 100000000000\.\.\.: expected an integer of at least 0, at most 10$"):
        check_number("--seed", 10**400, int, Range.parse("[0, 10]"))
