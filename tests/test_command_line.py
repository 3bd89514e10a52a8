"""The command line of every script, on small dataclasses; TRL's own once."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from llm_policy.command_line import ROOT, parse_arguments, read_option
from llm_policy.errors import InputError, run_script

DESCRIPTION = """What this script does, in a sentence that is too long for one line of a terminal with eighty columns.

    python small.py --seed 3                              # an example, which is never wrapped, whatever its length is
"""


@dataclass
class Small:
    seed: int = field(default=0, metadata={"help": "Of all draws."})
    rate: float = field(default=1e-3, metadata={"help": "A share: 100 % is 1."})
    is_slippery: bool = field(default=True, metadata={"help": "Slippery ice?"})
    long_option_name: str = field(default="word", metadata={"help": "A help text of " + "many words " * 12 + "."})
    table: str = field(default=str(ROOT / "table.csv"), metadata={"help": "A file of this repository."})
    map: str | None = field(default=None, metadata={"help": "Without a default."})
    csv: str = field(default="", metadata={"help": "Must be given, says its reader."})
    maps: list[str] = field(default_factory=lambda: ["4x4", "8x8"], metadata={"help": "Several values."})
    counts: list[int] | None = field(default=None, metadata={"help": "Several numbers."})

    def __post_init__(self) -> None:
        if self.seed == 13:
            raise ValueError("seed\nunlucky")


@dataclass
class Required:
    policies: list[str] = field(metadata={"help": "What to judge."})


@dataclass(frozen=True)
class Frozen:
    output: str = field(default="out", metadata={"help": "Where it goes."})


@dataclass
class Foreign:
    """Stands for TRL's: no help texts are asked of it."""

    batch_size: int = 8
    target: list[str] | None = None  # takes text as well, as TRL's lora_target_modules does
    output_file: str | None = None
    kwargs: dict[str, int] | str | None = None


Foreign.__module__ = "trl.trainer"


def parse(*argv: str, groups: tuple = (Small, Foreign), **options):
    return parse_arguments(argv, groups, description=DESCRIPTION, **options)


@pytest.fixture
def config(tmp_path):
    def write(text: str, name: str = "config.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


# Values -----------------------------------------------------------------------------------------------------------


def test_flags_win_over_the_file_and_the_file_over_defaults(config):
    file = config("seed: 5\nrate: 1e-2\nis_slippery: false\ncounts: [1, 2]\ntarget: all-linear\n")
    (small, foreign), path = parse("--config", file, "--seed", "6", "--batch-size", "2")
    assert (small.seed, small.rate, small.is_slippery, small.counts) == (6, 0.01, False, [1, 2])
    assert (small.long_option_name, foreign.batch_size, foreign.target) == ("word", 2, "all-linear")
    assert path == file


def test_a_number_of_the_file_is_text_where_text_is_expected(config):
    (small, _), _ = parse("--config", config("map: 1.0\ntable: 3\n"))
    assert (small.map, small.table) == ("1.0", "3")


def test_the_home_is_written_out_wherever_a_file_is_named(config, monkeypatch):
    """A shell does not in --output_dir=~/x, nor in a YAML file; TRL did in some options."""
    file = config("output_file: ~/file\n")
    monkeypatch.setenv("HOME", str(Path(file).parent))
    (small, foreign), path = parse("--config", f"~/{Path(file).name}", "--map", "~", "--long_option_name", "~")
    assert (small.map, foreign.output_file) == (str(Path(file).parent), f"{Path(file).parent}/file")
    assert (small.long_option_name, path) == ("~", file)
    with pytest.raises(InputError, match=r"^--map ~nosuchuser/x: no such user's home; write the path out"):
        parse("--map", "~nosuchuser/x")
    (frozen,), _ = parse_arguments(["--output", "~/x"], [Frozen], description=DESCRIPTION)
    assert frozen.output == f"{Path(file).parent}/x"


def test_without_a_file():
    (small, foreign), path = parse("--is_slippery", "false", "--counts", "3", "4")
    assert (small.is_slippery, small.counts, path) == (False, [3, 4], "")
    assert (small.seed, foreign) == (0, Foreign())


def test_process_arguments_are_the_default(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["small.py", "--seed", "4"])
    (small,), _ = parse_arguments(None, [Small], description=DESCRIPTION)
    assert small.seed == 4


def test_the_last_configuration_counts(config):
    first, last = config("seed: 1\nrate: 0.5\n", "first.yaml"), config("seed: 2\n", "last.yaml")
    (small, _), path = parse("--config", first, f"--config={last}")
    assert (small.seed, small.rate, path) == (2, 1e-3, last)


def test_default_configuration_only_where_none_is_named(config):
    default, named = Path(config("seed: 1\nrate: 0.5\n", "default.yaml")), config("seed: 2\n", "named.yaml")
    (small, _), path = parse("--seed", "3", default_config=default)
    assert (small.seed, small.rate, path) == (3, 0.5, str(default))
    (small, _), path = parse("--config", named, default_config=default)
    assert (small.seed, small.rate, path) == (2, 1e-3, named)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "from default file"),
        (["--config", "{file}"], "from file"),
        (["--config", "{file}", "--task", "a"], "a"),
        (["--task=a", "--seed", "3", "--task", "b"], "b"),  # the last one counts
        (["--config", "{empty}"], "fallback"),
        (["--config", "{null}"], "fallback"),
        (["--config", "{broken}"], "fallback"),  # parse_arguments says what is wrong
        (["--config", "nowhere.yaml"], "fallback"),
        (["--task"], "fallback"),
    ],
)
def test_one_option_ahead_of_the_others(argv, expected, config):
    files = {"file": config("task: from file\n"), "empty": config("", "empty.yaml")}
    files["broken"] = config("task: [a\n", "broken.yaml")
    files["null"] = config("task: null\n", "null.yaml")
    default_config = Path(config("task: from default file\n", "default.yaml"))
    argv = [argument.format(**files) for argument in argv]
    assert read_option(argv, "task", "fallback", default_config) == expected


