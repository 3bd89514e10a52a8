"""The one rule of the house that import-linter cannot see, because the root's modules are no packages."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {"train_script", "evaluate_policy", "search_policy", "report"}
ROOMS = ("llm_policy", "tasks", "benchmarks", "results", "data")
FILES = [*ROOT.glob("*.py"), *(file for room in ROOMS for file in (ROOT / room).rglob("*.py"))]


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
    assert set(core["source_modules"]) == rooms - {"llm_policy.environments", "llm_policy.policy_search"}
