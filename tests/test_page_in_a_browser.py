"""The page at `/` in Chromium: what a person sees of it, and what an answer cannot do to it."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE_S
from serving import running, use_template
from tiermoe.engine.request import Piece
from tiermoe.serve.app import create_app
from tiermoe.serve.worker import Answers

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

HOSTILE = """\
<script>window.ran = 1</script> <img src=x onerror="window.ran = 2"> <b onmouseover="window.ran = 3">bold</b>

<svg onload="window.ran = 4"><iframe srcdoc="<script>parent.ran = 5</script>"></iframe>

[a](javascript:window.ran=6) [b](data:text/html,x) [c](/stats) [d](https://example.com/d "e") ![f](https://example.com/f.png)

<a href="javascript:window.ran=7">g</a> <style>body { display: none }</style>

```html"onmouseover="window.ran=8
<script>window.ran = 9</script>
```
"""
DOCUMENT = """\
Title
=====

A paragraph
of *two* lines, with `code`.
- a list

- that is loose
  1. and nested

      indented

1. one

2. two

- a list

+ another

| a | b |
|---|:-:|
| 1 | 2 |

```python
def f():

    return "# no title"
```
> quoted
lazily

***
The end.
"""


class Dictated:
    """A worker whose answers the test dictates. asked: the requests; answers: of the last one."""

    def __init__(self, served: Any) -> None:
        self.loop, self.most_waiting = served.worker.loop, 8
        self.asked, self.left = list[Any](), 0
        self._answers: Any = None

    def stalled_s(self) -> float:
        return 0.0

    def submit(self, requests: Any) -> Answers:
        self._answers = answers = Answers(len(requests), self._gone)
        self.asked += requests  # after which the test may dictate
        return answers

    def _gone(self) -> None:
        self.left += 1

    def say(self, text: str, finish: str | None = None) -> None:
        self._answers.put(0, Piece(1, text, (1,), finish=finish))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=1000 * PATIENCE_S)
        expect.set_options(timeout=1000 * PATIENCE_S)
        yield found
        found.close()


@pytest.fixture
def worker(served: Any) -> Any:
    return Dictated(served)


@pytest.fixture
def address(served: Any, worker: Any) -> Iterator[str]:
    with running(create_app(replace(served, name="a <b>model</b>", worker=worker))) as address:
        yield address


def patient(browser: Any, **options: Any) -> Any:
    """A context whose pages are waited for."""
    context = browser.new_context(**options)
    context.set_default_timeout(1000 * PATIENCE_S)
    return context


@pytest.fixture
def tab(browser: Any, address: str) -> Iterator[Any]:
    """The page, which must report no error and ask nobody else."""
    context = patient(browser, accept_downloads=True)
    tab, wrong = context.new_page(), list[str]()
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("console", lambda message: message.type == "error" and wrong.append(message.text))
    tab.on("request", lambda request: request.url.startswith((address, "blob:")) or wrong.append(request.url))
    tab.goto(address)
    expect(tab.locator("#model")).to_have_text("a <b>model</b>")
    yield tab
    context.close()
    assert wrong == []


def ask(tab: Any, worker: Any, text: str) -> None:
    """Sends a message; returns when the server has it."""
    count = len(worker.asked)
    tab.fill("#message", text)
    tab.press("#message", "Enter")
    until(tab, lambda: len(worker.asked) > count)


def until(tab: Any, condition: Any) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit, "it hangs"
        tab.wait_for_timeout(10)


def whole(tab: Any, worker: Any, answer: str) -> Any:
    """Gives the answer, and returns its element."""
    worker.say(answer, "stop")
    expect(tab.locator("#send")).to_be_visible()
    return tab.locator("article.assistant").last


def body_of(tab: Any, act: Any) -> Any:
    """The JSON that the page sends with a message."""
    with tab.expect_request("**/v1/chat/completions") as sent:
        act()
    return json.loads(sent.value.post_data)


def test_an_answer_is_markdown_with_a_button_that_copies(tab: Any, worker: Any, address: str) -> None:
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=address)
    ask(tab, worker, "how")
    answer = whole(tab, worker, 'So:\n\n```python\nprint("<hi>")\n```\n1. **one**\n- [x] two\n')
    expect(answer.locator("pre code")).to_have_text('print("<hi>")\n')
    expect(answer.locator("ol strong")).to_have_text("one")
    expect(answer.locator("li input")).to_be_checked()
    answer.get_by_label("Copy code").click()
    expect(answer.get_by_label("Copy code")).to_have_text("Copied")
    assert tab.evaluate("navigator.clipboard.readText()") == 'print("<hi>")\n'


def test_an_answer_runs_nothing_and_loads_nothing(tab: Any, worker: Any) -> None:
    """While it comes and when it is there; nothing else is asked either (`tab`)."""
    ask(tab, worker, "attack")
    for start in range(0, len(HOSTILE), 40):
        worker.say(HOSTILE[start : start + 40])
    expect(tab.locator(".markdown pre")).to_contain_text("window.ran = 9")
    for answer in (tab.locator("article.assistant"), whole(tab, worker, "")):
        marked = answer.locator(".markdown")
        assert marked.locator("script, img, svg, iframe, style, b").count() == 0
        names = marked.evaluate("(box) => [...box.querySelectorAll('*')].flatMap((each) => each.getAttributeNames())")
        assert set(names) <= {"href", "title", "class", "target", "rel", "type", "aria-label", "tabindex"}
        links = marked.evaluate("(box) => [...box.querySelectorAll('a[href]')].map((each) => each.outerHTML)")
        assert len(links) == 2
        assert all(re.match(r'<a (title="e" )?href="https://example.com/', link) for link in links), links
        for each in marked.locator("a").all():
            each.hover()
    tab.locator(".markdown a").first.click()
    assert tab.evaluate("window.ran") is None


def test_what_marked_lets_through_is_cleaned_all_the_same(browser: Any, address: str) -> None:
    """By DOMPurify, beside which nobody makes HTML of text."""
    tab = patient(browser).new_page()
    tab.goto(address)
    script = """(html) => {
      const box = make("p", {}, DOMPurify.sanitize(html, MARKS));
      return box.innerHTML;
    }"""
    assert tab.evaluate(script, '<p onclick="x">a<img src=x onerror=y><script>z</script></p>') == "<p>a</p>"
    assert tab.evaluate(script, '<a href="javascript:x">b</a><form><input name=c></form>') == "<a>b</a><input>"
    refused = "() => { try { make('p').innerHTML = '<b>'; } catch (error) { return error.name; } }"
    assert tab.evaluate(refused) == "TypeError"
    tab.context.close()


@pytest.mark.parametrize("length", [1, 3, 7])
def test_a_growing_answer_is_at_each_moment_what_its_text_is_whole(tab: Any, length: int) -> None:
    """But for the colours of code, which come when a block is closed."""
    different = """async ([text, length]) => {
      const html = (box) => {
        for (const colour of box.querySelectorAll("code span")) colour.replaceWith(colour.textContent);
        box.normalize();
        return box.innerHTML;
      };
      for (let until = length; until < text.length + length; until += length) {
        const box = make("div");
        let shown;
        const more = growing(box, (render) => { render(); shown(); });
        for (let from = 0; from < until; from += 5 * length) {
          const next = new Promise((resolve) => shown = resolve);
          await Promise.race([more(text.slice(from, Math.min(until, from + 5 * length))), next]);
          await next;
        }
        const whole = make("div", {}, rendered(marked.lexer(text.slice(0, until))));
        if (html(box) !== html(whole)) return text.slice(0, until);
        until += 15 * length;
      }
      return null;
    }"""
    assert tab.evaluate(different, [DOCUMENT, length]) is None


def test_code_has_colours_once_its_block_is_closed(tab: Any, worker: Any) -> None:
    code = "  def f(a):\n    return '<script>window.ran = 1</script><img src=x onerror=window.ran=2>'  # a & b\n"
    ask(tab, worker, "write")
    worker.say(f"```py\n{code}")
    first = tab.locator("pre code").first
    expect(first).to_have_text(code)
    assert first.locator("span").count() == 0
    worker.say("```\nAnd")
    expect(first.locator(".hljs-keyword")).to_have_text(["def", "return"])
    answer = whole(
        tab,
        worker,
        f"\n```py\n{'#' * 20_000}\n```\n```strange\n{code}```\n```html\n<script>window.ran = 3</script>\n```",
    )
    assert answer.locator("pre code").first.text_content() == code
    expect(answer.locator(".hljs-name")).to_have_text(["script", "script"])
    spans = [each.locator("span").count() for each in answer.locator("pre code").all()]
    assert [count > 0 for count in spans] == [True, False, False, True]
    assert answer.locator("pre :not(code, span)").count() == 0
    assert tab.evaluate("window.ran") is None


def test_the_end_of_an_answer_stays_in_sight(tab: Any, worker: Any) -> None:
    """However much comes at once; not where the reader has left the end."""
    below = "(thread) => thread.scrollHeight - thread.scrollTop - thread.clientHeight"
    ask(tab, worker, "tell")
    for part in range(2):
        worker.say(f"part {part}\n\n" * 60)
        expect(tab.locator(".markdown p")).to_have_count(60 * (part + 1))
        assert tab.locator("#thread").evaluate(below) < 2
    tab.locator("#thread").evaluate("(thread) => thread.scrollTop = 0")
    whole(tab, worker, "end")
    assert tab.locator("#thread").evaluate("(thread) => thread.scrollTop") == 0


def test_whole_blocks_are_rendered_once(tab: Any, worker: Any) -> None:
    ask(tab, worker, "tell")
    worker.say("first\n\nsecond\n\n")
    expect(tab.locator(".markdown p")).to_have_count(2)
    tab.evaluate("document.querySelector('.markdown p').once = true")
    for number in range(20):
        worker.say(f"paragraph {number}\n\n")
        expect(tab.locator(".markdown p").last).to_have_text(f"paragraph {number}")
    assert tab.evaluate("document.querySelector('.markdown p').once")


def test_system_prompt_sampling_and_files_are_sent(tab: Any, worker: Any) -> None:
    tab.click("#adjust")
    for label, value in (("System prompt", "Be brief"), ("Temperature", "0.5"), ("Top-p", "0.9"), ("Most tokens", "7")):
        tab.get_by_label(label, exact=True).fill(value)
    files = [("a.txt", b"in ``` it"), ("b.bin", b"\0"), ("c.txt", b"\xff"), ("d.txt", b"x" * 800)]
    tab.set_input_files("#files", [{"name": name, "mimeType": "text/plain", "buffer": data} for name, data in files])
    notice = (
        "b.bin is no text in UTF-8. c.txt is no text in UTF-8. d.txt has 800 B, a conversation has room for 759 B more."
    )
    expect(tab.locator("#notice")).to_have_text(notice)
    expect(tab.locator("#attached li")).to_have_count(1)
    body = body_of(tab, lambda: ask(tab, worker, "what is it?"))
    assert [body[name] for name in ("temperature", "top_p", "max_completion_tokens")] == [0.5, 0.9, 7]
    assert body["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "a.txt:\n````\nin ``` it\n````\n\nwhat is it?"},
    ]
    whole(tab, worker, "text")
    expect(tab.locator("#attached li")).to_have_count(0)
    tab.reload()
    assert tab.input_value("[name=system]") == "Be brief"


def test_thoughts_are_folded_and_sent_back(tab: Any, worker: Any, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}<think></think>"
    use_template(monkeypatch, served, template)
    ask(tab, worker, "one")
    worker.say("<think>let me")
    expect(tab.locator("summary")).to_have_text("Thinking …")
    answer = whole(tab, worker, " see</think>two")
    expect(answer.locator("summary")).to_have_text("Thought")
    expect(answer.get_by_text("let me see")).to_be_hidden()
    answer.locator("summary").click()
    expect(answer.get_by_text("let me see")).to_be_visible()
    body = body_of(tab, lambda: ask(tab, worker, "three"))
    assert body["messages"][1] == {"role": "assistant", "content": "two", "reasoning_content": "let me see"}
    whole(tab, worker, "four")


def test_an_interrupted_answer_is_kept_and_continued(tab: Any, worker: Any) -> None:
    ask(tab, worker, "count")
    worker.say("one, two")
    expect(tab.locator(".markdown")).to_have_text("one, two")
    tab.reload()
    expect(tab.locator(".markdown")).to_have_text("one, two")
    expect(tab.locator("article.assistant")).to_contain_text("Interrupted")
    until(tab, lambda: worker.left == 1)  # the server computes no more for nobody
    body = body_of(tab, lambda: tab.get_by_role("button", name="Continue").click())
    assert body["messages"][-1] == {"role": "assistant", "content": "one, two"}
    until(tab, lambda: len(worker.asked) == 2)
    answer = whole(tab, worker, ", three")
    expect(answer.locator(".markdown")).to_have_text("one, two, three")
    expect(tab.get_by_role("button", name="Continue")).to_have_count(0)


def test_a_thought_that_was_cut_off_is_continued(
    tab: Any, worker: Any, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    thought = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    template = f"{{% for m in messages %}}{{{{ m.role }}}}{thought}{{{{ m.content }}}}{{% endfor %}}"
    use_template(monkeypatch, served, template)
    ask(tab, worker, "one")
    worker.say("<think>let me")
    expect(tab.locator("#status")).to_have_text("Thinking …")
    tab.click("#stop")
    body = body_of(tab, lambda: tab.get_by_role("button", name="Continue").click())
    assert body["messages"][1] == {"role": "assistant", "content": "", "reasoning_content": "let me"}
    until(tab, lambda: len(worker.asked) == 2)
    assert served.tokenizer.decode(worker.asked[1].ids).endswith("<think>let me")
    answer = whole(tab, worker, " see</think>two")
    expect(answer.locator("details .text")).to_have_text("let me see")
    expect(answer.locator(".markdown")).to_have_text("two")


def test_a_thought_that_the_template_leaves_out_is_not_continued(
    browser: Any, address: str, worker: Any, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page says why, and keeps what is there."""
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}<think></think>"
    use_template(monkeypatch, served, template)
    context = browser.new_context()
    tab = context.new_page()
    tab.goto(address)
    ask(tab, worker, "one")
    worker.say("<think>let me")
    expect(tab.locator("#status")).to_have_text("Thinking …")
    tab.click("#stop")
    tab.get_by_role("button", name="Continue").click()
    expect(tab.locator("article .error")).to_contain_text("The model's chat template leaves out the thought")
    expect(tab.locator("article details .text")).to_have_text("let me")
    tab.get_by_role("button", name="Answer again").click()
    until(tab, lambda: len(worker.asked) == 2)
    expect(whole(tab, worker, "two").locator(".markdown")).to_have_text("two")
    context.close()