def test_trl_arguments_are_read_as_by_trl_itself(config):
    from trl import GRPOConfig, ModelConfig, TrlParser

    groups = (Required, GRPOConfig, ModelConfig)
    given = {"output_dir": "out", "use_cpu": True, "bf16": False, "max_steps": 3, "learning_rate": "1e-4",
             "lora_target_modules": "all-linear", "generation_kwargs": {"top_k": 5}, "report_to": "none"}  # fmt: skip
    file = config(yaml.safe_dump(given))
    flags = ["--policies", "random", "--max_steps", "4", "--reward-weights", "0.5", "1"]
    flags += ["--lr_scheduler_kwargs", '{"num_cycles": 2}']
    parsed, _ = parse("--config", file, *flags, groups=groups)
    stock = TrlParser(groups).parse_args_and_config(["--config", file, *flags])
    assert len(parsed) == 3
    assert [str(group) for group in parsed] == [str(group) for group in stock]
    assert (parsed[1].max_steps, parsed[1].learning_rate) == (4, 1e-4)
    with pytest.raises(InputError, match=r"unknown arguments: --max_step 4 \(did you mean --max_steps\?\)"):
        parse("--policies", "random", "--max_step", "4", groups=groups)
    with pytest.raises(InputError, match=r"max_steps: \[4\]: expected a whole number"):
        parse("--config", config("max_steps: [4]\n"), groups=groups)


def test_what_must_be_named_is_named_once():
    """The first values were dropped."""
    with pytest.raises(InputError, match=r"^--policies: is given twice; give it once, with all values behind it$"):
        parse("--policies", "a", "--policies=b", groups=(Required,))


# Bad input --------------------------------------------------------------------------------------------------------

BAD_FLAGS = [
    (["--sed", "5"], r"unknown arguments: --sed 5 \(did you mean --seed\?\); see --help"),
    (["--see", "5"], r"unknown arguments: --see 5 \(did you mean --seed\?\); see --help"),  # abbreviated
    (["--long_option", "5"], r"unknown arguments: --long_option 5 \(did you mean --long_option_name\?\)"),
    (["--batch", "5"], r"unknown arguments: --batch 5"),
    (["--conf", "x.yaml"], r"unknown arguments: --conf x.yaml"),
    (["--nonsense"], r"unknown arguments: --nonsense; see --help"),
    (["stray"], r"unknown arguments: stray; see --help"),
    (["--seed", "many"], r"--seed 'many': expected a whole number; see --help"),
    (["--rate", "many"], r"--rate 'many': expected a number; see --help"),
    (["--is_slippery", "maybe"], r"--is_slippery 'maybe': expected true or false; see --help"),
    (["--seed"], r"--seed: expected one argument; see --help"),
    (["--config", "x" * 300], "--config xxxxxxxxxxxxxxxxxxxx...: a name of 300 bytes, at most 240 are one"),
    (["--seed", "13"], r"seed unlucky; see --help"),
    (["--config"], r"--config: expected the path of a YAML file after it"),
    (["--map", ""], r"--map '': names nothing; leave the option out for its default"),
    (["--config="], r"--config: expected the path of a YAML file after it"),
    (["--config", "nowhere.yaml"], r"--config nowhere.yaml: no such file; configs/ holds"),
    (["--config", "tests"], r"--config tests: cannot be read: .*directory"),
]


