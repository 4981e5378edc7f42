"""What engines tell of requests, end to end: the commands, HTTP, the verb, and the page in a real browser."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from admin_client import Client, admin_config
from cli_tools import as_json, refused, tierkv
from fake_engine import FakeEngine, make_namespace, wait_until
from serving import make_config, serving
from tierkv import asked
from tierkv.admin_client import AdminClient
from tierkv.errors import RefusedError
from tierkv.messages import AskedReport
from tierkv.selection import Select
from tierkv_server.admin import schema
from tierkv_server.server import Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHUNK = 32
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
#: A name that a page must not take for its own text.
EVIL = "org/<script>alert(1)</script>"
NUM_PROMPTS = 30
#: Sixteen chunks of a prompt: six of all prompts, ten of its own.
SYSTEM = list(range(6 * CHUNK))


@pytest.fixture(autouse=True)
def quick_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.client.REPORT_INTERVAL_S", 0.05)


def prompt(i: int) -> list[int]:
    return [*SYSTEM, *range(10_000 * (i + 1), 10_000 * (i + 1) + 10 * CHUNK)]


def serve_requests(engine: FakeEngine, num: int, seed: int = 0) -> int:
    """Have an engine serve prompts, some of them again and again; returns how many chunks were asked for."""
    rng, asked_for = Random(seed), 0
    for _ in range(num):
        tokens = prompt(min(int(rng.expovariate(1 / 8)), NUM_PROMPTS - 1))
        engine.get(tokens)
        engine.put(tokens)
        asked_for += len(tokens) // CHUNK
    return asked_for


def told(server: Server, num: int) -> dict[str, Any]:
    """Return what the server knows once it was told of ``num`` chunks."""

    def ask() -> dict[str, Any] | None:
        found = server.commands.inspector.reuse()
        return found if found["tiers"][0]["asked"] == num else None

    return wait_until(ask, what="the server was not told of all chunks")


@pytest.fixture
def server(short_dir: Path) -> Iterator[Server]:
    with serving(admin_config(short_dir)) as server:
        yield server


@pytest.fixture
def engine(server: Server) -> Iterator[FakeEngine]:
    """An engine with a pool of a few prompts, which tells what it is asked for."""
    with FakeEngine(server.config.socket, make_namespace(EVIL), num_slots=80) as engine:
        engine.tells = True
        yield engine


def tier(reuse: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in reuse["tiers"] if row["name"] == name)


def at(row: dict[str, Any], times: float) -> float:
    """Return a curve's value at a multiple of the present size."""
    return row["hit_rates"][min(range(37), key=lambda i: abs(row["sizes"][i] - times * row["budget"]))]


# -- from the engine to the server


def test_the_server_learns_what_was_asked_and_where_it_was(server: Server, engine: FakeEngine) -> None:
    num = serve_requests(engine, 150)
    reuse = told(server, num)
    host, disk = tier(reuse, "host"), tier(reuse, "disk")
    counters = engine.counters
    assert host["num_sampled"] == num and host["rate"] == disk["rate"] == 1.0, "few keys: all are in the sample"
    assert host["budget"] == 80 * engine.shape.payload_nbytes and disk["budget"] == server.config.disk_bytes
    assert sum(sum(column) for column in reuse["history"]["chunks"].values()) == num
    for name in ("host_hits", "disk_hits", "missed"):
        assert sum(reuse["history"]["chunks"][name.removesuffix("_hits")]) == counters[name]
    assert host["found"] == pytest.approx(counters["host_hits"] / num, abs=1e-3)
    assert disk["asked"] == counters["disk_hits"] + counters["missed"]
    assert disk["found"] == pytest.approx(counters["disk_hits"] / disk["asked"], abs=1e-3)
    # The fake engine's pool drops what was used least recently, as far as chains allow: its hits are the curve's.
    assert at(host, 1) == pytest.approx(host["found"], abs=0.06)
    # The disk holds all of it: what it missed was never stored, at its present size and half of it alike.
    assert at(disk, 1) == pytest.approx(disk["found"], abs=0.01) and at(disk, 0.5) == at(disk, 1)
    distinct = len({key for i in range(NUM_PROMPTS) for key in engine.keys(prompt(i))})
    assert disk["distinct_nbytes"] <= distinct * 8192
    assert [row["id"] for row in host["namespaces"]] == [engine.ns] and host["namespaces"][0]["model"] == EVIL