def test_another_server_in_the_place_of_the_first_is_found(browser: Any, address: str) -> None:
    """After an answer that failed."""
    context = patient(browser)
    tab = context.new_page()
    tab.goto(address)
    expect(tab.locator("#model")).to_have_text("a <b>model</b>")
    tab.route("**/*", lambda route: route.abort())
    tab.fill("#message", "there?")
    tab.press("#message", "Enter")
    expect(tab.locator("article .error")).to_have_text("The server does not answer. Is it still running?")
    expect(tab.locator("#notice")).to_be_visible()
    tab.unroute("**/*")
    models = {"data": [{"id": "another", "max_model_len": 64}]}
    tab.route("**/v1/models", lambda route: route.fulfill(json=models))
    expect(tab.locator("#notice")).to_be_hidden()
    expect(tab.locator("#model")).to_have_text("another")
    expect(tab.locator(".who")).to_have_text("a <b>model</b>")
    body = body_of(tab, lambda: tab.get_by_role("button", name="Answer again").click())
    assert body["model"] == "another"
    context.close()


def test_stop_and_another_answer(tab: Any, worker: Any) -> None:
    ask(tab, worker, "count")
    worker.say("one")
    expect(tab.locator(".markdown")).to_have_text("one")
    tab.click("#stop")
    expect(tab.locator("article.assistant")).to_contain_text("Stopped.")
    until(tab, lambda: worker.left == 1)
    body = body_of(tab, lambda: tab.get_by_role("button", name="Answer again").click())
    assert [each["role"] for each in body["messages"]] == ["user"]
    until(tab, lambda: len(worker.asked) == 2)
    expect(whole(tab, worker, "1, 2").locator(".markdown")).to_have_text("1, 2")
    expect(tab.locator("article.assistant")).to_have_count(1)


