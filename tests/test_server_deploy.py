"""What is shipped for running a server: files that can be read, and only metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dsde.server.settings import ServerSettings
from served import serving_beside, tiny_llm

DEPLOY = Path(__file__).parent.parent / "deploy"
METRIC = re.compile(r"\b((?:dsde|spec_decode)_\w+)")


def read_yaml(name: str) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((DEPLOY / name).read_text())


def test_the_grafana_dashboard_knows_only_metrics_there_are(tmp_path: Path) -> None:
    dashboard = json.loads((DEPLOY / "grafana/dashboards/dsde.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    used = {name for panel in panels for target in panel["targets"] for name in METRIC.findall(target["expr"])}
    assert len(used) > 15
    assert all(panel["description"] for panel in panels)
    with serving_beside(tiny_llm(tmp_path), policy="dsde|gate") as served:
        served.post("/v1/completions", prompt="Once upon a time", max_tokens=16)
        page = served.http.get("/metrics").text
    there = {re.split(r"[{ ]", line)[0] for line in page.splitlines() if not line.startswith("#")}
    assert used <= there


def test_compose_names_files_there_are_and_waits_for_the_drain() -> None:
    compose = read_yaml("compose.yaml")
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).exists(), source
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert (DEPLOY.parent / compose["services"]["dsde"]["build"]["dockerfile"]).is_file()
    assert int(compose["services"]["dsde"]["stop_grace_period"].removesuffix("s")) > ServerSettings.drain_timeout_s
    [job] = read_yaml("prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["dsde:8000"]}]
    assert read_yaml("grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]["uid"] == "prometheus"


def test_the_dockerfile_copies_what_is_not_ignored() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            for name in line.split()[1:-1]:
                assert f"!{name}" in ignored
                assert (DEPLOY.parent / name).exists()
