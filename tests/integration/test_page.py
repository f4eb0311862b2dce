"""The page in a real browser, in front of a scripted server: what models write, what is kept, a server that is gone."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.responses import Response
from fastapi.routing import APIRoute

from tests.support.needs import find_program
from tests.support.waiting import wait_until
from trtserve.client.endpoint import unreachable
from trtserve.gateway.page import page_router

pytestmark = pytest.mark.needs("chromium")

HOSTILE = "<img src=x onerror=boom()> <script>boom()</script> [a](javascript:boom()) `<b>`"
WRITTEN = f"""## Title

**bold** and *soft* [link](https://example.org/a) {HOSTILE}

1. one
2. two
   - inner

```html
<script>boom()</script>
```

| name | value |
|---|--:|
| alpha | 1 |

> quoted
"""
AGAIN = "trtserve start m --detach --ui --http-port 9000"
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
STRUCTURE = {"h4": 1, "strong": 1, "em": 1, "a": 1, "ol > li": 2, "ol ul > li": 1, "pre": 1, "td": 2, "blockquote": 1}


class Scripted:
    """A server whose answers are written here."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        self.parts: list[dict[str, str]] = []
        self.gone = False
        self.key = ""
        self.error = ""
        self.refusal: dict[str, str] = {}
        self.model = "m"
        self.modalities = ["text"]
        self.defaults: dict[str, float] = {}
        self.reason = "stop"
        self.waits = False
        self.waiting: list[Any] = []
        (route,) = (each for each in page_router(AGAIN).routes if isinstance(each, APIRoute))
        self._page: Response = asyncio.run(route.endpoint())
        self.generated = 0

    def handle(self, route: Any) -> None:
        path = route.request.url.partition("//")[2].partition("/")[2]
        if self.gone:
            route.abort("connectionrefused")
        elif path == "":
            headers = {name: value for name, value in self._page.headers.items() if name != "content-length"}
            route.fulfill(body=bytes(self._page.body), headers=headers)
        elif self.key and route.request.headers.get("authorization") != f"Bearer {self.key}":
            route.fulfill(status=401, json={"error": {"message": "send the key"}})
        elif path == "v1/models":
            facts = {"input_modalities": self.modalities, "default_parameters": self.defaults}
            route.fulfill(json={"data": [{"id": self.model, "system_messages": True, **facts}]})
        elif path == "metrics":
            route.fulfill(body=f'nv_trtserve_tokens_total{{token_type="generated"}} {self.generated}\n')
        else:
            if self.waits:
                self.waiting.append(route)
                return
            self.asked.append(json.loads(route.request.post_data)["messages"])
            if self.refusal:
                route.fulfill(status=400, json={"error": self.refusal})
                return
            events: list[dict[str, Any]] = [{"choices": [{"delta": part}]} for part in self.parts]
            events += [{"error": {"message": self.error}}] if self.error else []
            events.append({"choices": [{"delta": {}, "finish_reason": self.reason}]})
            events.append({"choices": [], "usage": {"completion_tokens": 7}})
            body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
            route.fulfill(body=body, content_type="text/event-stream")


@pytest.fixture
def server() -> Scripted:
    return Scripted()


@pytest.fixture
def page(server: Scripted) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_program("chromium"), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": 380, "height": 720})
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.route("**/*", server.handle)
        page.goto("http://page.test/")
        wait_until(lambda: page.evaluate("document.querySelector('#model').value === 'm'"))
        yield page
        assert wrong == []
        browser.close()


def ask(page: Any, question: str) -> None:
    page.keyboard.type(question)
    page.keyboard.press("Enter")
    wait_until(lambda: page.evaluate("!document.querySelector('#send').hidden"))


def count(page: Any, selector: str) -> int:
    return int(page.locator(selector).count())


def test_what_a_model_writes_is_marked_up_and_cannot_run(page: Any, server: Scripted) -> None:
    server.parts = [
        {"reasoning_content": "I <b>think</b>"},
        *({"content": WRITTEN[at : at + 5]} for at in range(0, len(WRITTEN), 5)),
    ]
    ask(page, HOSTILE)
    assert {selector: count(page, f".assistant .words {selector}") for selector in STRUCTURE} == STRUCTURE
    assert page.locator(".assistant a").get_attribute("href") == "https://example.org/a"
    assert count(page, "#log script, #log img, #log b, #log [href^=javascript]") == 0
    assert HOSTILE.partition(" `")[0] in page.locator(".assistant .words p").first.text_content()
    assert page.locator(".user .words").text_content() == HOSTILE
    assert page.locator(".thoughts div").text_content() == "I <b>think</b>"
    assert not page.locator(".thoughts div").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 380


def test_conversations_are_kept_and_the_last_question_is_asked_again(page: Any, server: Scripted) -> None:
    server.parts = [{"content": "one"}]
    ask(page, "Hi")
    server.parts = [{"content": "two"}]
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("two").wait_for()
    wait_until(lambda: page.evaluate("!document.querySelector('#send').hidden"))
    page.reload()
    assert page.locator(".turn .words").all_text_contents() == ["Hi", "two"]
    page.get_by_role("button", name="New chat").click()
    assert count(page, ".turn") == 0
    assert not page.locator("#talks").is_visible()  # the panels are folded on a phone
    page.get_by_role("button", name="Menu").click()
    page.locator("#talks button").first.click()
    assert page.locator(".turn .words").all_text_contents() == ["Hi", "two"]
    ask(page, "And?")
    said = [("user", "Hi"), ("assistant", "two"), ("user", "And?")]
    assert [(each["role"], each["content"]) for each in server.asked[-1]] == said
    assert [[each["content"] for each in asked] for asked in server.asked[:2]] == [["Hi"], ["Hi"]]
    page.get_by_role("button", name="Menu").click()
    page.get_by_role("button", name="Remove").click()  # a dialog that is not answered says no
    assert count(page, "#talks li") == 1
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Remove").click()
    assert count(page, "#talks li") == count(page, ".turn") == 0


def test_a_conversation_has_a_short_title_that_a_double_click_changes(page: Any, server: Scripted) -> None:
    server.parts = [{"content": "Hello"}]
    ask(page, "What does the scheduler of an inference server do all day?")
    page.set_viewport_size({"width": 1100, "height": 640})
    kept = page.locator("#talks button").first
    assert kept.text_content() == "What does the scheduler of an inference…"
    page.once("dialog", lambda dialog: dialog.accept("Schedulers"))
    kept.dblclick()
    page.reload()
    assert page.locator("#talks button").first.text_content() == "Schedulers"
    assert page.locator(".user .words").text_content().startswith("What does the scheduler")


def test_the_page_says_what_the_demo_knows(page: Any, server: Scripted) -> None:
    assert "demo" not in page.locator(".welcome").text_content()
    server.model = "demo"
    page.reload()
    page.get_by_text("knows only a few hundred answers").wait_for()


def test_fingers_have_room_and_read_no_hints_about_keys(page: Any, server: Scripted) -> None:
    assert page.locator(".keys").is_visible()
    phone = page.context.browser.new_context(viewport={"width": 380, "height": 720}, has_touch=True, is_mobile=True)
    touched = phone.new_page()
    touched.route("**/*", server.handle)
    touched.goto("http://page.test/")
    wait_until(lambda: touched.evaluate("document.querySelector('#model').value === 'm'"))
    assert count(touched, ".keys") == 1
    assert not touched.locator(".keys").is_visible()
    server.parts = [{"content": "Hello"}]
    ask(touched, "Hi")
    touched.locator("#panels").click()
    for name in ("Hi", "Remove “Hi”"):
        assert touched.get_by_role("button", name=name, exact=True).bounding_box()["height"] >= 44


def test_without_a_server_the_page_says_so_and_goes_on_later(page: Any, server: Scripted) -> None:
    server.gone = True
    ask(page, "Hi")
    assert page.locator(".assistant .error").text_content() == "The server does not answer."
    wait_until(lambda: "does not answer" in page.locator("#state").text_content())
    assert page.locator("#gone code").text_content() == AGAIN
    assert page.get_by_role("button", name="Copy this command").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 380
    assert page.locator("#model").input_value() == "m"
    assert page.locator("#model").is_disabled()
    assert count(page, "#server.stale") == 1
    server.gone, server.parts = False, [{"content": "back"}]
    wait_until(lambda: page.evaluate("document.querySelector('#state').textContent === 'ready'"))
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("back").wait_for()
    assert count(page, ".turn") == 2
    assert not page.locator("#gone").is_visible()
    assert page.locator("#model").is_enabled()
    assert count(page, "#server.stale") == 0


def test_a_server_that_dies_in_an_answer_is_named_as_one_that_is_gone(page: Any, server: Scripted) -> None:
    server.parts = [{"content": "Machine learning is"}]
    server.error = unreachable("127.0.0.1:8001", "Stream removed (Socket closed)").message
    ask(page, "Hi")
    cut = page.locator(".assistant .error").text_content()
    assert page.locator(".assistant .words").text_content() == "Machine learning is"
    server.gone = True
    wait_until(lambda: page.locator("#state").text_content() == cut)
    assert page.locator("#gone").is_visible()


def test_the_end_of_a_conversation_stays_in_view_when_a_message_takes_room(page: Any, server: Scripted) -> None:
    server.parts = [{"content": "A long line.\n\n" * 30}]
    ask(page, "Hi")
    tall = page.locator("#log").bounding_box()["height"]
    page.evaluate("reached(false)")
    wait_until(lambda: page.locator("#log").bounding_box()["height"] < tall)
    inside = (
        "document.querySelector('.again').getBoundingClientRect().bottom <= $('log').getBoundingClientRect().bottom"
    )
    wait_until(lambda: page.evaluate(inside))


def test_a_key_is_asked_for_in_plain_words_and_its_field_stays_at_hand(page: Any, server: Scripted) -> None:
    assert page.locator("#access").is_hidden()  # a server without a key does not speak of one
    server.key, server.parts = "right", [{"content": "Hello"}]
    page.reload()
    page.get_by_role("button", name="Enter an API key").wait_for()
    assert page.locator(".welcome p").text_content() == "This server asks for an API key."
    ask(page, "Hi")
    assert page.locator(".assistant .error").text_content() == "This server asks for an API key."
    for key, said in (("wrong", "This server does not accept this API key."), ("right", "ready")):
        page.get_by_role("button", name="Enter an API key").click()
        assert page.evaluate("document.activeElement.id") == "key"
        page.locator("#key").fill(key)
        if key == "wrong":
            page.keyboard.press("Enter")
        else:
            page.get_by_role("button", name="Use key").click()
        wait_until(lambda said=said: page.locator("#state").text_content() == said)  # type: ignore[misc]
        if key == "wrong":
            wait_until(lambda said=said: page.locator(".assistant .error").text_content() == said)  # type: ignore[misc]
            page.keyboard.press("Escape")
            assert not page.locator("#side").is_visible()
    wait_until(lambda: not page.locator("#side").is_visible())
    page.get_by_text("Hello").wait_for()  # the question is asked again without a hand
    assert page.get_by_role("button", name="Enter an API key").count() == 0
    assert count(page, ".error:visible") == 0
    page.evaluate("unfold(true)")
    assert page.locator("#access").is_hidden()
    assert count(page, ".turn") == 2


def test_a_question_without_an_answer_stays_and_the_model_does_not_read_it(page: Any, server: Scripted) -> None:
    server.gone = True
    ask(page, "First")
    server.gone, server.parts = False, [{"content": "Hello"}]
    ask(page, "Second")
    assert server.asked == [[{"role": "user", "content": "Second"}]]
    for _ in range(2):
        assert page.locator(".turn .words").all_text_contents() == ["First", "", "Second", "Hello"]
        assert page.locator(".turn .error").all_text_contents() == ["The server does not answer."]
        assert count(page, ".again") == 1
        page.reload()
        wait_until(lambda: page.locator("#state").text_content() == "ready")
    page.get_by_role("button", name="Edit this question").first.click()
    assert page.locator("#question").input_value() == "First"
    assert page.locator(".turn .words").all_text_contents() == ["Second", "Hello"]
    ask(page, " again")
    assert [each["content"] for each in server.asked[-1]] == ["Second", "Hello", "First again"]


def test_the_last_question_can_be_edited_and_its_answer_goes(page: Any, server: Scripted) -> None:
    server.parts = [{"content": "Hello"}]
    ask(page, "First")
    ask(page, "Secnd")
    page.get_by_role("button", name="Edit this question").click()  # the last question's is the only one
    assert page.locator(".turn .words").all_text_contents() == ["First", "Hello"]
    assert page.locator("#question").input_value() == "Secnd"
    page.locator("#question").fill("")
    ask(page, "Second")
    assert [each["content"] for each in server.asked[-1]] == ["First", "Hello", "Second"]


def test_a_prompt_that_is_too_long_can_be_edited_but_not_asked_again(page: Any, server: Scripted) -> None:
    server.refusal = {"message": "Prompt length (9) exceeds maximum.", "code": "context_length_exceeded"}
    ask(page, "Too long")
    note = "Prompt length (9) exceeds maximum. Shorten the question, or start a new chat."
    assert page.locator(".assistant .error").text_content() == note
    assert page.get_by_role("button", name="Retry").count() == 0
    page.get_by_role("button", name="Edit this question").click()
    assert (count(page, ".turn"), count(page, "#talks li")) == (0, 0)
    server.refusal, server.parts = {}, [{"content": "Hello"}]
    ask(page, ", now short")
    assert server.asked[-1] == [{"role": "user", "content": "Too long, now short"}]


def test_settings_last_as_long_as_the_tab(page: Any) -> None:
    page.evaluate("unfold(true); $('settings').open = true")
    page.locator("#temperature").fill("0.3")
    page.locator("#system").fill("Be brief.")
    page.locator("#seed").focus()
    page.reload()
    assert page.locator("#temperature").input_value() == "0.3"
    assert page.locator("#system").input_value() == "Be brief."


def test_the_page_says_no_more_of_the_rate_than_it_has_seen(page: Any, server: Scripted) -> None:
    curve = page.locator("#curve")
    wait_until(lambda: curve.text_content().startswith("No tokens since this page was opened."))
    server.generated = 40
    wait_until(lambda: curve.text_content() == "Tokens/s since this page was opened")
    page.evaluate("opened -= 2 * MINUTE")
    wait_until(lambda: curve.text_content() == "Tokens/s in the last minute")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("temperature", "5", "Temperature takes a number from 0 to 2, not 5."),
        ("max_tokens", "0", "Max tokens takes a whole number of at least 1, not 0."),
        ("top_k", "1.5", "Top k takes a whole number of at least 0, not 1.5."),
    ],
)
def test_a_setting_out_of_its_range_is_not_sent(page: Any, server: Scripted, field: str, value: str, said: str) -> None:
    server.parts = [{"content": "Hello"}]
    page.evaluate(f"$('{field}').value = '{value}'")
    page.keyboard.type("Hi")
    page.keyboard.press("Enter")
    assert page.locator("#wrong").text_content() == said
    assert page.locator("#wrong").is_visible()
    assert page.evaluate("document.activeElement.id") == field
    assert (server.asked, page.locator("#question").input_value()) == ([], "Hi")
    page.locator(f"#{field}").fill("1")
    page.keyboard.press("Escape")
    page.locator("#question").focus()
    page.keyboard.press("Enter")
    page.get_by_text("Hello").wait_for()
    assert not page.locator("#wrong").is_visible()