def test_conversations_are_found_and_saved_as_files(tab: Any, worker: Any, tmp_path: Path) -> None:
    for question, answer in (("of apples", "# Red\nor green"), ("of pears", "yellow")):
        tab.click("#new")
        ask(tab, worker, question)
        whole(tab, worker, answer)
    for wanted, found in (("GREEN", ["of apples"]), ("of", ["of pears", "of apples"]), ("plum", [])):
        tab.fill("#search", wanted)
        expect(tab.locator("#conversations li button:first-child")).to_have_text(found)
    expect(tab.locator("#none")).to_be_visible()
    tab.fill("#search", "red")
    tab.locator("#conversations button").first.click()
    texts = {}
    for button in ("#as-markdown", "#as-json"):
        with tab.expect_download() as started:
            tab.click(button)
        texts[started.value.suggested_filename] = started.value.path().read_text()
    assert texts["of-apples.md"] == "## You\n\nof apples\n\n## The model\n\n# Red\nor green\n"
    saved = json.loads(texts["of-apples.json"])
    assert [each["content"] for each in saved["messages"]] == ["of apples", "# Red\nor green"]


def test_everything_is_reached_by_keyboard(tab: Any, worker: Any) -> None:
    """What has the focus has a name; the expert that the arrows choose is described."""
    press = tab.keyboard.press
    tab.keyboard.type("two lines")
    press("Shift+Enter")
    tab.keyboard.type("of text")
    body = body_of(tab, lambda: press("Enter"))
    assert body["messages"] == [{"role": "user", "content": "two lines\nof text"}]
    until(tab, lambda: worker.asked)
    worker.say("```\ncode\n```\n")
    expect(tab.locator("pre")).to_be_visible()
    press("Escape")
    expect(tab.locator("article.assistant")).to_contain_text("Stopped.")
    named = """() => {
      const { ariaLabel, labels, textContent } = document.activeElement;
      return ariaLabel || labels?.[0]?.textContent || textContent;
    }"""
    tab.evaluate("document.activeElement.blur()")
    seen = []
    for _ in range(40):
        press("Tab")
        seen.append(tab.evaluate(named).strip())
        assert seen[-1]
    wanted = {"Chat", "Experts", "New conversation", "Search conversations", "Messages", "Copy code", "Copy the answer"}
    wanted |= {"Edit message: two lines\nof text", "Continue", "Answer again", "Message", "Attach", "Settings"}
    assert wanted | {"Delete conversation: two lines\nof text", "Save .md"} <= set(seen)
    tab.get_by_role("link", name="Experts").focus()
    press("Enter")
    expect(tab.locator("#legend")).to_contain_text("16 bits")
    tab.locator("#cells").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        press(key)
    expect(tab.locator("#cell")).to_contain_text("MoE layer 1, expert 1:")


