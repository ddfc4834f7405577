"""The documentation says what is: links, names, options, files, schema; its snippets run."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import autopar
from autopar import cli
from autopar.cli.parser import make_parser
from autopar.ir.plan import from_json

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
SCHEMA = DOCS / "reference" / "plan.schema.json"


def _page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", _without_code(page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", PAGES, ids=_page_name)
def test_every_relative_link_resolves(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", _without_code(page.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            assert anchor in _anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=_page_name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"`((?:\.?\w[\w.-]*/)+[\w.-]*)`", _without_code(page.read_text()))
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    ours = [name for name in named if name.split("/")[0] in folders - {".venv"}]
    assert [name for name in ours if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=_page_name)
def test_lines_are_at_most_100_characters(page: Path) -> None:
    assert [line for line in page.read_text().splitlines() if len(line) > 100] == []


def test_the_index_links_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    linked = {(DOCS / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", index)}
    assert set(PAGES) - linked - {DOCS / "README.md"} == set()


def test_every_public_name_is_in_the_api_reference() -> None:
    text = (DOCS / "reference" / "api.md").read_text()
    assert [name for name in autopar.__all__ if f"`{name}`" not in text] == []


def test_every_extra_that_is_spoken_of_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sources = [path for folder in ("autopar", "passes", "solver", "runtime") for path in
               (ROOT / folder).rglob("*.py")]  # fmt: skip
    texts = [path.read_text() for path in (*PAGES, *sources)]
    extras = {extra for text in texts for extra in re.findall(r"install '[\w.]+\[(\w+)\]'", text)}
    assert extras <= set(project["optional-dependencies"])


def _messages() -> Iterator[str]:
    """Every text in the sources, with … for the values in it."""
    for folder in ("autopar", "passes", "solver", "runtime"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                    yield "".join(map(str, parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
    yield (ROOT / "Makefile").read_text()


def test_every_error_message_that_is_explained_can_occur() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    items = re.findall(r"^- ((?:`[^`]*`(?:, )?)+)", re.sub(r"\n +", " ", text), re.M)
    explained = [message for item in items for message in re.findall(r"`([^`]*)`", item)]
    assert len(explained) > 50
    sources = tuple(_messages())
    patterns = {message: re.escape(message).replace("…", ".*") for message in explained}
    unknown = [
        message
        for message, pattern in patterns.items()
        if not any(re.search(pattern, source) for source in sources)
    ]
    assert unknown == []


def _options(parser: argparse.ArgumentParser) -> set[str]:
    return {
        option
        for action in parser._actions
        for option in action.option_strings
        if option not in ("-h", "--help")
    }


def _commands() -> dict[str, argparse.ArgumentParser]:
    parser = make_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(commands.choices)


def test_the_command_line_reference_has_every_command_and_no_other() -> None:
    text = (DOCS / "reference" / "cli.md").read_text()
    assert set(re.findall(r"^## autopar (\w+)", text, re.M)) == set(_commands())


@pytest.mark.parametrize(
    "command", ["plan", "sweep", "ops", "explain", "diff", "run", "calibrate", "schema"]
)
def test_the_command_line_reference_has_every_option_and_no_other(command: str) -> None:
    text = (DOCS / "reference" / "cli.md").read_text()
    section = re.split(r"^## ", text.partition(f"## autopar {command}")[2], flags=re.M)[0]
    documented = set(re.findall(r"`(--?[a-z][\w-]*)", section))
    assert documented == _options(_commands()[command])


def _shell_commands() -> Iterator[tuple[str, str]]:
    """Every ``autopar`` command line in an indented block of a page."""
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^ {4,}(?:torchrun .*-m )?(autopar \w.*)$", text, re.M):
            yield _page_name(page), line


@pytest.mark.parametrize(("page", "line"), tuple(_shell_commands()))
def test_the_command_lines_of_the_pages_are_parsed(page: str, line: str) -> None:
    arguments = line.partition(" #")[0].split()[1:]
    assert make_parser().parse_args(arguments).command in _commands()


def test_the_schema_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    assert SCHEMA.read_text() == capsys.readouterr().out


@pytest.fixture(scope="module")
def readme_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Output of the snippets of the README, and the plan that the first of them writes.

    To be quick, the small model stands in for the true-size one, and one GPU for its cluster.
    """
    folder = tmp_path_factory.mktemp("readme")
    snippets = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.S | re.M)
    assert len(snippets) == 2
    planned = (
        snippets[0].replace("/llama-3-8b", "/llama-tiny").replace("nodes=8", "gpus_per_node=1")
    )
    planned = planned.replace("seq_len=8192", "seq_len=64").replace("=512", "=4")
    code = "\n".join((planned, snippets[1])).replace('"examples/', f'"{ROOT}/examples/')
    environment = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "llama-3-8b.json").read_text())


@pytest.mark.slow
def test_the_snippets_of_the_readme_run(readme_run: tuple[str, dict[str, Any]]) -> None:
    """Slow: a process of its own imports torch and transformers, plans twice and trains."""
    lines = [line for line in readme_run[0].splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 1", "step 2"]


@pytest.mark.slow
def test_a_plan_is_valid_under_the_schema(readme_run: tuple[str, dict[str, Any]]) -> None:
    """Slow: it waits for the snippets of the README."""
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(readme_run[1], schema)


def _without_certificate(plan: dict[str, Any]) -> None:
    del plan["certificate"]


def _with_an_unknown_key(plan: dict[str, Any]) -> None:
    plan["colour"] = "red"


def _with_an_unknown_field(plan: dict[str, Any]) -> None:
    plan["mesh"]["rows"] = 1


def _with_another_version(plan: dict[str, Any]) -> None:
    plan["version"] = 2


def _with_text_for_a_number(plan: dict[str, Any]) -> None:
    plan["schedule"]["zero_stage"] = "1"


def _with_an_unknown_schedule(plan: dict[str, Any]) -> None:
    plan["schedule"]["name"] = "gpipe"


MUTATIONS = (
    _without_certificate,
    _with_an_unknown_key,
    _with_an_unknown_field,
    _with_another_version,
    _with_text_for_a_number,
    _with_an_unknown_schedule,
)


@pytest.mark.slow
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__.strip("_"))
def test_the_schema_refuses_a_changed_plan(
    readme_run: tuple[str, dict[str, Any]], mutate: Callable[[dict[str, Any]], None]
) -> None:
    """Slow: it waits for the snippets of the README."""
    plan = json.loads(json.dumps(readme_run[1]))
    mutate(plan)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(plan, json.loads(SCHEMA.read_text()))
    with pytest.raises(autopar.AutoparError):
        from_json(json.dumps(plan))
