"""``streamrl report`` at the command line: where the page goes, what a mistake says, samples of a run of the local pipeline."""

import asyncio
import os
import stat
import time
from pathlib import Path

import pytest

from streamrl.cli.main import main
from streamrl.cli.report_samples import read_samples
from streamrl.config import Config
from streamrl.config.load import dump
from streamrl.pipeline.local import LocalPipeline
from streamrl.pipeline.records import StepRecord
from streamrl.telemetry.recorder import RecordingFiles
from streamrl.telemetry.run_folder import RunFolder
from streamrl.telemetry.scrape import merge
from streamrl.telemetry.steps import StepLog
from streamrl.telemetry.targets import Target
from tests.pipeline.tiny import tiny_config
from tests.report import made_up
from tests.report.browser import CHROMIUM, WHY_NOT, Look, open_pages


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    """Two steps of the local pipeline: real records, real samples, and the pages of its actors recorded when a step has ended."""
    config = tiny_config("data.val_max_samples=4", "cluster.env={KEY: hidden-value}", prompts=2, n=3, steps=2)
    root = tmp_path_factory.mktemp("runs") / "run"
    with RunFolder.create(root, dump(config)) as folder:
        asyncio.run(_run_and_record(config, folder))
    return folder


async def _run_and_record(config: Config, folder: RunFolder) -> None:
    log, files = StepLog(folder.steps), RecordingFiles(folder.metrics, 1 << 20)

    def scrape() -> None:
        pages = {Target(metrics.role, name, "", 0): metrics.page().decode() for name, metrics in pipeline.pages.items()}
        files.append(merge(folder.run_id, pages), time.time())

    def record(step: StepRecord) -> None:
        log.append(step)
        scrape()

    pipeline = LocalPipeline(config, folder.root, record=record)
    try:
        await pipeline.run()
    finally:
        await pipeline.close()
        scrape()
        files.close()
        log.close()


def said(capsys, *words: object) -> tuple[int, str, str]:
    code = main(["report", *map(str, words)])
    return code, *capsys.readouterr()


def test_the_page_lies_in_the_run_folder_or_where_o_says(run, tmp_path, capsys):
    code, out, _ = said(capsys, run.root)
    assert code == 0 and out.startswith(f"{run.root}/report.html (")
    page = (run.root / "report.html").read_text()
    assert "Learning, step by step" in page and "hidden-value" not in page
    assert stat.S_IMODE(os.stat(run.root / "report.html").st_mode) == 0o644
    assert said(capsys, run.root, "-o", tmp_path / "a b ü.html")[0] == 0
    assert (tmp_path / "a b ü.html").stat().st_size > 50_000


@pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)
def test_the_page_of_a_real_run_is_drawn_without_a_fault(run, tmp_path, capsys):
    assert said(capsys, run.root, "-o", tmp_path / "real.html")[0] == 0
    (page,) = open_pages(Look(tmp_path / "real.html"))
    assert (page.console, page.requests) == ([], [])
    assert len(page.charts) > 50
    assert [chart["title"] for chart in page.charts if chart["colours"] < 2 or not chart["legend"] or chart["wide"] > 0] == []


def test_samples_are_the_rows_of_the_newest_steps_with_their_tokens_by_mask(run):
    samples = read_samples(run, 4)
    assert [one.step for one in samples.trajectories] == [2, 2, 2, 1]
    for one in samples.trajectories:
        assert one.spans[0].role == "prompt" and {span.role for span in one.spans[1:]} == {"model"} and one.reward is not None
        assert one.spans[1].num_tokens > 0 and one.spans[1].versions
    assert read_samples(run, 0).trajectories == []


def test_a_sample_that_is_damaged_or_a_tokenizer_that_is_gone_costs_the_text_only(run, tmp_path):
    config = run.config.read_text()
    copy = RunFolder(tmp_path / "copy")
    copy.samples.mkdir(parents=True)
    copy.config.write_text(config.replace("assets/tiny/model", "assets/tiny/gone"))
    for path in run.samples.iterdir():
        (copy.samples / path.name).write_bytes(path.read_bytes() if "2" in path.name else b"no sample")
    samples = read_samples(copy, 9)
    assert len(samples.trajectories) == 3 and samples.trajectories[0].spans[0].text.replace(" ", "").isdigit()
    assert "step 1 is left out" in samples.note and "instead of text" in samples.note


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["{tmp}"], "a run folder holds config.yaml"),
        (["{tmp}/nowhere"], "a run folder holds config.yaml"),
        (["{run}", "-o", "{tmp}/no/such/folder/x.html"], "the page is written to a file in a folder that exists"),
        (["{run}", "-o", "{tmp}"], "the page is written to a file"),
        (["{bare}", "--openmetrics", "-"], "--openmetrics writes the run's recording, got none"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, tmp_path, capsys, words, rule):
    RunFolder.create(tmp_path / "bare", "run: {}\n").close()
    code, _, err = said(capsys, *(word.format(tmp=tmp_path, run=run.root, bare=tmp_path / "bare") for word in words))
    assert code == 2 and rule in err and err.count("\n") == 1


def test_a_page_can_be_written_to_a_device_and_leaves_it_a_device(run, capsys):
    assert said(capsys, run.root, "-o", "/dev/null", "--samples", "0")[0] == 0
    assert not Path("/dev/null").is_file()


def test_the_recording_is_written_as_openmetrics(tmp_path, capsys):
    folder = made_up.run_folder(tmp_path / "run", scrapes=2)
    code, out, _ = said(capsys, folder.root, "--openmetrics", "-")
    assert code == 0 and out.endswith("# EOF\n") and "streamrl_learner_steps_total{" in out
    assert said(capsys, folder.root, "--openmetrics", tmp_path / "all.txt")[0] == 0
    assert (tmp_path / "all.txt").read_text() == out
    assert said(capsys, folder.root, "--openmetrics", tmp_path)[0] == 2