def test_figures_stay_when_nothing_runs(tab: Any) -> None:
    """Four answers of the server while something runs, then only such with nothing."""
    counters = ["expert_hits", "expert_misses", "wait_s", "bytes_read", "prompt_tokens", "cached_tokens"]
    asked = 0

    def stats(route: Any) -> None:
        nonlocal asked
        asked += 1
        so_far = min(asked, 4)
        now = dict.fromkeys([*counters, "generated_tokens"], 100 * so_far)
        rest = {"cache_slots": 4, "all_experts": 8, "peak_memory_bytes": 1, "memory_budget_bytes": 2, "rows": 4}
        more = {"running": int(asked <= 4), "waiting": 0, "other_budgets": []}
        route.fulfill(json={**now, **rest, **more})

    tab.route("**/stats?*", stats)
    tab.click("a[href='#experts']")
    figures = tab.locator("#figures div")
    until(tab, lambda: asked >= 5)
    expect(tab.locator("#pace")).to_have_text(re.compile("Nothing runs. The last seconds"))
    before = figures.all_text_contents()[:4]
    assert re.match(r"Tokens a second\d", before[0])
    assert before[1].startswith("Hit rate50 %")
    until(tab, lambda: asked >= 8)
    assert figures.all_text_contents()[:4] == before


