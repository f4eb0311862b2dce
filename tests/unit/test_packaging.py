"""What an installed wheel must hold: every module, and every file that is data to the product."""

from __future__ import annotations

import json
import re
import runpy
import sys
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.gpu.bundle import PACKAGES, PYTHON
from tests.support.locked_packages import LOCK, ORACLE, locked_packages
from trtserve._version import __version__

# pytest brings tomli where Python has no reader.
tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

UNLOCKED = ("torch", "triton")  # .ci/unlocked.txt
ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trtserve"


def test_every_file_of_the_package_is_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["trtserve"]
    data = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    modules = {path for path in PACKAGE.rglob("*.py") if _is_package(path.parent)}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert sorted(str(path.relative_to(ROOT)) for path in files - data - modules) == []


def test_no_other_file_has_an_address_of_the_project() -> None:
    """The addresses are placeholders: who gives the project a home changes pyproject.toml and nothing else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    hosts = {url.split("/")[2] for url in project["urls"].values()}
    folders = ("trtserve", "docs", "examples", ".github", ".ci")
    files = [ROOT / "README.md", *(path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())]
    texts = {path: path.read_bytes() for path in files if "__pycache__" not in path.parts}
    assert [path for path, text in texts.items() if any(host.encode() in text for host in hosts)] == []


def test_the_readme_of_a_package_index_has_no_relative_links() -> None:
    published = runpy.run_path(str(ROOT / ".ci" / "published.py"))
    readme = published["with_addresses"]((ROOT / "README.md").read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert any(link.endswith(f"/raw/v{__version__}/docs/assets/demo.svg") for link in links)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_the_notice_names_every_package_and_its_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for_people = [name for name in extras if name not in ("oracle", "bench", "llama-cpp", "docs", "dev", "all")]
    texts = [*project["dependencies"], *(text for name in for_people for text in extras[name])]
    noted = dict(re.findall(r"^  ([\w-]+) +(\S.+)$", (ROOT / "NOTICE").read_text(encoding="utf-8"), re.MULTILINE))
    assert {Requirement(text).name for text in texts} - noted.keys() == set()


def test_no_version_of_jinja2_is_taken_that_templates_of_strangers_can_leave() -> None:
    # CVE-2025-27516: the sandbox of 3.1.5 and before let a template call str.format through `attr`.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = (Requirement(text) for text in project["dependencies"] if Requirement(text).name == "jinja2")
    assert not wanted.specifier.contains("3.1.5")
    assert wanted.specifier.contains("3.1.6")


def test_every_package_of_the_gpu_bundle_is_locked() -> None:
    """`make gpu-bundle` downloads locked versions, in a fresh clone too."""
    assert {canonicalize_name(name) for name in PACKAGES} - locked_packages(LOCK, ORACLE, python=PYTHON).keys() == set()


def test_the_pictures_show_the_page_and_the_report_of_today() -> None:
    # Take them again (`make recording`) when the page or the report looks different.
    taken = json.loads((ROOT / "docs" / "assets" / "pictures.json").read_text(encoding="utf-8"))
    assert taken == runpy.run_path(str(ROOT / "examples" / "record_pages.py"))["digests"]()


def test_the_changelog_has_a_heading_for_this_version() -> None:
    changelog = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ \((\d{4}-\d\d-\d\d|unreleased)\)", heading) for heading in headings)
    assert headings[0].partition(" ")[0] == __version__


def test_every_pattern_of_package_data_finds_something() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for pattern in project["tool"]["setuptools"]["package-data"]["trtserve"]:
        assert list(PACKAGE.glob(pattern)), pattern


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
@pytest.mark.parametrize(
    ("files", "extras"), [((LOCK,), ("cpu", "dev")), ((LOCK, ORACLE), ("cpu", "dev", "oracle", "docs"))]
)
def test_the_lock_files_satisfy_every_requirement(
    python: str, files: tuple[Path, ...], extras: tuple[str, ...]
) -> None:
    """Fails when a requirement of pyproject.toml was added or changed without `make lock`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *(text for extra in extras for text in project["optional-dependencies"][extra])]
    locked = locked_packages(*files, python=python)
    unmet = [
        text
        for text, each in ((text, Requirement(text)) for text in texts)
        if each.name not in UNLOCKED
        if (version := locked.get(canonicalize_name(each.name))) is None or not each.specifier.contains(version)
    ]
    assert unmet == [], "run `make lock`"


def _is_package(folder: Path) -> bool:
    """True when `folder` and all above it, up to the package, have an `__init__.py`."""
    above = [folder, *folder.parents]
    return all((level / "__init__.py").exists() for level in above[: above.index(PACKAGE) + 1])


def test_make_demo_says_what_takes_long_and_what_it_does_not_install() -> None:
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    demo = rules.partition("\ndemo:")[2].partition("\n\n")[0]
    ready = rules.partition("\n$(READY):")[2].partition("\n\n")[0]
    assert 0 < ready.find("Installing trtserve") < ready.find("$(INSTALL)")
    (report,) = re.findall(
        r'^report = \["(.+)"\]$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    locked = (ROOT / ".ci" / "lock.txt").read_text(encoding="utf-8")
    assert f"pip install '{report}'" in demo or f"{report.partition('>')[0]}==" in locked
