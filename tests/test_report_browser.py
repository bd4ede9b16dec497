"""A report in a real browser: no error, no request, no sideways scrolling, every table readable."""

import shutil

import pytest

from ghostlayers.cli import main
from report_samples import write_comparison

pytest.importorskip("plotly", reason="pip install 'ghostlayers[report]'")
playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no browser: apt-get install chromium"),
]
# name: width, height, colour scheme
SCREENS = {
    "desktop": (1280, 900, "light"),
    "dark": (1280, 900, "dark"),
    "phone": (360, 780, "light"),
}
PLOTS = "[...document.querySelectorAll('.plot')]"
DRAWINGS = "[...document.querySelectorAll('.plot svg.main-svg')]"
TABLES = "[...document.querySelectorAll('table')]"
CONTRAST = """() => {
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(channel);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const page = light(getComputedStyle(document.body).backgroundColor);
  return [...document.querySelectorAll("h1, .lead, .legend li, .plot .xtick text")].map((item) => {
    const style = getComputedStyle(item);
    const ink = light(item.closest("svg") ? style.fill : style.color);
    return (Math.max(ink, page) + 0.05) / (Math.min(ink, page) + 0.05);
  });
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    grid = write_comparison(folder / "grid", model="a <b>model</b>", calibrations=(("c4", 8),))
    assert main(["report", str(grid), "-o", str(folder / "report.html")]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


SCROLL = """async () => {
  const step = window.innerHeight;
  for (let y = 0; y < document.documentElement.scrollHeight; y += step) {
    window.scrollTo({ top: y, behavior: "instant" });
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 60)));
  }
}"""
COUNT = "Number(document.documentElement.dataset.drawn)"
DRAWN = f"{PLOTS}.map(p => !!p.querySelector('svg.main-svg'))"
NUM_PLOTS = 17


def wait_until(page, expression):
    """Wait up to 10 s. Playwright's own wait needs `eval`, which the page's policy forbids."""
    for _ in range(200):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {expression}")


def opened(browser, report, screen, script=None, scroll=True):
    width, height, scheme = SCREENS[screen]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    if script is not None:
        page.add_init_script(script)
    said, asked = [], []
    page.on("console", lambda message: said.append((message.type, message.text)))
    page.on("pageerror", lambda error: said.append(("error", str(error))))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    if scroll:
        for _ in range(10):  # a busy machine scrolls past plots before they are drawn
            page.evaluate(SCROLL)
            if page.evaluate(COUNT) == NUM_PLOTS:
                break
        wait_until(page, f"{COUNT} === {NUM_PLOTS}")
    return page, said, asked


@pytest.mark.parametrize("screen", SCREENS)
def test_a_page_draws_without_errors_requests_or_overflow(browser, report, screen):
    page, said, asked = opened(browser, report, screen)
    assert said == []
    assert asked == [report.as_uri()]
    drawn = page.evaluate(DRAWN)
    assert len(drawn) == NUM_PLOTS and all(drawn)
    width = SCREENS[screen][0]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.evaluate(f"{DRAWINGS}.map(drawing => drawing.getBoundingClientRect().right)")
    assert max(boxes) <= width
    assert min(page.evaluate(CONTRAST)) >= 4.5
    page.close()


def test_tables_open_and_hold_their_text(browser, report):
    page, _, _ = opened(browser, report, "phone")
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    text = page.inner_text("main")
    for expected in (
        "a <b>model</b>",
        "24.70 ± 0.99",
        "streamline + ghost-robust",
        "GPT-2 has no such map.",
        "transformers",
        "ids sha256",
    ):
        assert expected in text
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    hidden = page.evaluate(
        "[...document.querySelectorAll('table')].filter(t => !t.offsetHeight).length"
    )
    assert hidden == 0
    page.close()


def test_a_change_of_colour_scheme_paints_the_plots_again(browser, report):
    page, said, _ = opened(browser, report, "desktop")
    before = min(page.evaluate(CONTRAST))
    page.emulate_media(color_scheme="dark")
    wait_until(page, f"Math.min(...({CONTRAST})()) >= 4.5")  # the page is told later
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(19, 21, 23)"
    assert min(before, *page.evaluate(CONTRAST)) >= 4.5 and said == []
    page.close()


def test_a_plot_is_drawn_when_it_comes_near(browser, report):
    page, said, _ = opened(browser, report, "phone", scroll=False)
    wait_until(page, f"{COUNT} > 0")
    drawn = page.evaluate(DRAWN)
    assert drawn[0] and not drawn[-1] and drawn == sorted(drawn, reverse=True)
    height = page.evaluate("document.documentElement.scrollHeight")
    page.evaluate(f"{PLOTS}.at(-1).scrollIntoView({{ behavior: 'instant' }})")
    wait_until(page, f"{DRAWN}.at(-1)")
    assert not all(page.evaluate(DRAWN))  # those between were never near
    assert page.evaluate("document.documentElement.scrollHeight") == height
    assert said == []
    page.close()


def test_a_browser_without_observer_draws_all(browser, report):
    without = "delete window.IntersectionObserver;"
    page, said, _ = opened(browser, report, "phone", without, scroll=False)
    assert page.evaluate("'IntersectionObserver' in window") is False
    assert page.evaluate(COUNT) == NUM_PLOTS and all(page.evaluate(DRAWN))
    assert said == []
    page.close()


def test_printing_draws_what_was_never_near(browser, report):
    page, said, _ = opened(browser, report, "dark", scroll=False)
    assert not all(page.evaluate(DRAWN))
    page.pdf(format="A4")
    assert all(page.evaluate(DRAWN)) and said == []
    assert page.evaluate("document.documentElement.className") == ""
    page.close()


def test_a_printed_page_fits_and_opens_short_tables(browser, report):
    page, said, _ = opened(browser, report, "dark")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print", color_scheme="dark")
    widest = max(page.evaluate(f"{DRAWINGS}.map(drawing => drawing.clientWidth)"))
    assert 300 < widest <= 680
    assert page.evaluate("document.querySelectorAll('details[open]').length") > 5
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert len(page.pdf(format="A4")) > 50_000
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.querySelectorAll('details[open]').length") == 0
    assert said == []
    page.close()