def test_progress_of_a_prompt(tab: Any) -> None:
    told = [{"choices": [], "prompt_progress": {"total": 4000, "cache": 0, "processed": 1200}}]
    told += [{"choices": [{"delta": {"content": "hi"}}]}]
    text = "".join(f"data: {json.dumps(each)}\n\n" for each in told) + ": nothing yet\n\ndata: [DONE]\n\n"
    tab.route("**/v1/chat/completions", lambda route: route.fulfill(body=text, content_type="text/event-stream"))
    tab.evaluate(
        "() => { window.heard = []; const as = setText; setText = (id, text) => { heard.push(text); as(id, text); }; }"
    )
    tab.fill("#message", "a long one")
    tab.press("#message", "Enter")
    expect(tab.locator(".markdown")).to_have_text("hi")
    assert "Reading the prompt: 1,200 of 4,000 tokens …" in tab.evaluate("heard")


@pytest.mark.parametrize("experts", [8, 128, 512])
def test_a_phone_shows_everything_without_scrolling_sideways(browser: Any, address: str, experts: int) -> None:
    context = patient(browser, viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True)
    tab = context.new_page()
    layer = {"bits": [0] * experts, "arriving": [0] * experts, "uses": list(range(experts))}
    tab.route("**/experts?*", lambda route: route.fulfill(json={"precisions": [4], "layers": [layer] * 3}))
    tab.goto(f"{address}/#experts")
    expect(tab.locator("#legend")).to_contain_text("4 bits")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    box = tab.locator("#cells").bounding_box()
    assert box["x"] + box["width"] <= 360
    tab.locator("#cells").tap(position={"x": box["width"] - 2, "y": box["height"] - 6})
    expect(tab.locator("#cell")).to_contain_text(f"MoE layer 2, expert {experts - 1}: ")
    tab.click("a[href='#chat']")
    tab.click("#menu")
    expect(tab.locator("#search")).to_be_visible()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    context.close()


