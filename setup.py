"""Builds of the package take the documentation along, which `trtserve help` searches and prints."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithDocumentation(build_py):  # type: ignore[misc]  # setuptools is no dependency of the checks
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the repository has it
            return
        for page in Path("docs").rglob("*.md"):
            copied = Path(self.build_lib, "trtserve", page)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(page.read_bytes())


setup(cmdclass={"build_py": WithDocumentation})
