"""Security bulletins for Triton: which container has which faults, and where they are named."""

from __future__ import annotations

import re

from trtserve.nvidia.releases.containers import all_containers, latest_container
from trtserve.nvidia.releases.converters import EMBEDDED_TAG, advisories_of, known_faults
from trtserve.server.doctor.stub import check_faults


def test_the_embedded_triton_has_the_faults_of_august_2025() -> None:
    faults = known_faults(EMBEDDED_TAG)
    assert faults is not None
    assert "CVE-2025-23310" in faults
    assert faults.endswith("Fixed in 26.07.")
    assert "CVE-2025-23310" in check_faults().evidence
    assert check_faults().state == "warning"
    assert "leave --raw-http out" in check_faults().fix


def test_a_container_has_the_faults_that_were_fixed_later() -> None:
    found = {tag: [each.bulletin for each in advisories_of(tag)] for tag in ("25.09", "26.02", "26.06")}
    later = ["5828", "5848", "5853", "5865", "5875"]
    assert found == {"25.09": ["5734", "5790", "5816", *later], "26.02": later, "26.06": ["5875"]}
    assert known_faults(latest_container().tag) is None


def test_the_table_is_sound() -> None:
    tags = {container.tag for container in all_containers()}
    rows = advisories_of("00.00")
    assert [row.fixed for row in rows] == sorted(row.fixed for row in rows)
    cves = [cve for row in rows for cve in row.cves]
    assert len(cves) == len(set(cves))
    for row in rows:
        assert row.bulletin.isdecimal()
        assert row.fixed in tags
        assert row.cves
        assert all(re.fullmatch(r"CVE-20\d\d-\d{4,}", cve) for cve in row.cves)