@pytest.mark.parametrize(("reason", "said"), [("stop", "ended its answer at once"), ("length", "Ask for more")])
def test_an_answer_without_text_says_why(page: Any, server: Scripted, reason: str, said: str) -> None:
    server.reason = reason
    ask(page, "Hi")
    foot = page.locator(".assistant footer")
    assert said in foot.text_content()
    assert "tokens/s" not in foot.text_content()
    assert foot.get_by_role("button", name="Retry").is_visible()


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_answer_that_its_limit_on_tokens_cut_says_how_to_go_on(page: Any, server: Scripted, reason: str) -> None:
    server.reason, server.parts = reason, [{"content": "Once upon"}]
    ask(page, "A story")
    foot = page.locator(".assistant footer span").text_content()
    assert foot.startswith("7 tokens, ")
    assert ("Cut by the limit on tokens: ask “Go on.”" in foot) == (reason == "length")


def test_a_pause_is_told_of_while_it_lasts(page: Any, server: Scripted) -> None:
    page.clock.install()
    server.waits, server.parts = True, [{"content": "At last"}]
    page.keyboard.type("Hi")
    page.keyboard.press("Enter")
    wait_until(lambda: page.evaluate("true") and bool(server.waiting))
    foot = page.locator(".assistant footer")
    page.clock.fast_forward(3000)
    assert "No tokens" not in foot.text_content()
    page.clock.fast_forward(9000)
    said = re.fullmatch(r"No tokens for (\d+) s\. Esc or Stop ends the answer\.", foot.text_content())
    assert said is not None
    assert int(said[1]) >= 12
    server.waits = False
    server.handle(server.waiting.pop())
    page.get_by_text("At last").wait_for()
    wait_until(lambda: "7 tokens" in foot.text_content())
    page.clock.fast_forward(9000)
    assert "No tokens" not in foot.text_content()


