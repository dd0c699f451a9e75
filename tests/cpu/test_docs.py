"""The pages say what is there: links, rules that comments cite, a page per policy, and command lines that work.

The Python examples of the pages run by themselves (pytest's --doctest-glob).
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from memtrain.command_line import compose_jobs
from memtrain.config import settings
from memtrain.plan import POLICIES, policy_name
from memtrain.schema import ALTERNATIVES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted((ROOT / "docs").glob("*.md"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^python -m memtrain (.+)$", README, flags=re.MULTILINE)


def composes(arguments: str) -> None:
    multirun = "-m" in shlex.split(arguments)
    for cfg in compose_jobs([word for word in shlex.split(arguments) if word != "-m"], multirun=multirun):
        settings(cfg)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).is_file()] == []


def test_the_rules_that_comments_cite_are_in_the_design() -> None:
    written = {int(number) for number in re.findall(r"^(\d+)\. \*\*", DESIGN, flags=re.MULTILINE)}
    cited: set[int] = set()
    for folder in ("memtrain", "configs", "tests"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in (".py", ".yaml"):
                for numbers in re.findall(r"\(rules? (\d+(?: and \d+)*)\)", path.read_text(encoding="utf-8")):
                    cited |= {int(number) for number in numbers.split(" and ")}
    assert cited
    assert cited <= written
    assert sorted(written) == list(range(1, len(written) + 1))


@pytest.mark.parametrize("field", ["micro_batch_size", *POLICIES])
def test_every_field_of_the_plan_has_a_page_that_names_its_policies(field: str) -> None:
    link = re.search(rf"\[`{field}`\]\((docs/\w+\.md)\)", README)
    assert link, f"the README's table does not link {field}"
    page = (ROOT / link[1]).read_text(encoding="utf-8")
    assert f"plan.{field}" in page
    for policy in POLICIES.get(field, ()):
        assert f"`{policy_name(policy)}`" in page


@pytest.mark.parametrize("field", ["precision", "method", "quantization", "optimizer"])
def test_every_union_of_the_job_has_a_page_that_names_its_options(field: str) -> None:
    link = re.search(rf"\[`{field}`\]\((docs/\w+\.md)\)", README)
    assert link, f"the README's table does not link {field}"
    page = (ROOT / link[1]).read_text(encoding="utf-8")
    assert f"{field}=" in page
    for option in ALTERNATIVES[field].classes:
        assert f"`{option}`" in page or f"{field}={option}" in page
        assert f"`{option}`" in README


def test_the_readme_shows_command_lines() -> None:
    assert len(COMMANDS) >= 3


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_command_line_of_the_readme_is_accepted(arguments: str) -> None:
    composes(arguments)


def test_the_recipe_of_the_readme_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = re.search(r"```yaml\n(.+?)```", README, flags=re.DOTALL)
    assert recipe
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(recipe[1], encoding="utf-8")
    composes("recipe=./mine.yaml budget=6GiB")


def test_what_a_page_says_to_ask_for_is_accepted() -> None:
    asked = [line for page in PAGES for line in re.findall(r"`(plan\.\w+=[^`]+)`", page.read_text(encoding="utf-8"))]
    assert len(asked) >= len(POLICIES)
    for arguments in asked:
        composes(arguments)
