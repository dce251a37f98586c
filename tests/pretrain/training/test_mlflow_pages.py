"""The pages that the real MLflow shows of a run, also in a browser."""

import re
import shutil
import uuid

import matplotlib.figure
import mlflow
import pytest

from pretrain.evaluate import record
from pretrain.evaluate.hook import EvalResult
from pretrain.run.metrics_file import read_metrics
from pretrain.training.tracking.mlflow_store import FeedState, TrackedRun
from pretrain.training.tracking.tracker import Tracker, sync
from tests.support.mlflow_server import Server
from tests.support.ports import free_port


@pytest.fixture
def client(uri):
    mlflow.set_tracking_uri(uri)
    return mlflow.MlflowClient(tracking_uri=uri)


@pytest.fixture
def run_dir(whole, tmp_path):
    """A copy of a finished run with four checkpoints, which MLflow doesn't have yet."""
    shutil.copytree(whole / "adamw/run", tmp_path / "run")
    run = TrackedRun.load(tmp_path / "run")
    run.key, run.experiment = uuid.uuid4().hex, tmp_path.name
    run.save(tmp_path / "run")
    return tmp_path / "run"


def test_feeding_a_run_again_changes_nothing(run_dir, uri, client):
    sync(run_dir, uri)
    state = FeedState.load(run_dir)
    curve = [(one.step, one.value) for one in client.get_metric_history(state.run_id, "train/loss")]
    assert curve == [(row.step, row.metrics["train/loss"]) for row in read_metrics(run_dir)]
    (run_dir / "mlflow.json").unlink()  # as after a kill before it was written
    sync(run_dir, uri)
    assert FeedState.load(run_dir).run_id == state.run_id
    assert [(one.step, one.value) for one in client.get_metric_history(state.run_id, "train/loss")] == curve


def test_tables_are_what_mlflow_itself_would_log_and_pictures_are_artifacts(tmp_path, uri, client):
    figure = matplotlib.figure.Figure(figsize=(2, 1))
    figure.add_subplot().plot([1, 2])
    rows = [{"given": "a <extra_id_0>", "written": "a b"}, {"given": "c", "written": None}]
    with Tracker(tmp_path, TrackedRun("pages", "r", attempt=1), None):
        record.keep(
            record.directory(tmp_path), 5, EvalResult(tables={"samples": rows}, images={"attention/layer-1": figure})
        )
        record.keep(record.directory(tmp_path), 10, EvalResult(tables={"samples": rows}))
    sync(tmp_path, uri)
    state = FeedState.load(tmp_path)
    table = client.load_table(state.experiment_id, "evaluation/samples.json", [state.run_id])
    assert list(table["step"]) == [5, 5, 10, 10]
    assert list(table["given"]) == ["a <extra_id_0>", "c"] * 2
    folder = "evaluation/attention/layer-1"
    assert [file.path for file in client.list_artifacts(state.run_id, folder)] == [f"{folder}/step-00000005.png"]


# ---- a browser clicks through the pages of three runs


CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
NAMES = ("adamw", "adafactor", "muon")
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --window-size=1500,900"
SECONDS = 60


@pytest.fixture(scope="module")
def server(whole, empty_mlflow, tmp_path_factory):
    """MLflow with three runs; one has a picture and a table."""
    folder = tmp_path_factory.mktemp("pages")
    uri = empty_mlflow(folder)
    for name in NAMES:
        run_dir = folder / name
        shutil.copytree(whole / name / "run", run_dir)
        run = TrackedRun.load(run_dir)
        run.experiment = "optimizers"
        run.save(run_dir)
        if name == NAMES[0]:
            for step in (6, 12):
                rows = [{"given": "The <extra_id_0> sat.", "written": f"The [cat {step}] sat."}]
                found = EvalResult(tables={"samples": rows}, images={"norms": matplotlib.figure.Figure()})
                record.keep(record.directory(run_dir), step, found)
        sync(run_dir, uri)
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

    def scroll_to(self, text):
        """Scrolls to the section with this heading: MLflow draws the charts that can be seen."""

        def scrolled():
            *_, heading = self._browser.find_elements("xpath", f"//*[normalize-space()='{text}']")
            self._browser.execute_script("arguments[0].scrollIntoView()", heading)
            return True

        self._wait(scrolled, text)

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


@pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium and chromedriver here (apt-get install chromium chromium-driver)"
)
@pytest.mark.soak
def test_a_browser_clicks_through_the_pages_of_three_runs(server, browser):
    pages = Pages(browser)
    browser.get(f"{server.uri}/#/experiments/1/runs?workflowType=machine_learning")
    pages.see("optimizers", "3 matching runs")
    pages.click("//button[contains(@data-component-id, 'assistant.chat_panel.close')]")
    pages.see(*NAMES)

    pages.click(NAMES[0])
    pages.see("pretrain train")
    pages.click("Model metrics")
    pages.see("checkpoint", "train")
    pages.scroll_to("train")
    pages.count("//*[contains(@class, 'js-plotly-plot')]", 1)
    sections = re.findall(r"^(\w+)\n\(\d+\)$", browser.find_element("tag name", "body").text, re.MULTILINE)
    assert sections == ["checkpoint", "train"]
    pages.click("Artifacts")
    pages.click("//*[normalize-space()='evaluation']")
    pages.click("//*[normalize-space()='samples.json']")
    pages.see("The [cat 12] sat.")
    pages.click("//*[normalize-space()='norms']")
    pages.click("//*[normalize-space()='step-00000012.png']")
    pages.count("//img[contains(@src, 'norms') or starts-with(@src, 'blob:')]", 1)

    browser.get(f"{server.uri}/#/experiments/1/runs?workflowType=machine_learning")
    pages.see("3 matching runs", *NAMES)
    for row in (0, 1, 2):
        pages.click(f"//div[@role='row' and @row-index='{row}']//input[@type='checkbox']")
    pages.click("Compare")
    pages.see("Comparing 3 Runs", "optimizer.name")