def test_keys_send_break_lines_and_stop(page: Any, server: Scripted) -> None:
    server.waits = True
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert not server.waiting
    assert page.locator("#question").input_value() == "one\ntwo"
    page.keyboard.press("Enter")
    wait_until(lambda: page.evaluate("true") and bool(server.waiting))
    page.keyboard.press("Escape")
    page.locator(".assistant footer", has_text="stopped").wait_for()
    assert page.locator("#send").is_visible()
    assert page.evaluate("document.activeElement.id") == "question"


def test_a_long_question_scrolls_in_its_own_box(page: Any, server: Scripted) -> None:
    server.parts = [{"content": "Hello"}]
    page.locator("#question").fill("a line\n" * 200)
    ask(page, "end")
    height, whole = page.evaluate("(b => [b.clientHeight, b.scrollHeight])(document.querySelector('.user .words'))")
    assert height <= 0.4 * 720 < whole


def test_settings_show_what_the_model_does_by_default(page: Any, server: Scripted) -> None:
    server.defaults = {"temperature": 0.6, "top_k": 0, "max_tokens": 1024}
    page.evaluate("loadModels()")
    shown = {"temperature": "0.6", "top_k": "off", "max_tokens": "1024", "top_p": "default", "seed": "random"}
    wait_until(lambda: {id_: page.locator(f"#{id_}").get_attribute("placeholder") for id_ in shown} == shown)