@pytest.mark.parametrize("others", [[], ["another"]])
def test_a_phone_shows_the_name_of_the_model(browser: Any, address: str, others: list[str]) -> None:
    """Whole, beside the way to conversations and to the experts; of several models in the list to choose from."""
    name = "Qwen3-Coder-30B-A3B-Instruct-Q4_K_M"
    context = browser.new_context(viewport={"width": 375, "height": 640}, is_mobile=True, has_touch=True)
    tab = context.new_page()
    models = {"data": [{"id": each, "max_model_len": 64} for each in (name, *others)]}
    tab.route("**/v1/models", lambda route: route.fulfill(json=models))
    tab.goto(address)
    if others:
        expect(tab.get_by_label("Model", exact=True)).to_have_value(name)
        shown = tab.locator("#models")
    else:
        expect(tab.locator("#model")).to_have_text(name)
        shown = tab.locator("h1")
        assert shown.evaluate("(box) => box.scrollHeight <= box.clientHeight")
    assert shown.bounding_box()["width"] > 100
    expect(tab.get_by_role("button", name="Conversations")).to_be_visible()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 375
    context.close()


def test_a_wide_table_breaks_no_word(tab: Any, worker: Any) -> None:
    tab.set_viewport_size({"width": 360, "height": 640})
    ask(tab, worker, "compare")
    head = "| generator | ordinary | mapped | asynchronous | remarks |"
    answer = whole(tab, worker, f"{head}\n{'|---' * 5}|\n| a | b | c | d | e |\n")
    assert answer.locator("th").nth(0).evaluate("(cell) => cell.offsetHeight") < 40
    assert answer.locator(".wide").evaluate("(box) => box.scrollWidth > box.clientWidth")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
