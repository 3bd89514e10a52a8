"""Write what results/ holds into the tables of README.md and docs/, and into the curves of docs/pictures/.

    python report.py            # writes every section between its two marker lines, and the pictures
    python report.py --check    # changes nothing; exit code 1 where a section is out of date

A section stands between `<!-- NAME: written by report.py -->` and `<!-- end of NAME -->`, in any of these files.
Only results/ and the dates of commits are read, and nothing is trained. llm_policy/report/ has a file per subject: what
it reads, its tables, its curves.
"""

from llm_policy.startup import announce

announce(__name__, "NumPy and matplotlib")

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llm_policy.command_line import EXIT_CODES, parse_arguments
from llm_policy.errors import InputError, run_script
from llm_policy.reading import read_text
from llm_policy.report import files
from llm_policy.report.ablations import ablations_section
from llm_policy.report.drawing import drawing_section, drawings, write_drawing_curves
from llm_policy.report.lakes import of_studies, results_section, training_results, write_learning_curves
from llm_policy.report.maps import maps_section, of_maps, probe_section, thoughts_section, write_map_curves
from llm_policy.report.other_games import other_games, other_games_section
from llm_policy.report.policy_gradient import policy_gradient_section, policy_gradients, write_episode_curves
from llm_policy.report.questions import arc_section, question_results, questions_section
from llm_policy.report.search import policy_searches, search_section
from llm_policy.report.speed import speed_section
from llm_policy.report.studies import ABLATIONS, ARC, CANONICAL, MAPS, ORIGINAL, SPEED, STUDIES, SUPERVISION
from llm_policy.report.summary import summary_section
from llm_policy.report.supervision import flaws_section, supervision_section, write_supervision_curves

BEGIN, END = "<!-- {name}: written by report.py -->", "<!-- end of {name} -->"
SECTIONS = (
    "summary", "results", "ablations", "supervision", "supervision_flaws", "supervision_maps", "maps", "observations",
    "thoughts", "probe", "other_games", "search", "policy_gradient", "questions", "arc", "drawing", "speed",
)  # fmt: skip


def all_sections(results: Mapping[str, list[dict]]) -> dict[str, str]:
    """Section -> its table. Sections without results are left out."""
    searches = policy_searches()
    maps = of_maps(results)
    taught = {name: seeds for name, seeds in of_studies(results, SUPERVISION).items() if "_maps_" in name}
    on_one_lake = of_studies(results, CANONICAL, ORIGINAL)
    played, games = policy_gradients(), other_games()
    sections = {
        "summary": summary_section(results, searches, played, games) if on_one_lake else None,
        "results": results_section(on_one_lake) if on_one_lake else None,
        "ablations": ablations_section(results) if of_studies(results, ABLATIONS) else None,
        "supervision": supervision_section(results) if "cloning_slippery" in results else None,
        "supervision_flaws": flaws_section(results) if "natural_wrong_tenth" in results else None,
        "supervision_maps": maps_section(taught) if taught else None,
        "maps": maps_section(maps["maps"]) if maps["maps"] else None,
        "observations": maps_section(maps["observations"]) if maps["observations"] else None,
        "thoughts": thoughts_section(maps["thoughts"]) if maps["thoughts"] else None,
        "other_games": other_games_section(games) if games else None,
        "search": search_section(searches, results) if searches else None,
    }
    if played:
        sections["policy_gradient"] = policy_gradient_section(played, results, searches)
    if questions := question_results():
        sections["questions"] = questions_section(questions)
    if (files.RESULTS / ARC / "evaluation.json").exists():
        sections["arc"] = arc_section(files.RESULTS / ARC)
    if drawn := drawings():
        sections["drawing"] = drawing_section(drawn)
    probe = files.RESULTS / MAPS / "observation_probe" / "observation_probe.json"
    if probe.exists():
        sections["probe"] = probe_section(probe)
    if (files.RESULTS / SPEED / "step_time").exists():
        sections["speed"] = speed_section()
    return {name: section for name, section in sections.items() if section is not None}


def documents() -> dict[Path, str]:
    """README.md and docs/*.md, with their texts."""
    texts = {}
    for file in (files.ROOT / "README.md", *sorted((files.ROOT / "docs").glob("*.md"))):
        if not file.exists():
            continue
        try:
            texts[file] = read_text(file)
        except (OSError, ValueError) as error:
            raise InputError(f"{files.shown(file)}: cannot be read as UTF-8 text ({error})") from error
    return texts


def marked(text: str) -> list[str]:
    """The sections that have a place in a text."""
    return re.findall("^" + BEGIN.format(name=r"(\w+)") + "$", text, re.MULTILINE)


def with_section(text: str, name: str, section: str, file: Path) -> str:
    """`text` with `section` between the markers of `name`, and its links as they go from the folder of `file`."""
    begin, end = (marker.format(name=name) for marker in (BEGIN, END))
    if not re.search(f"(?s){re.escape(begin)}.*?{re.escape(end)}", text):
        raise InputError(f"{files.shown(file)}: no line {end!r} behind {begin!r}; put it where the section ends")
    to_root = os.path.relpath(files.ROOT, file.parent)
    linked = section if to_root == "." else section.replace("](results/", f"]({to_root}/results/")
    return re.sub(f"(?s){re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{linked}\n{end}", text)


def with_sections(texts: Mapping[Path, str], sections: Mapping[str, str]) -> dict[Path, str]:
    """The texts with every section written wherever it has a place.

    `InputError` for a section without a place, and for a place whose section is unknown.
    """
    written = dict(texts)
    for file, text in texts.items():
        for name in marked(text):
            if name not in SECTIONS:
                raise InputError(f"{files.shown(file)}: section {name!r}: expected one of {', '.join(SECTIONS)}")
            if name in sections:
                written[file] = with_section(written[file], name, sections[name], file)
    homeless = [name for name in sections if not any(name in marked(text) for text in texts.values())]
    if homeless:
        begin, end = (marker.format(name=homeless[0]) for marker in (BEGIN, END))
        raise InputError(
            f"section {homeless[0]!r}: has no place; put the lines {begin!r} and {end!r} into README.md or docs/*.md"
        )
    return written


@dataclass
class ReportArguments:
    """What to do with the documents."""

    check: bool = field(default=False, metadata={"help": "Change nothing; exit code 1 where a section is out of date."})


def main(argv: Sequence[str] | None = None) -> int:
    (arguments,), _ = parse_arguments(
        argv,
        (ReportArguments,),
        description=__doc__,
        exit_codes={0: "done", 1: "out of date (--check)", 2: EXIT_CODES[2]},
    )
    results = training_results()
    if not results:
        raise InputError("results/: holds no finished seeds yet; results/run.py makes them")
    for study in sorted(folder.name for folder in files.RESULTS.iterdir() if folder.is_dir() and folder.name[0] != "_"):
        if study not in STUDIES:
            print(f"results/{study}: no section shows this study", file=sys.stderr)
    texts = documents()
    written = with_sections(texts, all_sections(results))
    changed = [files.shown(file) for file in texts if written[file] != texts[file]]
    if arguments.check:
        print(f"out of date: {', '.join(changed)}; run python report.py" if changed else "up to date with results/")
        return int(bool(changed))
    for file, text in written.items():
        file.write_text(text, encoding="utf-8")
    print(f"written from {len(results)} results: {', '.join(changed) or 'no change'}; now the pictures", flush=True)
    write_learning_curves(results)
    write_supervision_curves(results)
    write_map_curves(results)
    write_episode_curves()
    write_drawing_curves()
    return 0


if __name__ == "__main__":
    run_script(main)
