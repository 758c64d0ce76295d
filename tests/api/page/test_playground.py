"""The playground in a real Chromium: what it shows is the job's result, and what it copies does the same."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scorepool import Client, Generate, Message

playwright = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
pytestmark = pytest.mark.timeout(180)
# Ends strings and commands of every kind, and holds what must not be taken for an escape.
PROMPT = "it's \"$HOME\" `id` \\n ${x} \\u0041 {{1}}\n'''\nJSON\n"
PROMPT += "\u202eevil\u2028\u00a0é 𝄞 <script>document.title='run'</script>"

LONG = {"ignore_eos": True}


def fill(page: "playwright.Page", url: str, **fields: str) -> None:
    page.goto(f"{url}/playground")
    for name, value in fields.items():
        field = page.locator(f"#playground [name={name}]")
        if name == "kind":
            field.select_option(value)
        else:
            field.fill(value)


def run(page: "playwright.Page") -> str:
    """Run the form, wait for the end, and return the job's id."""
    page.get_by_role("button", name="Run", exact=True).click()
    playwright.expect(page.locator("#state")).to_contain_text("finished", timeout=60_000)
    return str(page.locator("#job").get_attribute("href")).removeprefix("/jobs/")


def shown(page: "playwright.Page") -> list[dict[str, str]]:
    return page.locator("#map .t").evaluate_all("all => all.map(each => ({...each.dataset, text: each.textContent}))")


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "generate", "prompt": "import", "max_tokens": "40", "seed": "7"},
        {"kind": "score", "prompt": "import", "completion": f" os {PROMPT}"},
    ],
    ids=["generate", "score"],
)
def test_a_job_is_shown_token_by_token_as_its_own_page_shows_it(
    url: str, page: "playwright.Page", fields: dict[str, str]
):
    fill(page, url, **fields)
    job_id = run(page)
    tokens = shown(page)
    with Client(url) as client:
        sequence = client.result(job_id).sequences[0]
    assert sequence.logprobs is not None
    assert [each["id"] for each in tokens] == [str(each) for each in sequence.token_ids]
    assert "document.title" not in page.title()
    page.keyboard.press("Escape")
    page.locator("#map .t").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#detail li").count() == 5
    page.locator("#job").click()
    page.locator("#t0").wait_for()
    theirs = page.locator(".map .t").evaluate_all(
        "all => all.map(({dataset: {id, logprob, p, top}, textContent}) => ({id, logprob, p, top, text: textContent}))"
    )
    # The server rounds 32-bit floats to nearest even, the browser may round a tie up.
    for mine, one in zip(tokens, theirs, strict=True):
        assert (mine["text"], mine["top"].split()[::2]) == (one["text"], one["top"].split()[::2])
        assert float(mine["logprob"]) == pytest.approx(float(one["logprob"]), abs=2e-4)


def test_a_chat_is_answered(url: str, page: "playwright.Page"):
    fill(page, url, kind="chat", prompt="hello", max_tokens="5", seed="3")
    job_id = run(page)
    messages = [Message(role="user", content="hello")]
    with Client(url) as client:
        again = client.submit(Generate(model="demo", messages=messages, max_tokens=5, seed=3)).result().sequences[0]
        assert client.result(job_id).sequences[0].token_ids == again.token_ids
    assert [each["id"] for each in shown(page)] == [str(each) for each in again.token_ids]


def test_stop_cancels_the_job(url: str, page: "playwright.Page"):
    # Long enough to be stopped in the middle: all that fits into the model's context.
    page.route("**/playground/jobs", lambda route: route.continue_(post_data=route.request.post_data_json | LONG))
    fill(page, url, prompt="import", max_tokens="2000")
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator("#map .t").first.wait_for()  # tokens come while it runs
    page.get_by_role("button", name="Stop").click()
    playwright.expect(page.locator("#state")).to_contain_text("canceled", timeout=60_000)
    job_id = str(page.locator("#job").get_attribute("href")).removeprefix("/jobs/")
    with Client(url) as client:
        assert client.job(job_id).status == "canceled"
    assert page.locator("#failure").is_hidden()
    playwright.expect(page.get_by_role("button", name="Run", exact=True)).to_be_enabled()


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "generate", "prompt": PROMPT, "max_tokens": "8", "seed": "7", "temperature": "0.5"},
        {"kind": "score", "prompt": PROMPT, "completion": PROMPT},
    ],
    ids=["generate", "score"],
)
def test_copied_commands_and_programs_do_what_the_playground_does(
    url: str, page: "playwright.Page", fields: dict[str, str], tmp_path: Path
):
    fill(page, url, **fields)
    texts = {
        name: page.locator(f"#{name}").evaluate("each => each.textContent") for name in ("curl", "python", "jsonl")
    }
    command = page.locator("#command").inner_text()
    job_id = run(page)
    with Client(url) as client:
        sequence = client.result(job_id).sequences[0]
    assert sequence.logprobs is not None
    assert "\u202e" not in "".join(texts.values())

    bin_folder = Path(sys.executable).parent
    environ = {**os.environ, "no_proxy": "*", "PATH": f"{bin_folder}:{os.environ['PATH']}"}

    def output(*words: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environ, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    answer: dict[str, Any] = json.loads(output("bash", "-c", texts["curl"]))
    [by_curl] = answer["result"]["sequences"]
    assert by_curl["token_ids"] == list(sequence.token_ids)
    assert by_curl["logprobs"] == pytest.approx(list(sequence.logprobs), abs=1e-4)

    printed = output(sys.executable, "-c", texts["python"])
    assert printed.startswith(sequence.text)

    (tmp_path / "rows.jsonl").write_text(texts["jsonl"])
    output("bash", "-c", command)
    assert json.loads((tmp_path / "out.jsonl").read_text())["token_ids"] == list(sequence.token_ids)


def test_a_refusal_is_shown_as_its_sentence(url: str, browser: "playwright.Browser"):
    page = browser.new_page()  # without the check of the console, which reports the 400
    fill(page, url, kind="score", prompt="a", completion=" b", temperature="0")
    page.get_by_role("button", name="Run", exact=True).click()
    playwright.expect(page.locator("#failure")).to_contain_text("temperature")
    playwright.expect(page.locator("#answer")).to_be_hidden()
    page.close()


def test_what_must_not_be_empty_is_asked_for(url: str, page: "playwright.Page"):
    missing = "() => [...document.querySelectorAll('textarea:invalid')].map((each) => each.name)"
    for kind, empty in (("generate", ["prompt"]), ("chat", ["prompt"]), ("score", ["completion"])):
        fill(page, url, kind=kind)
        assert page.evaluate(missing) == empty
        page.get_by_role("button", name="Run", exact=True).click()
        assert page.locator("#answer").is_hidden()


def test_the_playground_without_a_model_says_so(url: str, page: "playwright.Page"):
    page.route("**/playground", without_models)
    page.goto(f"{url}/playground")
    playwright.expect(page.get_by_role("button", name="Run", exact=True)).to_be_disabled()
    assert "v1/jobs" in page.locator("#curl").inner_text()


def without_models(route: "playwright.Route") -> None:
    reply = route.fetch()
    options = re.sub(r"<option[^>]*>demo</option>", "", reply.text())
    route.fulfill(response=reply, body=options.replace('<button id="run">', '<button id="run" disabled>'))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_playground_is_accessible_and_fits(url: str, browser: "playwright.Browser", width: int, scheme: str):
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    fill(page, url, prompt=PROMPT * 3, max_tokens="20")
    run(page)
    found = axe.Axe().run(page).response["violations"]
    assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()
