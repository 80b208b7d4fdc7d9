"""The page in a real browser: Debian's chromium without a display."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageColor
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from amp_fx.instruments.reports.report import Report
from amp_fx.viz.model import drawing
from amp_fx.viz.style import COLOURS
from support.tracing.handwritten_reports import NASTY, blocks, chain, compared, nasty

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = [
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="needs chromium and chromedriver (Debian: apt install chromium chromium-driver)",
    ),
]

#: chromium refuses to run as root in its sandbox
FLAGS = (
    "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "window-size=1400,1000",
)  # fmt: skip


class Viewer:
    """One browser; ``show`` opens a report in it."""

    def __init__(self, driver: webdriver.Chrome, folder: Path) -> None:
        self.driver, self.folder = driver, folder

    def show(self, report: Report, against: Report | None = None, depth: int | None = 2) -> None:
        path = report.save(self.folder / "page.html", against=against, depth=depth)
        self.driver.get(path.as_uri())

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def boxes(self) -> dict[str, str]:
        """Position of each visible box -> all its text."""
        script = "return [...document.querySelectorAll('.box')].map(b => [b.dataset.id, b.textContent])"
        return dict(self.run(script))

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def named(self, text: str) -> WebElement:
        """The only box with this text in it."""
        (name,) = [name for name, label in self.boxes().items() if text in label]
        return self.find(f"[data-id='{name}']")

    def hover(self, element: WebElement) -> str:
        """What the page says about an element."""
        self.run("document.getElementById('tip').hidden = true")
        ActionChains(self.driver).move_to_element(element).perform()
        tip = self.find("#tip")
        return tip.text if tip.is_displayed() else ""

    def search(self, text: str, *, go: bool = False) -> str:
        """What the page says after a search, or after going to the first of what was found."""
        field = self.find("#search")
        field.clear()
        field.send_keys(text, *([Keys.ENTER] if go else []))
        return self.find("#details" if go else "#hits").text

    def deepest(self) -> None:
        """Opens as much as the page lets."""
        self.all("#depth option")[-1].click()

    def numbers(self, selector: str, style: str) -> list[float]:
        return [float(each.value_of_css_property(style).removesuffix("px")) for each in self.all(selector)]

    def view_box(self) -> list[float]:
        return [*map(float, (self.find("#picture").get_dom_attribute("viewBox") or "").split())]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    folder = tmp_path_factory.mktemp("browser")
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"user-data-dir={folder / 'profile'}"):
        options.add_argument(f"--{flag}")
    options.binary_location = CHROMIUM or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(DRIVER, log_output=os.devnull)
    with webdriver.Chrome(options, service) as driver:
        yield Viewer(driver, folder)


@pytest.fixture
def viewer(browser: Viewer) -> Iterator[Viewer]:
    """The browser; whatever a test does in it, the page must not report errors."""
    yield browser
    assert [entry["message"] for entry in browser.driver.get_log("browser")] == []
    browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.parametrize(("phase", "depth"), [(0, None), (1, None), (0, 1), (0, 2)])
def test_the_first_view_is_that_of_the_other_writers(viewer: Viewer, phase: int, depth: int | None) -> None:
    report = blocks(5, odd=[3])
    viewer.show(report, depth=depth)
    viewer.all("#graphs button")[phase].click()
    graph = drawing(report, depth=depth).graphs[phase]
    boxes = graph.boxes(graph.depth)
    assert set(viewer.boxes()) == set(boxes)
    edges = [(boxes[e.tail], boxes[e.head]) for e in graph.edges if e.casts and not e.repeated]
    drawn = {(e.get_attribute("data-from"), e.get_attribute("data-to")) for e in viewer.all(".edge.cast")}
    assert drawn == {(tail, head) for tail, head in edges if tail != head}


def test_a_module_opens_on_click_shows_equal_blocks_one_by_one_and_closes_on_its_name(viewer: Viewer) -> None:
    viewer.show(blocks(3))
    before = viewer.boxes()
    viewer.named("layers.0").click()
    folded = viewer.boxes()
    assert any("add.Tensor" in text for text in folded.values())
    assert len(folded) > len(before)
    viewer.find(".split").click()
    assert sum("layer_norm" in text for text in viewer.boxes().values()) == 3
    viewer.find(".split").click()
    assert viewer.boxes() == folded
    viewer.find(f".cluster[data-id='c{drawing(blocks(3)).graphs[0].nodes[2].group - 1}'] .title").click()
    assert viewer.boxes() == before


def test_search_counts_marks_and_goes_to_what_it_finds(viewer: Viewer) -> None:
    report = blocks(3)
    nodes = report.plans[0].nodes
    nodes[0] = replace(nodes[0], source="net.py:9 in forward: return self.layers(x)")
    viewer.show(report)
    assert viewer.search("gelu").startswith("3 found")
    assert len(viewer.all(".box.hit")) == 1
    viewer.find("#search").send_keys(Keys.ENTER, Keys.ENTER)
    assert viewer.find("#hits").text == "2 of 3"
    assert "name: gelu_1" in viewer.find("#details").text
    assert viewer.search("nothing like it") == "0 found"
    # modules of that name come before lines that name them
    assert "in net.layers.0" in viewer.search("layers", go=True)


def test_a_click_tells_in_the_panel_what_the_hint_beside_the_pointer_does_not_repeat(viewer: Viewer) -> None:
    viewer.show(blocks(3))
    hint = viewer.hover(viewer.named("head"))
    assert "why: reason of head" in hint
    assert "source" not in hint
    viewer.named("head").click()
    said = "why: reason of head   [low]", "source: net.py:4 in forward", "computes in bfloat16", "64 B"
    assert all(each in viewer.find("#details").text for each in said)
    assert viewer.hover(viewer.named("head")) == ""
    assert "2 casts inside" in viewer.named("layers.0").text
    assert "casts inside: fp32 \N{RIGHTWARDS ARROW} bf16" in viewer.hover(viewer.named("layers.0"))
    label = viewer.all(".edge.cast rect")[-1]
    assert "cast_out: bf16 \N{RIGHTWARDS ARROW} fp32, 96 B" in viewer.hover(label)


def test_the_picture_zooms_and_pans_the_report_opens_and_the_legend_folds(viewer: Viewer) -> None:
    viewer.show(blocks(3))
    fitted = viewer.view_box()
    viewer.find("#in").click()
    closer = viewer.view_box()
    assert closer[2] == pytest.approx(fitted[2] / 1.3)
    picture = viewer.find("#picture")
    ActionChains(viewer.driver).drag_and_drop_by_offset(picture, 60, 30).perform()
    moved = viewer.view_box()
    assert (moved[0] < closer[0], moved[1] < closer[1], moved[2]) == (True, True, closer[2])
    origin = ScrollOrigin.from_element(picture)
    ActionChains(viewer.driver).scroll_from_origin(origin, 0, 100).perform()
    assert viewer.view_box()[2] > moved[2]
    viewer.find("#fit").click()
    assert viewer.view_box() == fitted
    viewer.find("#open-report").click()
    text = viewer.find("#text")
    assert text.is_displayed()
    assert not viewer.run("return arguments[0].scrollWidth > arguments[0].clientWidth + 1", text)
    viewer.find("#close-report").click()
    assert not text.is_displayed()
    assert viewer.find("#legend").is_displayed()
    viewer.find("#key summary").click()
    assert not viewer.find("#legend").is_displayed()


def test_labels_are_text_whatever_they_look_like(viewer: Viewer) -> None:
    viewer.show(nasty())
    viewer.deepest()
    assert viewer.driver.title == f"{NASTY[4]}: cast placement"
    labels = "\n".join(viewer.boxes().values())
    for text in NASTY:
        assert (text if len(text) <= 48 else text[:40]) in labels
    assert f"why: {NASTY[9]}" in viewer.search("onerror", go=True)
    assert len(viewer.all("script")) == 3
    assert viewer.all("img") == []


def test_differences_are_marked_and_written(viewer: Viewer) -> None:
    viewer.show(blocks(3, odd=[1]), blocks(3))
    assert "casts 14 -> 12" in viewer.find("#diff").text
    viewer.search("linear_1", go=True)
    assert "bf16 \N{RIGHTWARDS DOUBLE ARROW} fp32" in viewer.named("up: linearbf16").text
    assert viewer.all(".box.changed")
    assert any("removed" in label.text for label in viewer.all(".edge.cast.removed"))


def test_a_graph_of_5000_nodes_is_searched_and_opened_in_parts(viewer: Viewer) -> None:
    viewer.show(chain(5000))
    assert len(viewer.boxes()) < 200
    viewer.named("nodes 101 to 150").click()
    # nodes are named by their position
    assert "n120" in viewer.boxes()
    assert "name: op_4321" in viewer.search("op_4321", go=True)
    assert len(viewer.boxes()) < 400


def test_the_panel_compares_by_a_sentence_and_bars_and_a_tab_shows_both_side_by_side(viewer: Viewer) -> None:
    viewer.show(compared())
    assert viewer.find("#sentence").text.startswith("3 of 9 cast kernels gone: casts move 600 kB")
    assert "6 cast kernels of 20 casts move 600 kB of 9.7 MB" in viewer.find("#bars").text
    # what is asked first comes first
    places = [viewer.find(name).location["y"] for name in ("#sentence", "#bars", "#dearest", "#key")]
    assert places == sorted(places)
    tab = viewer.all("#graphs button")[-1]
    assert tab.text == "beside autocast"
    tab.click()
    assert not viewer.find("#picture").is_displayed()
    assert "3 of 9 cast kernels gone" in viewer.find("#beside").text
    viewer.all("#graphs button")[0].click()
    assert viewer.find("#picture").is_displayed()
    assert not viewer.find("#beside").is_displayed()
    viewer.show(blocks(2))
    assert [button.text for button in viewer.all("#graphs button")] == ["forward", "backward"]
    viewer.show(Report(title="nothing"))
    assert (viewer.find("#title").text, viewer.boxes()) == ("nothing", {})


def test_the_dearest_casts_lead_to_where_they_are(viewer: Viewer) -> None:
    viewer.show(blocks(12))
    buttons = viewer.all("#dearest button")
    assert 1 < len(buttons) <= 5
    # casts of equal blocks together
    assert buttons[0].text.startswith("1.15 kB in 12 casts")
    buttons[0].click()
    assert viewer.all(".edge.chosen")
    assert "casts on this edge" in viewer.find("#details").text
    middle = viewer.find(".edge.chosen rect").rect
    picture = viewer.find("#picture").rect
    assert picture["x"] < middle["x"] < picture["x"] + picture["width"]
    assert picture["y"] < middle["y"] < picture["y"] + picture["height"]


def test_fused_casts_fade_others_are_as_wide_as_their_bytes_and_tint_closed_modules(viewer: Viewer) -> None:
    report = blocks(2, odd=[1])
    # the casts of activations are fused, those of weights are kernels, one of them large
    for plan in report.plans:
        for at, cast in enumerate(plan.casts):
            is_head = cast.name == "cast_head"
            alone = is_head or cast.name.startswith("castw")
            plan.casts[at] = replace(cast, kernel=alone, bytes=96_000 if is_head else cast.bytes)
    viewer.show(report)
    tinted, plain = viewer.named("layers.0"), viewer.named("layers.1")
    assert "casts inside" in tinted.text
    look = "return getComputedStyle(arguments[0].querySelectorAll('.face')[1]).fill"
    assert viewer.run(look, tinted) != viewer.run(look, plain)
    viewer.deepest()
    widths = viewer.numbers(".edge.cast path", "stroke-width")
    assert max(widths) == pytest.approx(10)
    assert min(widths) < 2
    assert 0 < max(viewer.numbers(".edge.fused path", "opacity")) < 0.6
    # the line must not show through what stands on it
    assert {*viewer.numbers(".edge.fused rect", "opacity")} == {1}


def window(viewer: Viewer, width: int, height: int, scheme: str) -> None:
    """The page in a window of another size, light or dark."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    viewer.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    viewer.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


