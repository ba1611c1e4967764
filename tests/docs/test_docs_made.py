"""Tests that the pages which `make docs` makes are current, and that the code cannot leave docs/from-vllm.md behind."""

import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from docs import from_vllm, generate
from quire.llm import LLM
from quire.settings import public_knobs
from services.gateway import unsupported_fields
from services.gateway.app import make_routes
from services.gateway.config import GatewayConfig
from services.gateway.openapi import Route
from shared import metrics, vllm_params

TABLES = from_vllm.tables()


@pytest.mark.parametrize("page", generate.pages(), ids=lambda page: page.name)
def test_a_page_is_current(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == generate.pages()[page], "run `make docs`"


def changed() -> list[str]:
    """Return the names of the tables that are others now."""
    return [name for name, table in from_vllm.tables().items() if table != TABLES[name]]


def test_a_new_metric_changes_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert changed() == []
    family = metrics.MetricFamily("vllm:new", "New.", lambda snapshot: 0)
    monkeypatch.setattr(metrics, "GAUGES", (*metrics.GAUGES, family))
    assert changed() == ["metrics"]


def test_a_new_field_changes_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(unsupported_fields.NEUTRAL_VALUES, "new", ())
    assert changed() == ["fields"]
    monkeypatch.setitem(vllm_params.REFUSED, "prompt_logprob_start", ((), "another reason"))
    assert changed() == ["LLM", "fields"]


def test_an_image_that_starts_otherwise_changes_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in [*from_vllm.ROOT.glob("docker-compose*.yml"), from_vllm.ROOT / "deploy/Dockerfile"]:
        copy = tmp_path / path.relative_to(from_vllm.ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
    monkeypatch.setattr(from_vllm, "ROOT", tmp_path)
    assert changed() == []
    copy.write_text(copy.read_text().replace('"services.gateway"]', '"quire", "serve"]'))
    assert changed() == ["images"]


def test_a_flag_that_is_gone_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [knob for knob in public_knobs() if knob.name != "uds"]
    monkeypatch.setattr(from_vllm, "public_knobs", lambda: others)
    with pytest.raises(ValueError, match="no flag uds, and no reason"):
        from_vllm.tables()


def test_a_method_that_is_gone_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(LLM, "get_metrics")
    with pytest.raises(ValueError, match="no method get_metrics, and no reason"):
        from_vllm.tables()


@pytest.mark.parametrize("name", ["sleep", "embed"])
def test_a_method_is_not_missing_and_there(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(LLM, name, lambda self: None, raising=False)
    with pytest.raises(ValueError, match=f"has the method {name}, but a reason says why it has not"):
        from_vllm.tables()


def add_route(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    def routes(config: GatewayConfig) -> list[Route]:
        made = make_routes(config)
        return [*made, replace(made[0], path=path)]

    monkeypatch.setattr(from_vllm, "make_routes", routes)


def test_a_new_endpoint_changes_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    add_route(monkeypatch, "/v1/new")
    assert changed() == ["endpoints"]


def test_an_endpoint_is_not_missing_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    add_route(monkeypatch, "/v1/embeddings")
    with pytest.raises(ValueError, match="has the endpoint /v1/embeddings, but"):
        from_vllm.tables()


def test_a_metric_is_not_missing_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    family = metrics.MetricFamily("vllm:spec_decode_num_drafts", "Drafts.", lambda snapshot: 0)
    monkeypatch.setattr(metrics, "COUNTERS", (*metrics.COUNTERS, family))
    with pytest.raises(ValueError, match="has the metric spec_decode_num_drafts, but"):
        from_vllm.tables()


def test_a_page_without_a_mark_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- one: made by `make docs` -->\n")
    with pytest.raises(SystemExit, match="the marks around the table one are missing"):
        generate.filled(page, {"one": ""})
