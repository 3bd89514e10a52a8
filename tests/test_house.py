"""The rules of the house that import-linter cannot see: the root's modules are no packages; one command line."""

import ast
import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from llm_policy.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {"train_script", "train_policy_gradient", "train_hindsight", "evaluate_policy", "search_policy", "report"}
ROOMS = ("llm_policy", "tasks", "benchmarks", "results", "data")
FILES = [*ROOT.glob("*.py"), *(file for room in ROOMS for file in (ROOT / room).rglob("*.py"))]
# The packages of requirements-*.txt as Python imports them
EXTRAS = ("bitsandbytes", "fastapi", "lm_eval", "mujoco", "openai", "pydantic_monty", "pyriddle", "sb3_contrib",
          "stable_baselines3", "starlette", "uvicorn")  # fmt: skip
CALLED = [path for path in FILES if 'if __name__ == "__main__":' in path.read_text()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_are_imported_by_nobody(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
        elif isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
    assert not imported & SCRIPTS


def test_all_scripts_are_there():
    assert {path.stem for path in ROOT.glob("*.py")} == SCRIPTS | {"prompts", "rewards"}


def test_every_module_of_the_core_stands_in_its_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (core,) = [contract for contract in contracts if contract["name"] == "The core knows no environment"]
    rooms = {f"llm_policy.{path.stem}" for path in (ROOT / "llm_policy").glob("*") if path.stem.strip("_")}
    rooms -= {"llm_policy.__init__", "llm_policy.__pycache__"}
    on_environments = {"environments", "policy_search", "policy_gradient", "report"}
    assert set(core["source_modules"]) == rooms - {f"llm_policy.{room}" for room in on_environments}


@pytest.mark.parametrize("script", CALLED, ids=lambda path: path.name)
def test_help_fits_on_one_screen_without_the_extras(script, tmp_path):
    missing = "".join(f"sys.modules[{package!r}] = None\n" for package in EXTRAS)
    (tmp_path / "sitecustomize.py").write_text(f"import sys\n{missing}")
    module = ".".join(script.relative_to(ROOT).with_suffix("").parts)
    call = [sys.executable, *(["-m", module] if script.is_relative_to(ROOT / "llm_policy") else [script]), "--help"]
    environment = os.environ | {"COLUMNS": "100", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(call, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    assert len(done.stdout.splitlines()) <= 50
    assert "--config FILE" in done.stdout or module == "llm_policy.launch"  # torchrun's options, and the script's


@pytest.mark.parametrize("script", ["evaluate_policy", "search_policy", "train_policy_gradient", "train_hindsight"])
def test_scripts_of_one_process_refuse_a_launcher(script, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.chdir(tmp_path)
    argv = ["--policies", "random"] if script == "evaluate_policy" else []
    with pytest.raises(InputError, match=r"^2 processes: this script runs in one; start it without torchrun"):
        importlib.import_module(script).main(argv)
    assert not list(tmp_path.iterdir())
