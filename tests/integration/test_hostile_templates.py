"""Chat templates of an unknown author: the process that renders them is ended when one takes too much."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import psutil
import pytest

from trtserve.client.tokenizer import TEMPLATE_SECONDS, messages, render, template_process
from trtserve.errors import UsageError

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
DOUBLED = "{{% set x = namespace(t={}) %}}{{% for i in range(99) %}}{{% set x.t = x.t {} x.t %}}{{% endfor %}}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (f"{{% set x = namespace(n=0) %}}{LOOP}{{% set x.n = x.n + 1 %}}{'{% endfor %}' * 3}", "longer than"),
        ("{{ (range(100000) | list * 300) | sort | length }}", "longer than"),  # one call, of which Python sees no end
        (DOUBLED.format("[1]", ", ").replace("x.t ,  x.t", "[x.t, x.t]") + "{{ x.t }}", "longer than"),
        (DOUBLED.format("'ab'", "~"), "more than 1024 MiB"),
        (DOUBLED.format("'ab'", "+"), "more than 1024 MiB"),
        (DOUBLED.format("['a' * 999999]", ", ").replace("x.t ,  x.t", "x.t + [loop.index ~ 'a' * 30000000]"), "MiB"),
        ("{{ 'a' * 10000000000 }}", "more than 1024 MiB"),
        ("{{ 'a'.ljust(10000000000) }}", "more than 1024 MiB"),
        ("{% for i in range(40) %}{{ 'b' * 1000000 }}{% endfor %}", "more than 8388608 characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
    ],
)
def test_a_template_cannot_take_all_time_or_memory(template: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        render(template, messages("hi", None), {}, seconds=0.2 if words == "longer than" else TEMPLATE_SECONDS)
    assert render("{{ messages[0].content }}", messages("hi", None), {}) == "hi"


def test_a_prompt_is_rendered_again_when_its_process_was_stopped_and_killed() -> None:
    process = template_process()
    before = {each.pid for each in psutil.Process().children()}
    assert render("{{ messages[0].content }}", messages("hi", None), {}, process=process) == "hi"
    (child,) = (each for each in psutil.Process().children() if each.pid not in before)
    child.suspend()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(render, "{{ messages[0].content }}", messages("hi", None), {}, process=process)
        with pytest.raises(FutureTimeout):
            answer.result(timeout=0.5)
        child.kill()  # as the supervisor does
        assert answer.result(timeout=60) == "hi"
    process.close()
