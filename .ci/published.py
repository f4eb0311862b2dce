"""Make the tree that is published from the last commit: published.py FOLDER.

It differs in two things from the checkout. The links of its README have addresses, which a package index needs, and its
MANIFEST.in makes the source distribution enough to run the tests and to build the documentation.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MANIFEST = """include NOTICE Makefile
graft .ci
graft .github
graft docs
graft examples
graft tests
global-exclude __pycache__ *.py[cod]
"""


def with_addresses(readme: str) -> str:
    """Return the README with absolute links to the files of this version."""
    (source,) = re.findall(r'^Source = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    (version,) = re.findall(r'"(.+)"', (ROOT / "trtserve/_version.py").read_text(encoding="utf-8").splitlines()[-1])
    for link, kind in (("!", "raw"), ("", "blob")):
        readme = re.sub(rf"(?<!!)({link}\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{source}/{kind}/v{version}/", readme)
    return readme


def main(folder: Path) -> None:
    """Fill `folder`, which does not exist yet."""
    folder.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    readme = folder / "README.md"
    readme.write_text(with_addresses(readme.read_text(encoding="utf-8")), encoding="utf-8")
    (folder / "MANIFEST.in").write_text(MANIFEST, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