def test_what_was_told_outlives_the_engine(server: Server, engine: FakeEngine) -> None:
    num = serve_requests(engine, 20)
    before = told(server, num)
    engine.close()
    wait_until(lambda: not server.service.sessions)
    after = server.commands.inspector.reuse()
    assert after["tiers"] == before["tiers"] and after["history"] == before["history"]


def test_two_engines_share_the_disk_and_not_the_pool(server: Server, engine: FakeEngine) -> None:
    with FakeEngine(server.config.socket, make_namespace("other"), num_slots=80, engine_id="other") as other:
        other.tells = True
        num = serve_requests(engine, 20) + serve_requests(other, 20)
        reuse = told(server, num)
        for row in reuse["tiers"]:
            assert {space["id"] for space in row["namespaces"]} == {engine.ns, other.ns}
        assert tier(reuse, "host")["num_engines"] == 2


def test_the_engine_keeps_to_the_servers_sample(
    server: Server, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = (1 << 61).to_bytes(8, "big")
    monkeypatch.setattr(server.service.reuse, "note", lambda session, report: reports.append(report) or low)
    reports: list[AskedReport] = []
    engine.get(prompt(0))
    wait_until(lambda: reports and engine.asked._threshold == low)
    assert reports[0].threshold == b"\xff" * 8 and len(reports[0].requests[0][0]) == 16 * 8
    engine.get(prompt(1))
    wait_until(lambda: len(reports) == 2)
    assert reports[1].threshold == low and reports[1].num_asked == 16
    assert all(packed[i] < 0x20 for packed, _, _ in reports[1].requests for i in range(0, len(packed), 8))


def test_a_server_that_takes_no_reports_is_told_once(
    server: Server, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """One of before they were known answers with an error; serving goes on."""
    server.commands._table.pop(b"TKV.ASKED")
    for i in range(4):
        engine.get(prompt(i))
        engine.put(prompt(i))
        time.sleep(0.2)
    engine.forget()
    assert engine.get(prompt(3)) == engine.expected(prompt(3)) and set(engine.last_sources) == {"disk"}
    assert sum("TKV.ASKED" in line for line in caplog.messages) == 1
    assert engine.client.connected()


def test_bad_reports_are_errors(server: Server, engine: FakeEngine) -> None:
    good = AskedReport(b"\xff" * 8, 1, 0, 0, [0] * 5, [(b"12345678", 0, False)])
    with AdminClient(server.config.socket) as client:
        session = engine.welcome.session if engine.welcome else ""
        assert client.call("TKV.ATTACH", session) == b"OK"
        assert client.call("TKV.ASKED", msgspec.msgpack.encode(good)) == b"\xff" * 8
        for bad in (b"", b"\x90", msgspec.msgpack.encode(msgspec.structs.replace(good, num_below=2))):
            with pytest.raises(RefusedError, match=r"bad arguments for TKV\.ASKED"):
                client.call("TKV.ASKED", bad)
        assert client.ask("TKV.REUSE")["tiers"][0]["asked"] == 1
    with AdminClient(server.config.socket) as client, pytest.raises(RefusedError, match="no session"):
        client.call("TKV.ASKED", msgspec.msgpack.encode(good))


def test_http_gives_the_same(server: Server, engine: FakeEngine) -> None:
    reuse = told(server, serve_requests(engine, 100))
    with AdminClient(server.config.socket) as client:
        assert client.ask("TKV.REUSE") == reuse
    body = Client(server).get("/v1/reuse")
    assert body == reuse
    assert msgspec.to_builtins(msgspec.convert(body, schema.Reuse)) == reuse


# -- sums by age


def test_bytes_by_age(server: Server, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.put(prompt(0))
    engine.forget()
    found = as_json("du", "--by", "age", "--server", server.config.socket)
    assert [(row["from_s"], row["to_s"], row["num_chunks"]) for row in found["rows"]] == [(0, 60, 16)]
    now = time.time()
    for later, row in ((90, (60, 600)), (1e6, (604800, None))):
        monkeypatch.setattr("tierkv_server.lister.time.time", lambda later=later: now + later)
        (only,) = server.commands.inspector.du(Select(by="age"))["rows"]
        assert (only["from_s"], only["to_s"]) == row and only["chunks"] == {"disk": 16}
    assert "over 7 d ago" in tierkv("du", "--by", "age", "--server", server.config.socket).out


# -- the verb


def test_report_writes_a_page(server: Server, engine: FakeEngine, tmp_path: Path) -> None:
    told(server, serve_requests(engine, 150))
    file = tmp_path / "out" / "report.html"
    refused(tierkv("report", "-o", file, "--server", server.config.socket), 2, "cannot be written", "-o")
    file.parent.mkdir()
    said = tierkv("report", "-o", file, "--server", server.config.socket)
    assert said.code == 0 and said.out == f"Wrote {file}\n"
    page = file.read_text()
    assert page.count("<polyline") == 2 and "In short" in page and "<script" not in page
    assert list(file.parent.iterdir()) == [file], "nothing else is left"
    assert tierkv("report", "-q", "-o", file, "--server", server.config.socket).out == ""
    assert tierkv("report", "-o", "-", "--server", server.config.socket).out.startswith("<!doctype html>")


def test_report_as_json(server: Server, engine: FakeEngine, tmp_path: Path) -> None:
    reuse = told(server, serve_requests(engine, 150))
    at_server = ("--server", server.config.socket)
    report = as_json("report", *at_server)
    assert report["reuse"] == reuse and report["server"]["pid"] and len(report["advice"]) == 2
    assert report["usage"]["namespace"]["rows"][0]["model"] == EVIL
    assert report["usage"]["age"]["rows"][0]["from_s"] == 0 and report["usage"]["tenant"]["rows"][0]["tenant"] == ""
    page = tmp_path / "r.html"
    assert as_json("report", "-o", page, *at_server)["reuse"] == reuse and "<svg" in page.read_text()
    refused(tierkv("report", "--json", "-o", "-", *at_server), 2, "standard output")


def test_a_report_of_an_empty_server_says_so(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "r.html"
    assert tierkv("report", "-o", file, "--server", server.config.socket).code == 0
    page = file.read_text()
    assert "nothing is known" in page and "Nothing is stored" in page and "<polyline" not in page


def test_a_report_without_a_server(short_dir: Path, tmp_path: Path) -> None:
    config = make_config(short_dir)
    with serving(config), FakeEngine(config.socket) as engine:
        engine.put(prompt(0))
    file = tmp_path / "r.html"
    assert tierkv("report", "--disk", config.disk_dir, "-o", file).code == 0
    page = file.read_text()
    assert "a running server" in page and "By time since the last use" in page and "<svg" not in page
    report = as_json("report", "--disk", config.disk_dir)
    assert report["reuse"] is report["server"] is None and report["usage"]["namespace"]["total"]["num_chunks"] == 16
    refused(tierkv("report", "-o", file, "--server", short_dir / "none.sock"), 3, "no store server answers")


# -- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND"],
        )
        yield browser
        browser.close()


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)")
@pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="the package playwright is missing")
def test_the_page_in_a_browser(server: Server, engine: FakeEngine, tmp_path: Path, browser: Browser) -> None:
    told(server, serve_requests(engine, 150))
    file = tmp_path / "report.html"
    assert tierkv("report", "-o", file, "--server", server.config.socket).code == 0
    colours, inks = set(), set()
    for scheme in ("light", "dark"):
        for width in (1200, 420):
            context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
            page = context.new_page()
            complaints: list[str] = []
            asks: list[str] = []
            page.on("console", lambda line, to=complaints: to.append(line.text))
            page.on("pageerror", lambda error, to=complaints: to.append(str(error)))
            page.on("dialog", lambda dialog, to=complaints: to.append(dialog.message))
            page.on("request", lambda request, to=asks: to.append(request.url))
            page.goto(file.as_uri())
            assert complaints == [] and asks == [file.as_uri()], "the page has a fault, or asks somebody"
            assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page is wider than the window"
            curves = page.locator("svg polyline")
            assert curves.count() == 2
            for i in range(2):
                box = curves.nth(i).bounding_box()
                assert box is not None and box["width"] > 200 and box["height"] > 5
            assert page.locator("svg[role=img]").evaluate_all("all => all.every(one => one.ariaLabel.length > 20)")
            page.locator("details").first.locator("summary").click()
            assert page.locator("details table tbody tr").first.is_visible()
            colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            inks.add(page.evaluate("getComputedStyle(document.querySelector('polyline.host')).stroke"))
            if scheme == "dark":
                page.emulate_media(media="print")
                assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
            context.close()
    assert len(colours) == len(inks) == 2, "both schemes have their colours"


def test_the_interval_of_reports_is_that_of_the_documents() -> None:
    assert asked.REPORT_INTERVAL_S == 1.0 and asked.REPORT_KEYS == 4096
    assert json.dumps(asked.MAX_WAITING_KEYS) == "65536"
