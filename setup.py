"""What pyproject.toml cannot say: on a package index the README's links need an address. Everything else is there."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
(source,) = re.findall(r'^Source = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
(version,) = re.findall(r'"(.+)"', (ROOT / "trtserve" / "_version.py").read_text(encoding="utf-8").splitlines()[-1])
readme = (ROOT / "README.md").read_text(encoding="utf-8")
for link, kind in (("!", "raw"), ("", "blob")):
    readme = re.sub(rf"(?<!!)({link}\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{source}/{kind}/v{version}/", readme)
setup(long_description=readme, long_description_content_type="text/markdown")