@pytest.mark.parametrize(
    ("width", "height", "scheme"),
    [(1600, 1100, "light"), (1000, 700, "dark"), (400, 800, "light"), (400, 800, "dark")],
)
def test_windows_show_sentence_and_picture(viewer: Viewer, width: int, height: int, scheme: str) -> None:
    window(viewer, width, height, scheme)
    viewer.show(compared())
    sentence, picture = viewer.find("#sentence").rect, viewer.find("#picture").rect
    assert all(0 <= box["x"] <= width - box["width"] for box in (sentence, picture))
    assert sentence["y"] < height
    assert picture["y"] < height / 2
    assert picture["height"] > 0.5 * height
    assert not viewer.run("return document.documentElement.scrollWidth > innerWidth")
    image = Image.open(BytesIO(viewer.driver.get_screenshot_as_png())).convert("RGB")
    # most of a page is paper
    paper = sorted(image.convert("L").resize((60, 60)).tobytes())[1800]
    assert paper > 200 if scheme == "light" else paper < 60
    counts = {colour: count for count, colour in image.getcolors(maxcolors=1 << 20) or []}
    for name in ("float32", "lower"):
        assert counts.get(ImageColor.getrgb(COLOURS[name][scheme == "dark"]), 0) > 50, name


#: the open modules of a name: where they are on the screen
FRAMES = """
  const frames = [...document.querySelectorAll('#scene > .frame')];
  return [...document.querySelectorAll('#scene > .cluster')].map((title, index) => [title.textContent, frames[index]])
    .filter(([title]) => title.includes(arguments[0])).map(([, frame]) => frame.getBoundingClientRect().toJSON());
"""


@pytest.mark.parametrize(("phase", "width"), [(0, 1280), (1, 400)])
def test_modules_stand_below_each_other_and_can_be_read(viewer: Viewer, phase: int, width: int) -> None:
    window(viewer, width, 900, "light")
    viewer.show(blocks(4))
    viewer.all("#graphs button")[phase].click()
    viewer.deepest()
    viewer.find(".split").click()
    viewer.find("#fit").click()
    frames = sorted(viewer.run(FRAMES, "layers."), key=lambda frame: frame["top"])
    assert len(frames) == 4
    assert all(above["bottom"] < below["top"] for above, below in itertools.pairwise(frames))
    middles = [(frame["left"] + frame["right"]) / 2 for frame in frames]
    assert max(middles) - min(middles) < min(frame["width"] for frame in frames)
    picture = viewer.find("#picture").rect
    assert min(frame["left"] for frame in frames) > picture["x"]
    assert max(frame["right"] for frame in frames) < picture["x"] + picture["width"]
    assert min(text.rect["height"] for text in viewer.all(".box text.name")) > 8