@pytest.mark.parametrize(("argv", "message"), BAD_FLAGS, ids=[" ".join(argv) for argv, _ in BAD_FLAGS])
def test_bad_flags_are_one_line(argv, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(InputError, match=f"^{message}") as caught:
        parse(*argv)
    assert "\n" not in str(caught.value)


BAD_CONFIGS = {
    "- a\n": r"--config \S+config.yaml must contain a YAML mapping",
    "": r"--config \S+config.yaml must contain a YAML mapping",
    "just text": r"--config \S+config.yaml must contain a YAML mapping",
    "a: [1\nb: }": r"--config \S+config.yaml: cannot be read: ",
    "sed: 5\n": r"\S+config.yaml: unknown options: sed \(did you mean seed\?\)",
    "1: 5\n": r"--config \S+config.yaml must contain a YAML mapping",
    "nonsense: 5\nother: [1]\n": r"\S+config.yaml: unknown options: nonsense, other; see --help",
    "seed: many\n": r"\S+config.yaml: --seed 'many': expected a whole number",
    "is_slippery: perhaps\n": r"\S+config.yaml: --is_slippery 'perhaps': expected true or false",
    "seed: 1.5\n": r"\S+config.yaml: seed: 1.5: expected a whole number",
    "seed: [1, 2]\n": r"\S+config.yaml: seed: \[1, 2\]: expected a whole number",
    "seed:\n": r"\S+config.yaml: seed: None: expected a whole number",
    "seed: true\n": r"\S+config.yaml: seed: True: expected a whole number",
    "rate: {a: 1}\n": r"\S+config.yaml: rate: {'a': 1}: expected a number",
    "is_slippery: 3\n": r"\S+config.yaml: is_slippery: 3: expected true or false",
    "table: no\n": r"\S+config.yaml: table: False: expected text in quotes",
    "map: [a]\n": r"\S+config.yaml: map: \['a'\]: expected text",
    "maps: 4x4\n": r"\S+config.yaml: maps: '4x4': expected a list",
    "counts: [one]\n": r"\S+config.yaml: counts: \['one'\]: expected a list",
    "counts: [1, 1e3]\n": r"\S+config.yaml: counts: \[1, '1e3'\]: expected a list of numbers such as 1.0e-4, with",
    "target: true\n": r"\S+config.yaml: target: True: expected a list",
    "target: [1]\n": r"\S+config.yaml: target: \[1\]: expected a list",
    "output_file: true\n": r"\S+config.yaml: output_file: True: expected text in quotes",
    "output_file: 2020-01-01\n": r"\S+config.yaml: output_file: datetime.date\(2020, 1, 1\): expected text in quotes",
    "kwargs: [1]\n": r"\S+config.yaml: kwargs: \[1\]: expected a mapping or text in quotes",
    "batch_size: [1]\n": r"\S+config.yaml: batch_size: \[1\]: expected a whole number",
    "seed: 13\n": r"\S+config.yaml and the command line: seed unlucky",
}


@pytest.mark.parametrize(("text", "message"), BAD_CONFIGS.items(), ids=map(repr, BAD_CONFIGS))
def test_bad_files_are_one_line(text, message, config):
    with pytest.raises(InputError, match=f"^{message}") as caught:
        parse("--config", config(text))
    assert "\n" not in str(caught.value)


def test_what_the_command_line_says_is_no_fault_of_the_file(config):
    with pytest.raises(InputError, match=r"^--seed 'many': expected a whole number"):
        parse("--config", config("seed: few\n"), "--seed", "many")


def test_a_required_option(capsys, monkeypatch):
    with pytest.raises(InputError, match="the following arguments are required: --policies"):
        parse(groups=(Required,))
    monkeypatch.setattr(sys, "argv", ["small.py"])
    with pytest.raises(SystemExit) as leaving:
        run_script(lambda: parse(groups=(Required,)))
    assert leaving.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_option_without_help_is_a_defect():
    @dataclass
    class Silent:
        seed: int = 0

    with pytest.raises(AssertionError, match="seed: an option without a help text"):
        parse(groups=(Silent,))


# Help -------------------------------------------------------------------------------------------------------------


def printed_help(capsys, *argv: str, **options) -> str:
    with pytest.raises(SystemExit) as leaving:
        parse(*argv, **options)
    assert leaving.value.code in (0, None)
    return capsys.readouterr().out


def test_help_is_the_scripts_own(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = printed_help(capsys, "--seed", "3", "--help", default_config=ROOT / "configs/laptop.yaml")
    assert text == (
        """\
What this script does, in a sentence that is too long for one line of a terminal
with eighty columns.

    python small.py --seed 3                              # an example, which is never wrapped, whatever its length is

options and their defaults (without --config, configs/laptop.yaml is read):
  --config FILE            YAML file with options; flags win over it.
  --seed 0                 Of all draws.
  --rate 0.001             A share: 100 % is 1.
  --is_slippery true       Slippery ice?
  --long_option_name word  A help text of many words many words many words many
                           words many words many words many words many words
                           many words many words many words many words .
  --table table.csv        A file of this repository.
  --map                    Without a default.
  --csv ""                 Must be given, says its reader.
  --maps 4x4 8x8           Several values.
  --counts                 Several numbers.
  --help_all               List all options: those of TRL's Foreign, too.

exit codes: 0 done, 2 the input cannot be used (one line says why), 75 interrupted
"""
    )


def test_help_shows_what_the_configuration_gives(config, capsys):
    text = printed_help(capsys, "--help", default_config=Path(config("rate: 0.5\nmaps: [8x8]\n")))
    assert "--rate 0.5 " in text
    assert "--maps 8x8 " in text
    assert "--seed 0 " in text


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_options_are_as_wide_as_the_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = printed_help(capsys, "-h").partition("defaults:\n")[2].partition("\n\nexit codes")[0]
    lines = text.splitlines()
    assert max(map(len, lines)) <= min(columns, 120)
    assert [line.split()[0] for line in lines if line.startswith("  --")] == [
        "--config", "--seed", "--rate", "--is_slippery", "--long_option_name", "--table", "--map", "--csv", "--maps",
        "--counts", "--help_all",
    ]  # fmt: skip


def test_help_asks_for_no_required_option_and_names_it(capsys):
    text = printed_help(capsys, "--help", groups=(Required,))
    assert "--policies (required)" in text
    assert "--help_all" not in text  # no other groups


def test_own_groups_can_be_named(capsys):
    text = printed_help(capsys, "--help", groups=(Small, Required), own=[Required])
    assert "  --seed" not in text
    assert "List all options: those of Small, too." in " ".join(text.split())


@pytest.mark.parametrize("flag", ["--help_all", "--help-all"])
def test_help_all_lists_every_group(flag, capsys):
    text = printed_help(capsys, flag, groups=(Small, Required, Foreign))
    for words in ("usage: ", "--seed", "A share: 100 % is 1. (default: 0.001)", "--policies", "--batch_size", "75"):
        assert words in text
    assert len(text.splitlines()[0]) < 100  # the usage does not list every option


@pytest.mark.parametrize("argv", [["--env-id", "Taxi-v4"], ["--env-id=Taxi-v4"], ["--env_id", "a", "--env-id=Taxi-v4"]])
def test_one_option_ahead_of_the_others_is_heard_with_dashes_too(argv):
    """As argparse hears it afterwards."""
    assert read_option(argv, "env_id", "FrozenLake-v1") == "Taxi-v4"


def test_what_few_change_is_left_to_help_all(capsys):
    @dataclass
    class WithRare(Small):
        rare: ClassVar[tuple[str, ...]] = ("rate",)

    text = printed_help(capsys, "--help", groups=(WithRare,))
    assert "--rate" not in text
    assert "List all options: those that few change, too." in " ".join(text.split())
    assert "--rate" in printed_help(capsys, "--help_all", groups=(WithRare,))
