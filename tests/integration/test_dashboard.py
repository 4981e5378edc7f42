"""The dashboard in a real headless browser, which can reach nothing but the server."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from admin_client import ADMIN_TOKEN, READER_TOKEN, Client, admin_config, token_files
from fake_engine import FakeEngine, make_namespace
from servers import server_binaries, start_redis
from serving import serving
from tierkv_server.admin import stats
from tierkv_server.server import Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHUNK = 32
SYSTEM = list(range(4 * CHUNK))
A = [*SYSTEM, *range(1000, 1000 + 3 * CHUNK)]
B = [*SYSTEM, *range(2000, 2000 + 2 * CHUNK)]
C = list(range(5000, 5000 + 5 * CHUNK))
#: Nothing but the loopback has an address, as on a node without a network.
ARGS = ["--no-sandbox", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="the package playwright is missing"),
    pytest.mark.skipif(not server_binaries(), reason="neither Redis nor Valkey is installed"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()


class Tab:
    """A tab with the page of a server, and what it asked for and complained of."""

    def __init__(self, browser: Browser, server: Server, **options: Any) -> None:
        assert server.admin is not None
        self.url = server.admin.url
        self.page: Page = browser.new_context(**options).new_page()
        self.page.set_default_timeout(15_000)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda line: line.type == "error" and self.complaints.append(line.text))
        self.page.goto(self.url)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def wait_text(self, selector: str, pattern: str) -> None:
        """Wait until the text of an element matches."""
        self.page.wait_for_function(
            "([selector, pattern]) => new RegExp(pattern).test(document.querySelector(selector)?.innerText || '')",
            arg=[selector, pattern],
        )

    def refresh(self) -> None:
        """Have the page ask now and not in a few seconds."""
        self.page.evaluate("async () => { await poll(); if (!$('main').hidden) await loadTree(); }")

    def rows(self) -> list[str]:
        """Return the ids of the runs that are on the page, folded ones too."""
        return self.page.eval_on_selector_all("#tree li[data-id]", "rows => rows.map(row => row.dataset.id)")

    def press(self, ident: str, button: str) -> None:
        """Press a button in the row of a run."""
        self.page.locator(f"li[data-id='{ident}'] > .node .{button}-button").click()


@pytest.fixture
def server(short_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(stats, "INTERVAL_S", 0.2)
    monkeypatch.setattr(stats, "MAX_AGE_S", 0.0)
    redis_server = start_redis(tmp_path)
    with serving(admin_config(short_dir, redis_server.url)) as server:
        yield server
    redis_server.kill()


@pytest.fixture
def engine(server: Server) -> Iterator[FakeEngine]:
    """An engine with A, B and C in its host pool, on the disk and in the Redis; A was asked for, and missed first."""
    with FakeEngine(server.config.socket) as engine:
        engine.get(A)
        for seed, tokens in enumerate((A, B, C)):
            engine.put(tokens, seed=seed)
        assert server.service.drain(20)
        engine.get(A)
        yield engine


@pytest.fixture
def tab(browser: Browser, server: Server, engine: FakeEngine) -> Iterator[Tab]:
    tab = Tab(browser, server)
    tab.page.wait_for_selector("#tree li[data-id]")
    yield tab
    assert tab.complaints == [], "the page has a fault, or its policy forbids what it does"
    assert all(url.startswith(tab.url) for url in tab.requests), "the page asks somebody else"
    tab.page.context.close()


def short_id(engine: FakeEngine, tokens: list[int]) -> str:
    return engine.keys(tokens)[-1].hex()[:12]


def test_it_shows_what_the_server_says(tab: Tab, server: Server, engine: FakeEngine) -> None:
    tab.refresh()
    stat = Client(server).get("/v1/stat")
    assert [tier["name"] for tier in stat["tiers"]] == ["host", "disk", "shared"]
    for tier in stat["tiers"]:
        card = f"#tier-{tier['name']}"
        assert tab.text(f"{card} [data-field=state]") == tier["state"]
        assert tab.page.get_attribute(f"{card} [data-field=nbytes]", "title") == f"{tier['nbytes']} bytes"
        for name, value in tier.items():
            if name.startswith("num_"):
                assert tab.text(f"{card} [data-field={name}]") == f"{value:,}", name
    assert tab.text("#tier-disk [data-field=num_entries]") == "14"
    assert tab.text("#state") == "ready" and stat["server"]["disk_dir"] in tab.text("#server")
    row = [tab.page.locator("#engines tbody td").nth(i).inner_text() for i in range(7)]
    assert row == ["fake-engine", str(stat["engines"][0]["pid"]), "14 of 64", "260 KiB", "7", "0", "0"]


def test_hits_over_time(tab: Tab, server: Server, engine: FakeEngine) -> None:
    engine.forget()
    engine.get(A)
    tab.page.wait_for_timeout(500)  # a sample or two
    tab.refresh()
    history = Client(server).get("/v1/history")["chunks"]
    grown = {name: values[-1] - values[0] for name, values in history.items()}
    assert sum(grown.values()) in (14, 21)  # the first sample may have come before or after the first miss
    shown = dict(re.findall(r"(\w+) ([\d.]+) %", tab.text("#rate-legend").replace("\n", " ")))
    assert shown == {name: f"{100 * n / sum(grown.values()):.1f}" for name, n in grown.items()}
    hit_rate = 100 * (1 - grown["missed"] / sum(grown.values()))
    assert tab.text("#tile-rate b") == f"{hit_rate:.1f} %"
    assert tab.text("#tile-asked b") == str(sum(grown.values()))
    assert tab.page.locator("#rate-plot rect.bar.disk").count() >= 1
    assert tab.page.locator("#bytes-plot polyline").count() == 3
    tab.page.click("#range button[data-range='3600']")
    assert tab.page.get_attribute("#range button[data-range='3600']", "aria-pressed") == "true"
    tab.wait_text("#tile-rate", "last 1 h")


def test_the_tree_unfolds_and_stays_so(tab: Tab, engine: FakeEngine) -> None:
    system = engine.keys(SYSTEM)[-1].hex()[:12]
    a, b, c = (short_id(engine, tokens) for tokens in (A, B, C))
    assert set(tab.rows()) == {system, a, b, c}
    toggle = tab.page.locator(f"li[data-id='{system}'] > .node .toggle")
    inner = tab.page.locator(f"li[data-id='{a}']")
    assert inner.is_visible() and toggle.get_attribute("aria-expanded") == "true"
    toggle.focus()
    tab.page.keyboard.press("Enter")
    assert not inner.is_visible() and toggle.get_attribute("aria-expanded") == "false"
    tab.refresh()
    assert not inner.is_visible(), "what was folded stays folded when the page renews itself"
    tab.page.select_option("#sort", "hits")
    tab.wait_text(f"li[data-id='{system}'] .hits", "1 hit")
    assert "tokens 0 to 128, 2 prefixes" in tab.text(f"li[data-id='{system}'] > .node .what")


def test_evict_asks_before_it_does(tab: Tab, server: Server, engine: FakeEngine) -> None:
    client = Client(server)
    a = short_id(engine, A)
    tab.press(a, "evict")
    tab.page.wait_for_selector("#evict-table")
    rows = tab.page.eval_on_selector_all(
        "#evict-table tbody tr", "rows => rows.map(row => [row.dataset.tier, row.cells[1].innerText])"
    )
    assert rows == [["host", "3"], ["disk", "3"], ["shared", "3"]]
    assert tab.text("#evict-id") == a and "1 prefix " in tab.text("#evict-plan")
    assert client.get("/v1/prefixes")["total"] == 3, "nothing has gone yet"
    tab.page.keyboard.press("Escape")
    assert client.get("/v1/prefixes")["total"] == 3 and not tab.page.locator("#evict-dialog").is_visible()
    tab.press(a, "evict")
    tab.page.wait_for_selector("#evict-do:enabled")
    assert tab.text("#evict-do") == "Evict 9 chunks"
    tab.page.click("#evict-do")
    tab.page.wait_for_selector(f"li[data-id='{a}']", state="detached")
    assert {row["id"] for row in client.get("/v1/prefixes")["prefixes"]} == {short_id(engine, B), short_id(engine, C)}
    assert tab.text("#toast") == "Evicted: host 3, disk 3, shared 3 chunks."
    tab.wait_text("#tier-disk [data-field=num_entries]", "^11$")
    shared = engine.expected(SYSTEM, seed=0)
    assert engine.get(B) == shared + engine.expected(B, seed=1)[4:], "what others share is still there"


def test_pin_keeps_from_eviction(tab: Tab, server: Server, engine: FakeEngine) -> None:
    c = short_id(engine, C)
    tab.press(c, "pin")
    tab.page.fill("#pin-owner", "two words")
    tab.page.click("#pin-do")
    assert tab.page.locator("#pin-dialog").is_visible(), "an owner is one word"
    tab.page.fill("#pin-owner", "night-batch")
    tab.page.select_option("#pin-seconds", "3600")
    tab.page.click("#pin-do")
    tab.wait_text(f"li[data-id='{c}'] .what", "pinned")
    pins = Client(server).get(f"/v1/prefixes/{c}")["pins"]
    assert [pin["owner"] for pin in pins] == ["night-batch"]
    assert tab.text("#toast") == "Pinned for night-batch: disk 5 of 5, shared 5 of 5 chunks."

    tab.press(c, "evict")
    tab.wait_text("#evict-plan", "pinned")
    assert tab.page.locator("#evict-do").is_disabled()
    tab.page.check("#evict-force")
    tab.page.wait_for_selector("#evict-do:enabled")
    tab.page.click("#evict-cancel")

    tab.press(c, "pin")
    tab.page.click("#pins button")
    tab.page.wait_for_selector(f"li[data-id='{c}'] .what .badge", state="detached")
    assert Client(server).get(f"/v1/prefixes/{c}")["pins"] == []
    tab.complaints = [line for line in tab.complaints if "409" not in line]  # the refusal, which the browser notes


def test_tokens(browser: Browser, short_dir: Path, tmp_path: Path) -> None:
    with (
        serving(admin_config(short_dir, **token_files(tmp_path))) as server,
        FakeEngine(server.config.socket) as engine,
    ):
        engine.put(C)
        tab = Tab(browser, server)
        c = short_id(engine, C)
        evict = tab.page.locator(f"li[data-id='{c}'] .evict-button")

        def use(token: str) -> None:
            tab.page.click("#token-button")
            tab.page.fill("#token", token)
            tab.page.click("#token-use")

        tab.wait_text("#state", "locked")
        assert not tab.page.locator("#main").is_visible()
        use("wrong-" + 40 * "w")
        tab.wait_text("#alert", "nobody's")
        assert tab.page.evaluate("sessionStorage.length") == 0, "a wrong token is not kept"
        use(READER_TOKEN)
        evict.wait_for()
        assert evict.is_disabled() and "admin" in (evict.get_attribute("title") or "")
        use(ADMIN_TOKEN)
        tab.page.wait_for_selector(f"li[data-id='{c}'] .evict-button:enabled")
        evict.click()
        tab.page.click("#evict-do:enabled")
        tab.wait_text("#tree", "Nothing is stored")
        tab.page.reload()
        tab.page.wait_for_selector("#tree .empty")
        tab.page.click("#token-button")
        tab.page.click("#token-forget")
        tab.wait_text("#state", "locked")
        assert ADMIN_TOKEN not in tab.page.content() and not [url for url in tab.requests if "token" in url]
        tab.page.context.close()


def test_what_is_stored_is_text_and_never_markup(browser: Browser, server: Server) -> None:
    evil = "<img src=x onerror=window.hacked=1>"
    with FakeEngine(server.config.socket, make_namespace(evil), engine_id=evil) as engine:
        engine.put(C)
        tab = Tab(browser, server)
        tab.page.wait_for_selector("#tree li[data-id]")
        assert tab.text("#tree .ns h3") == evil
        tab.wait_text("#engines", "onerror")
        assert tab.page.evaluate("window.hacked") is None and tab.page.locator("main img").count() == 0
        assert tab.complaints == []
        tab.page.context.close()


def test_a_server_that_has_gone_is_said_to_be(browser: Browser, short_dir: Path) -> None:
    with serving(admin_config(short_dir)) as server:
        tab = Tab(browser, server)
        tab.wait_text("#state", "ready")
        tab.wait_text("#tree", "Nothing is stored yet")
        assert "No engine is connected" in tab.text("#engines")
    tab.page.evaluate("poll()")
    tab.wait_text("#state", "no answer")
    assert "does not answer" in tab.text("#alert")
    tab.page.context.close()


def test_a_tier_that_is_out_is_seen_with_its_reason(browser: Browser, short_dir: Path, tmp_path: Path) -> None:
    redis_server = start_redis(tmp_path)
    with (
        serving(admin_config(short_dir, redis_server.url)) as server,
        FakeEngine(server.config.socket) as engine,
    ):
        tab = Tab(browser, server)
        tab.wait_text("#state", "ready")
        redis_server.kill()
        engine.put(C)
        server.service.drain(5)
        tab.wait_text("#state", "degraded")  # at its next look
        assert tab.text("#tier-shared [data-field=state]") == "out"
        reason = next(t["reason"] for t in Client(server).get("/v1/stat")["tiers"] if t["name"] == "shared")
        assert tab.text("#tier-shared [data-field=reason]").startswith(reason)
        tab.page.context.close()


_CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour, under) => {
    canvas.fillStyle = under; canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (parts) => parts.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!/^rgba\\(.*, 0\\)$/.test(colour)) return colour;
    }
    return "white";
  };
  const found = [];
  for (const node of document.querySelectorAll("main *, header *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || node.disabled || !node.checkVisibility() || node.closest("svg")) continue;
    const under = ground(node);
    const [a, b] = [light(rgb(getComputedStyle(node).color, under)), light(rgb(under, under))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), node.className || node.tagName, node.textContent.slice(0, 30)]);
  }
  return found.sort((x, y) => x[0] - y[0]);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_it_is_readable(browser: Browser, server: Server, engine: FakeEngine, scheme: Any, width: int) -> None:
    """Nothing is cut off or needs scrolling sideways, and all text has the contrast that WCAG 2.1 AA asks for."""
    tab = Tab(browser, server, viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab.page.wait_for_selector("#tree li[data-id]")
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    spilled = """() => [...document.querySelectorAll("main .card, .node, .tile, header")]
        .filter((node) => !node.classList.contains("scroll") && node.scrollWidth > node.clientWidth + 1)
        .map((node) => node.className)"""
    assert tab.page.evaluate(spilled) == []
    ratios = tab.page.evaluate(_CONTRAST)
    assert len(ratios) > 50 and ratios[0][0] >= 4.5, ratios[:3]
    ground = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(245, 246, 248)", "dark": "rgb(18, 22, 27)"}[scheme]
    small = """() => [...document.querySelectorAll("button, select")].filter((b) => b.checkVisibility())
        .map((b) => b.getBoundingClientRect()).filter((box) => box.height < 24 || box.width < 22).length"""
    assert tab.page.evaluate(small) == 0, "buttons are large enough for fingers"
    assert tab.complaints == []
    tab.page.context.close()
