"""A browser clicks through MLflow's pages of three runs: charts, images, tables, comparison, models, registry."""

import re
import shutil

import pytest

from pretrain import huggingface
from pretrain.checkpoint.directory import newest
from pretrain.checkpoint.trained import TrainedModel
from pretrain.evaluation import norms, record
from pretrain.evaluation.hook import Findings
from pretrain.tracking.checkpoints import Registration
from pretrain.tracking.mlflow_store import TrackedRun
from pretrain.tracking.tracker import sync
from tests.ports import free_port
from tests.pretrain.mlflow_server import Server

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
NAMES = ("adamw", "adafactor", "muon")
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --window-size=1500,900"
SECONDS = 60
NORMS = [
    {"step": step, "layer": layer, "weight": 30.0, "gradient": 2.0 / step, "update_to_weight": 1e-3, "activation": None}
    for step in range(2, 13, 2)
    for layer in ("embedding", "encoder.layers.0", "decoder.layers.0", "lm_head")
]

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium and chromedriver here (apt-get install chromium chromium-driver)"
)


@pytest.fixture(scope="module")
def server(whole, empty_mlflow, tmp_path_factory):
    """MLflow with three runs below a parent; one has an image, a table and a registered model."""
    folder = tmp_path_factory.mktemp("pages")
    uri = empty_mlflow(folder)
    for name in NAMES:
        run_dir = folder / name
        shutil.copytree(whole / name / "run", run_dir)
        run = TrackedRun.load(run_dir)
        run.experiment = run.parent = "optimizers"
        run.save(run_dir)
        if name == NAMES[0]:
            for step in (6, 12):
                figure = norms.norms_figure([row for row in NORMS if row["step"] <= step])
                rows = [{"given": "The <extra_id_0> sat.", "written": f"The [cat {step}] sat."}]
                record.keep(
                    record.directory(run_dir), step, Findings(tables={"samples": rows}, images={"norms": figure})
                )
        sync(run_dir, uri)
    trained = TrainedModel.open(newest(run_dir))
    huggingface.export(trained.model.state_dict(), trained.model.config, trained.tokenizer, folder / "out")
    Registration.of(newest(run_dir), "best-t5").register(folder / "out")
    started = Server(folder, free_port())
    yield started
    started.kill()


@pytest.fixture
def browser():
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS.split():
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


class Pages:
    def __init__(self, browser):
        self._browser = browser

    def see(self, *texts):
        """Waits until the page shows all of these texts."""
        for text in texts:
            self._wait(lambda text=text: text in self._browser.find_element("tag name", "body").text, text)

    def click(self, path):
        """Clicks the first element of an XPath that can be clicked; a bare text names a link, button or tab."""
        from selenium.common.exceptions import WebDriverException

        if not path.startswith("/"):
            path = f"//*[self::a or self::button or @role='tab'][normalize-space()='{path}']"

        def clicked():
            for element in self._browser.find_elements("xpath", path):
                try:
                    element.click()
                    return True
                except WebDriverException:  # below another one, or redrawn meanwhile
                    continue
            return False

        self._wait(clicked, path)

    def move_on(self, slider):
        self.count(slider, 1)
        self._browser.find_element("xpath", slider).send_keys("\ue014")  # the right arrow

    def count(self, path, number):
        self._wait(lambda: len(self._browser.find_elements("xpath", path)) >= number, f"{number} × {path}")

    def _wait(self, condition, what):
        from selenium.common.exceptions import TimeoutException, WebDriverException
        from selenium.webdriver.support.ui import WebDriverWait

        try:
            wait = WebDriverWait(self._browser, SECONDS, poll_frequency=0.5, ignored_exceptions=[WebDriverException])
            wait.until(lambda _: condition())
        except TimeoutException:
            page = self._browser.find_element("tag name", "body").text
            raise AssertionError(f"{what}: not on {self._browser.current_url}:\n{page}") from None


@pytest.mark.soak
def test_a_browser_clicks_through_the_pages_of_three_runs(server, browser):
    pages = Pages(browser)
    browser.get(f"{server.uri}/#/experiments/1/runs?workflowType=machine_learning")
    pages.see("optimizers", "4 matching runs")
    pages.click("//button[contains(@data-component-id, 'assistant.chat_panel.close')]")
    pages.click("//button[contains(@data-component-id, 'runnamecellrenderer')]")  # the parent's runs
    pages.see(*NAMES)

    pages.click(NAMES[0])
    pages.see("Parent run", "pretrain train", "Train")
    pages.click("Model metrics")
    pages.see("pictures/norms")
    pages.count("//*[contains(@class, 'js-plotly-plot')]", 1)
    sections = re.findall(r"^(\w+)\n\(\d+\)$", browser.find_element("tag name", "body").text, re.MULTILINE)
    assert sections == ["loss", "pictures", "train", "usage"]
    pages.move_on("//*[@role='slider']")  # to the first step that has an image
    pages.count("//img[contains(@src, 'norms') or starts-with(@src, 'blob:')]", 1)
    pages.click("Artifacts")
    pages.click("//*[normalize-space()='evaluation']")
    pages.click("//*[normalize-space()='samples.json']")
    pages.see("The [cat 12] sat.")

    pages.click("Runs")
    pages.see("4 matching runs")
    if NAMES[0] not in browser.find_element("tag name", "body").text:
        pages.click("//button[contains(@data-component-id, 'runnamecellrenderer')]")
    pages.see(*NAMES)
    for row in (1, 2, 3):
        pages.click(f"//div[@role='row' and @row-index='{row}']//input[@type='checkbox']")
    pages.click("Compare")
    pages.see("Comparing 3 Runs", "optimizer.name")

    browser.get(f"{server.uri}/#/experiments/1/models?workflowType=machine_learning")
    pages.see(*(f"{name}-step-00000012" for name in NAMES), "best-t5")
    pages.click("Model registry")
    pages.click("Try it now")  # closes what MLflow says to those who come for the first time
    pages.click("best-t5")
    pages.see("Version 1")
