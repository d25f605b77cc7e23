"""The dashboard in a real browser, over a real server with the embedded pair. Skipped where there is no Chromium."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dsde import LLM
from served import Served, serving, wait_until
from tiny import make_engine, tiny_model

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

FOREVER_MS = 60_000
"""a busy machine is slow, not wrong"""
expect.set_options(timeout=FOREVER_MS)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    llm = LLM(max_num_seqs=8, kv_cache_bytes=256 << 20)
    with serving(llm.engine, model_name=llm.target, dashboard=True) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        # The sandbox refuses to work for root, which tests in containers often are; only our own page is opened.
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, url: str, **settings: Any) -> Iterator[Any]:
    """A page that complains about nothing and fetches from nobody else."""
    complaints: list[str] = []
    context = browser.new_context(**settings)
    page = context.new_page()
    page.on("console", lambda message: message.type in ("error", "warning") and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda r: r.url.startswith((url, "data:")) or complaints.append(f"fetched {r.url}"))
    try:
        page.goto(f"{url}/dashboard")
        expect(page.locator("#connection")).to_have_text("Live")
        yield page
    finally:
        context.close()
    assert complaints == []


def watch_until(condition: Any, what: str) -> None:
    wait_until(condition, FOREVER_MS / 1000, lambda: what)


def test_a_message_by_keyboard_shows_tokens_colours_and_curves(server: Served, browser: Any) -> None:
    with opened(browser, server.url, viewport={"width": 1280, "height": 900}) as page:
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        for _ in range(2):
            page.keyboard.press("Tab")
        expect(page.get_by_label("Message")).to_be_focused()
        page.keyboard.type("Why is the sky blue?")
        page.get_by_label("Tokens").fill("40")
        page.get_by_label("Message").press("Enter")

        row = page.locator("#running > li", has_text="Why is the sky blue?").first
        expect(row.locator(".text .own").first).to_be_visible()
        curve = row.locator(".lengths .line-length")
        before = curve.get_attribute("d")
        watch_until(lambda: curve.get_attribute("d") != before, "the curve did not move")

        with_it = page.get_by_role("region", name="Answer with speculation")
        without = page.get_by_role("region", name="Answer without speculation")
        expect(with_it.locator(".accepted").first).to_be_visible()
        expect(page.locator("#chat-note")).to_contain_text("The two texts are identical.")
        for pane in (with_it, without):
            expect(pane.locator(".speed output")).to_have_text(re.compile(r"^\d+\.\d$"))
        assert with_it.locator(".rejected, .tick").count() > 0
        assert without.locator(".accepted, .rejected, .tick").count() == 0
        drafted = with_it.locator(".accepted").first
        assert drafted.evaluate("e => getComputedStyle(e).color") != with_it.locator(".own").first.evaluate(
            "e => getComputedStyle(e).color"
        )
        expect(page.locator("#announcer")).to_contain_text("Both answers are complete.")

        speculated = page.locator("#ended > li", has_text="adaptive")
        expect(speculated.locator(".why")).to_contain_text("token")
        for name in ("outlook", "next", "price"):
            strip = speculated.locator(".strip", has_text=name)
            expect(strip.locator(".value")).to_have_text(re.compile(r"^[\d.e]+$"))
            assert strip.locator("path").get_attribute("d").count("L") > 3
        expect(page.locator("#ratio")).to_have_text(re.compile(r"^\d+\.\d\d\u00d7$"))
        assert page.locator("#throughput-plot .line-with").get_attribute("d").count("L") > 0

        text = with_it.locator(".text")
        told = text.inner_text()
        page.get_by_role("button", name="Replay as a race").press("Enter")
        watch_until(lambda: len(text.inner_text()) < len(told), "the replay did not begin anew")
        watch_until(lambda: text.inner_text() == told, "the replay did not come to the same end")


def test_pause_lets_the_server_go_and_comes_back(server: Served, browser: Any) -> None:
    with opened(browser, server.url) as page:
        pause = page.get_by_role("button", name="Pause")
        pause.press("Space")
        expect(pause).to_have_attribute("aria-pressed", "true")
        watch_until(lambda: not server.service.llm.listeners, "the viewer is still there")
        pause.press("Space")
        expect(page.locator("#connection")).to_have_text("Live")
        assert len(server.service.llm.listeners) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_can_read_it(server: Served, browser: Any, scheme: str) -> None:
    settings = {"viewport": {"width": 390, "height": 844}, "color_scheme": scheme, "reduced_motion": "reduce"}
    with opened(browser, server.url, **settings) as page:
        page.get_by_label("Tokens").fill("12")
        page.get_by_role("button", name="Count from one to twenty.").click()
        expect(page.locator("#chat-note")).to_contain_text("texts")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        for kind in ("accepted", "own", "rejected"):
            assert contrast(page, f".legend .{kind}") >= 4.5
        for selector in (".note", ".about", ".row .state", ".row .why", ".strip .label", "figcaption"):
            assert contrast(page, selector) >= 4.5, selector
        assert page.locator(".bar").first.evaluate("e => getComputedStyle(e).transitionDuration") == "0s"
        background = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert (background > 0.5) == (scheme == "light")


def test_it_has_landmarks_and_every_control_a_name(server: Served, browser: Any) -> None:
    with opened(browser, server.url) as page:
        for role in ("banner", "main"):
            expect(page.get_by_role(role)).to_have_count(1)
        for name in ("Throughput", "Lengths across the batch", "Try it, with and without", "Running requests"):
            expect(page.get_by_role("region", name=name)).to_have_count(1)
            expect(page.get_by_role("heading", name=name)).to_have_count(1)
        for control in page.locator("button:visible, input:visible, textarea:visible").all():
            name = control.evaluate("e => e.labels?.[0]?.innerText || e.innerText")
            assert name.strip()
        assert page.locator("#announcer").get_attribute("aria-live") == "polite"


def test_a_server_with_a_key_asks_for_it(browser: Any) -> None:
    engine = make_engine(tiny_model(seed=7), tiny_model(seed=7, noise=0.1), "dsde")
    with serving(engine, dashboard=True, api_keys=("secret",)) as served:
        page = browser.new_page()
        page.goto(f"{served.url}/dashboard")
        field = page.get_by_label("API key")
        expect(field).to_be_focused()
        field.fill("wrong")
        field.press("Enter")
        expect(page.locator("#key-problem")).to_contain_text("needs an API key")
        field.fill("secret")
        field.press("Enter")
        expect(page.locator("#connection")).to_have_text("Live")
        page.close()


def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(page: Any, selector: str) -> float:
    """WCAG's ratio of an element's text to what lies behind it."""
    colours = page.locator(selector).first.evaluate(
        """element => {
            let behind = element;
            while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
            return [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor];
        }"""
    )
    low, high = sorted(map(luminance, colours))
    return (high + 0.05) / (low + 0.05)