def test_the_panel_beside_a_wide_chat_stays_closed(page: Any) -> None:
    page.set_viewport_size({"width": 1100, "height": 640})
    for visible in (True, False, True):
        page.reload()
        assert page.locator("#side").is_visible() == visible
        page.get_by_role("button", name="Hide panel" if visible else "Show panel").click()
        assert page.locator("#side").is_visible() != visible
        page.get_by_role("button", name="New chat").click()
        assert page.locator("#side").is_visible() != visible


def test_images_are_attached_where_the_model_reads_them(page: Any, server: Scripted) -> None:
    assert not page.is_visible("#attach")
    server.modalities, server.parts = ["text", "image"], [{"content": "A dot."}]
    page.evaluate("loadModels()")
    page.wait_for_selector("#attach")
    page.set_input_files("#files", {"name": "dot.png", "mimeType": "image/png", "buffer": base64.b64decode(DOT)})
    page.wait_for_selector("#pictures img")
    dropped = "new File([Uint8Array.from(atob(data), c => c.charCodeAt(0))], 'dot.png', { type: 'image/png' })"
    event = f"data => {{ const d = new DataTransfer(); d.items.add({dropped}); KIND }}"
    for kind in (
        "$('question').dispatchEvent(new ClipboardEvent('paste', { clipboardData: d }))",
        "$('composer').dispatchEvent(new DragEvent('drop', { dataTransfer: d, cancelable: true }))",
    ):
        before = count(page, "#pictures img")
        page.evaluate(event.replace("KIND", kind), DOT)
        wait_until(lambda before=before: count(page, "#pictures img") == before + 1)  # type: ignore[misc]
    page.click("#pictures button >> nth=0")
    wait_until(lambda: count(page, "#pictures img") == 2)
    ask(page, "What is it?")
    parts = server.asked[-1][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
    assert parts[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert (count(page, ".turn.user img"), count(page, "#pictures img")) == (2, 0)
    assert "base64" not in page.evaluate("localStorage.getItem(KEPT)")  # a few images would fill it
