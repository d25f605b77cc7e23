"""`dsde bench`, `dsde plot` and `dsde trace` as a person uses them, on a real, tiny pair."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dsde import cli
from dsde.bench import bench as bench_module
from dsde.bench.presets import PRESETS
from dsde.bench.results import load_results
from tiny_pair import write_pair

FEW = ["--requests", "2", "--rounds", "2", "--max-tokens", "12", "--peers", "none"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    return ["--target", str(target), "--draft", str(draft)]


@pytest.fixture(scope="module")
def out(pair: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, for tests that only look."""
    out = tmp_path_factory.mktemp("bench")
    arguments = ["--policies", "off,static:2,dsde", "--batch-sizes", "1,2", *FEW, *pair, "--out", str(out)]
    assert cli.run(["bench", *arguments]) == 0
    return out


class Page(HTMLParser):
    """Which tags are open at the end, and what a page would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and value and not value.startswith("#"):
                self.fetched.append(value)
            if name == "id" and value:
                self.ids.append(value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_run_writes_everything(out: Path) -> None:
    results = json.loads((out / "results.json").read_text())
    assert results["schema"] == 1
    assert results["finished"]
    assert len(results["summary"]) == 2 * 3
    assert {"processor", "torch", "python"} <= set(results["machine"])
    for name in ("speedup", "throughput", "request", "lengths", "waste"):
        assert ElementTree.parse(out / "plots" / f"{name}.svg").getroot().tag.endswith("svg")
    text = (out / "report.md").read_text()
    for words in ("Lossless: all 12 texts", "vs static:2", "TTFT p99 ms", "TPOT p50 ms", "wasted", "draft passes"):
        assert words in text


def test_the_page_needs_nothing_else(out: Path) -> None:
    text = (out / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.fetched == []
    assert len(set(page.ids)) == len(page.ids)
    assert not re.search(r"https?://(?!www\.w3\.org)", re.sub(r'xmlns(:\w+)?="[^"]*"', "", text))
    assert text.count("<figure>") == 5
    for styled in ("prefers-color-scheme: dark", "@media print", 'name="viewport"', "var(--ink)"):
        assert styled in text
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))
    assert used <= set(page.ids)


def test_the_same_command_measures_nothing_twice(
    out: Path, pair: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (out / "results.json").read_text()
    monkeypatch.setattr(bench_module.Bench, "run", lambda self: pytest.fail("nothing is left to measure"))
    arguments = ["--policies", "off,static:2,dsde", "--batch-sizes", "1,2", *FEW, *pair, "--out", str(out)]
    assert cli.run(["bench", *arguments]) == 0
    assert (out / "results.json").read_text() == before
    assert "tokens/s" in capsys.readouterr().out


def test_prompts_of_a_file_are_asked(pair: list[str], tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    rows = [{"category": "qa", "turns": ["Why?"]}, {"category": "rag", "turns": ["Where?"]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    arguments = ["--workload", str(path), "--policies", "off,static:2", *FEW, *pair, "--out", str(out)]
    assert cli.run(["bench", *arguments]) == 0
    assert load_results(out / "results.json").cells[0].kinds == ["qa", "rag"]
    assert "Speed: questions, batch 1, temperature 0" in (out / "report.md").read_text()


def test_results_of_another_command_are_not_overwritten(
    out: Path, pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (out / "results.json").read_text()
    assert cli.run(["bench", "--policies", "off,static:3", *FEW, *pair, "--out", str(out)]) == 2
    assert "differs in policies, batch sizes): choose another --out, or --fresh" in capsys.readouterr().err
    assert (out / "results.json").read_text() == before


def test_an_interruption_keeps_what_is_done(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save, saved = bench_module.Bench._save, []

    def save_and_stop(self: bench_module.Bench) -> None:
        save(self)
        saved.append(1)
        if len(saved) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(bench_module.Bench, "_save", save_and_stop)
    command = ["bench", "--policies", "off,static:2", *FEW, *pair, "--out", str(tmp_path)]
    assert cli.run(command) == 130
    captured = capsys.readouterr()
    assert "the same command goes on from there" in captured.out
    assert "Traceback" not in captured.err
    assert "This run was interrupted" in (tmp_path / "report.html").read_text()
    assert load_results(tmp_path / "results.json").cells[0].num_rounds == 1
    assert cli.run(command) == 0
    results = load_results(tmp_path / "results.json")
    assert results.finished
    assert results.cells[0].num_rounds == 2
    assert "interrupted" not in (tmp_path / "report.html").read_text()


def test_a_run_that_is_not_lossless_fails(
    out: Path, tmp_path: Path, pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((out / "results.json").read_text())
    content["cells"][0]["contenders"]["dsde"]["differences"] = [{"request": 0, "position": 3, "gap": 1.5}]
    (tmp_path / "results.json").write_text(json.dumps(content))
    arguments = ["--policies", "off,static:2,dsde", "--batch-sizes", "1,2", *FEW, *pair, "--out", str(tmp_path)]
    assert cli.run(["bench", *arguments]) == 1
    assert "NOT LOSSLESS" in capsys.readouterr().err
    assert "NOT LOSSLESS" in (tmp_path / "report.html").read_text()


def test_plots_are_drawn_again_without_models(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plot", str(out / "results.json"), "--out", str(tmp_path), "--format", "png"]) == 0
    printed = capsys.readouterr().out
    for name in ("speedup", "throughput", "request", "lengths", "waste"):
        assert (tmp_path / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"{name}.png" in printed
    assert (tmp_path / "report.md").read_text() == (out / "report.md").read_text()
    assert (tmp_path / "report.html").read_text() == (out / "report.html").read_text()


def test_without_matplotlib_there_is_a_report_and_a_sentence(
    out: Path, tmp_path: Path, pair: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results.json").write_text((out / "results.json").read_text())
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ["--policies", "off,static:2,dsde", "--batch-sizes", "1,2", *FEW, *pair, "--out", str(tmp_path)]
    assert cli.run(["bench", *arguments]) == 0
    assert "Plots need matplotlib" in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    assert "Plots need matplotlib" in page
    assert "<figure>" not in page
    assert cli.run(["plot", str(tmp_path / "results.json")]) == 1
    assert "pip install 'dsde[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_prints_its_table_beside_the_paper(
    name: str, pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smaller = {
        "latency": ["--workload", "code,chat", "--policies", "off,static:2,static:4,adaedl,dsde"],
        "low-acceptance": ["--policies", "off,static:2,adaedl,dsde"],
        "scaling": ["--batch-sizes", "1,2", "--policies", "off,dsde:cap=off,dsde"],
        "sensitivity": ["--policies", "off,dsde,dsde:decay=0.7,adaedl,adaedl:gamma=0.4"],
        "signals": ["--max-tokens", "40"],
    }[name]
    draft = [] if name == "low-acceptance" else pair[2:]
    skipped = ["--draft", "skip:1-1"] if name == "low-acceptance" else draft
    few = ["--requests", "2", "--rounds", "1", "--max-tokens", "8"]
    arguments = ["bench", "--preset", name, *few, *smaller, *pair[:2], *skipped, "--out", str(tmp_path)]
    assert cli.run(arguments) == 0
    text = (tmp_path / "report.md").read_text()
    expected = {
        "latency": ("38.41 s", "13.97 s", "22 h", "paper, of best static", "104%", "19.19 s", "search for static"),
        "low-acceptance": ("234%", "180%", "Gemma-27B"),
        "scaling": ("11.21x", "12.16x", "paper, 64 over 1"),
        "sensitivity": ("dsde:decay=0.7", "adaedl:gamma=0.4", "vs adaedl"),
        "signals": ("-0.339", "-0.164", "+0.128", "steps at T 1"),
    }[name]
    for words in expected:
        assert words in text, words
    assert ("2509.01083" in text) == (name != "sensitivity")
    assert load_results(tmp_path / "results.json").setting.preset == name


def test_a_preset_about_static_lengths_needs_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "--preset", "latency", "--policies", "off,dsde"]) == 2
    assert "policies must hold one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "fastest"], "unknown policy 'fastest'"),
        (["--workload", "poems"], "workload must be mixed, code"),
        (["--batch-sizes", "1,x"], "batch sizes must be numbers between commas"),
        (["--batch-sizes", "0"], "a batch size must be at least 1"),
        (["--temperature", "hot"], "temperature must be numbers"),
        (["--requests", "0"], "num requests must be at least 1"),
        (["--arrival", "never"], "arrival must be closed or poisson:RATE"),
        (["--preset", "paper"], "preset must be one of latency, low-acceptance"),
        (["--peers", "llama.cpp"], "peers must be auto, none or some of transformers, vllm"),
        (["--peers", "vllm"], "vllm is not installed"),
        (["--out", "/proc/nowhere"], "the report cannot be written to /proc/nowhere"),
    ],
)
def test_wrong_use_is_one_sentence(
    arguments: list[str], message: str, pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", "--out", str(tmp_path), "--peers", "none", *FEW, *pair, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert "Traceback" not in error


@pytest.mark.parametrize("name", ["picture.svg", "picture.png"])
def test_a_trace_is_shown_and_drawn(
    name: str, pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / name
    arguments = ["trace", "Why?", *pair, "--max-tokens", "24", "--steps", "--out", str(picture)]
    assert cli.run(arguments) == 0
    text = capsys.readouterr().out
    for words in (
        "drafted, accepted",
        "drafted, rejected",
        "the target's own",
        "mean KLD",
        "24 tokens in",
        "policy auto",
    ):
        assert words in text
    if name.endswith("svg"):
        assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trace", ""], "The prompt is empty"),
        (["trace", "hi", "--out", "picture.gif"], "a picture is .svg or .png"),
        (["trace", "hi", "--out", "/no/such/folder/a.svg"], "cannot be written"),
        (["trace", "hi", "--policy", "fastest"], "unknown policy"),
        (["plot", "/no/such/results.json"], "cannot be read"),
        (["plot", "x.json", "--format", "gif"], "format must be svg or png"),
    ],
)
def test_wrong_use_of_trace_and_plot(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 2
    assert message in capsys.readouterr().err
