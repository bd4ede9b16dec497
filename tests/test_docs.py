"""README and docs against the program: commands, flags, names, links, defaults, and every file."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

import ghostlayers
from ghostlayers.cli import VERBS, build_parser
from ghostlayers.config import PruneConfig
from ghostlayers.finetune_config import FinetuneConfig
from ghostlayers.operators import operator_names
from ghostlayers.selectors import select_names

ROOT = Path(__file__).parents[1]
EVERY = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
# The others tell of earlier commits, or are written by a program.
OTHERS = ("CHANGELOG.md", "log.md", "architectures.md", "results.md")
PAGES = [path for path in EVERY if path.name not in OTHERS]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
# Of other programs.
FOREIGN_FLAGS = {
    *("--trust-remote-code", "--no-deps", "--dtype", "--max-model-len", "--enforce-eager"),
    *("--model", "--model_args", "--tasks", "--write", "--help", "--nproc-per-node"),
}
ids = [path.stem for path in PAGES]


def fenced(text: str, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(text) if kind == language]


def command_lines(text: str) -> list[list[str]]:
    """Arguments of every `ghostlayers ...` in a fence or inline, behind the program's name."""
    found = []
    for block in fenced(text, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            found += [part.strip() for part in re.split(r"&&|;", line.split(" #")[0])]
    found += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCE.sub("", text))]
    lines = [shlex.split(line) for line in found if line.startswith("ghostlayers ")]
    return [line[1:] for line in lines]


def config_of(arguments: list[str]) -> None:
    """Parse a command line and check its values, as the verb does before it reads anything."""
    args = build_parser().parse_args(arguments)
    config = {"prune": PruneConfig, "finetune": FinetuneConfig}.get(args.verb)
    given = vars(args)
    budgetless = getattr(args, "like", None) is not None
    if config is not None and not budgetless:
        config(**{item.name: given[item.name] for item in fields(config) if item.name in given})


def headings(path: Path) -> set[str]:
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in found)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_every_command_line_is_one_that_the_program_takes(path):
    for arguments in command_lines(path.read_text(encoding="utf-8")):
        if len(arguments) == 1:  # only the verb is named
            assert arguments[0] in VERBS
            continue
        try:
            config_of(arguments)
        except (SystemExit, ghostlayers.GhostlayersError) as error:
            pytest.fail(f"{path.name}: ghostlayers {shlex.join(arguments)}: {error}")


def test_command_lines_are_found_and_wrong_ones_fail():
    block = "ghostlayers eval a \\\n    b  # c\nls && ghostlayers info y\n"
    text = f"`ghostlayers info\nx`\n```bash\n{block}```\n"
    assert command_lines(text) == [["eval", "a", "b"], ["info", "y"], ["info", "x"]]
    for wrong in ("info", "prune m -o out --num-removed 7", "eval m --speeds"):
        with pytest.raises(SystemExit):
            config_of(wrong.split())
    for wrong in ("prune m -o out", "prune m -o out --num-remove 7 --recover ghosts"):
        with pytest.raises(ghostlayers.GhostlayersError):
            config_of(wrong.split())


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_every_flag_that_is_named_exists(path):
    verbs = build_parser()._subparsers._group_actions[0].choices
    known = {flag for verb in VERBS for flag in verbs[verb]._option_string_actions}
    text = path.read_text(encoding="utf-8")
    named = {
        flag
        for code in re.findall(r"`([^`]+)`", FENCE.sub("", text))
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)
        if not code.startswith(("python ", "make ", "pip "))
    }
    assert named - known - FOREIGN_FLAGS == set()


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_links_lead_to_files_and_headings(path):
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        place = (path.parent / name).resolve() if name else path
        assert place.exists(), f"{path.name}: {target}"
        if anchor:
            assert anchor in headings(place), f"{path.name}: {target}"


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_names_of_the_python_api_exist(path):
    for block in fenced(path.read_text(encoding="utf-8"), "python"):
        compile(block, path.name, "exec")
        for name in re.findall(r"\b(?:gl|ghostlayers)\.([A-Za-z]\w*)", block):
            assert hasattr(ghostlayers, name), f"{path.name}: {name}"


@pytest.mark.parametrize(
    ("column", "names", "setting"),
    [("--select", select_names(), "select"), ("--recover", operator_names(), "recover")],
)
def test_readme_lists_every_method_and_marks_the_default(column, names, setting):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split(f"| `{column}` |", 1)[1].split("\n\n", 1)[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    listed = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert sorted(set(listed) - {"module:function"}) == sorted(names)
    default = getattr(PruneConfig(num_remove=1), setting)
    assert [cell.strip() for cell in cells if "(default)" in cell] == [f"`{default}` (default)"]


def test_every_page_config_and_benchmark_is_mentioned():
    text = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    files = [p for f in ("docs/*.md", "configs/*", "benchmarks/*.py") for p in ROOT.glob(f)]
    assert len(files) > 15
    assert [path.name for path in files if path.name not in text] == []
