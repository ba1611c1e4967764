"""Tests `quire bench serve` as a command, on servers with a scripted worker."""

import asyncio
import json
import math
import signal
import socket
import sys
import xml.etree.ElementTree
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import pytest_asyncio

from quire.bench.command import bench
from quire.bench.options import ServeOptions
from quire.bench.output_files import check_writable
from shared.config import resolve
from shared.errors import ConfigError, EngineFailure, ModelError, Unavailable
from shared.hub.embedded import EMBEDDED
from tests.system.http_client import figures, settled, talk
from tests.system.processes import ROOT, Server, server
from tests.waiting import until

FLAGS = ["--random-input-len=20", "--random-output-len=6", "--num-prompts=12"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def quick() -> AsyncIterator[Server]:
    async with server(talk(delay=0.002)) as running_server:
        yield running_server


async def serve(at: Server, *flags: str) -> int:
    """Run the command in a thread, since it has its own event loop, and return its status."""
    return await asyncio.to_thread(bench, ["serve", f"--port={at.port}", *FLAGS, *flags])


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


@pytest.mark.asyncio(loop_scope="module")
async def test_it_measures_prints_and_saves(
    quick: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    before = await settled(quick)
    flags = ["--save-result", "--save-detailed", f"--result-dir={tmp_path}", "--label=mine", "--metadata", "a=1", "b=2"]
    assert await serve(quick, *flags, "--max-concurrency=4", "--goodput", "ttft:60000", "--num-warmups=3") == 0
    (result,) = results(tmp_path)
    assert (result["completed"], result["failed"], result["max_concurrency"]) == (12, 0, 4)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (240, 72)
    assert result["input_lens"] == [20] * 12
    assert result["output_lens"] == [6] * 12
    assert all(1 <= len(itls) + 1 <= 6 for itls in result["itls"])
    for ttft, itls, latency in zip(result["ttfts"], result["itls"], result["latencies"], strict=True):
        assert latency == pytest.approx(ttft + math.fsum(itls))
    assert result["request_goodput"] == result["request_throughput"] == pytest.approx(12 / result["duration"])
    assert (result["model_id"], result["a"], result["b"]) == (result["tokenizer_id"], "1", "2")
    (path,) = tmp_path.glob("*")  # noqa: ASYNC240  # nothing else runs
    assert path.name.startswith("mine-infqps-concurrency4-model-")
    printed = capsys.readouterr().out
    assert "Successful requests:                     12\n" in printed
    assert f"Result: {path}\n" in printed
    grown = await settled(quick, before, 15)
    assert grown["vllm:generation_tokens_total"] == 15 * 6, "with the warm-ups"
    assert "secret" not in path.read_text() + printed


@pytest.mark.asyncio(loop_scope="module")
async def test_chats_are_measured_too(quick: Server, tmp_path: Path) -> None:
    flags = ["--backend=openai-chat", "--save-result", f"--result-dir={tmp_path}", "--temperature=0", "--logprobs=1"]
    assert await serve(quick, *flags, '--extra-body={"seed": 3}') == 0
    (result,) = results(tmp_path)
    assert (result["completed"], result["total_output_tokens"]) == (12, 72)
    assert result["total_input_tokens"] > 240, "with what the template adds, by the server's count"


@pytest.mark.asyncio(loop_scope="module")
async def test_several_concurrencies_run_in_turn_into_one_file_and_a_chart(quick: Server, tmp_path: Path) -> None:
    flags = ["--append-result", f"--result-dir={tmp_path}", "--result-filename=all.jsonl", f"--plot={tmp_path}/c.svg"]
    assert await serve(quick, *flags, "--max-concurrency", "1", "6") == 0
    result = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [one["max_concurrency"] for one in result] == [1, 6]
    assert [one["completed"] for one in result] == [12, 12]
    root = xml.etree.ElementTree.parse(tmp_path / "c.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_rate_spreads_the_requests_and_a_ramp_is_told_of(quick: Server, tmp_path: Path) -> None:
    saved = ["--save-result", "--save-detailed", f"--result-dir={tmp_path}"]
    flags = ["--request-rate=10", "--burstiness=inf", "--result-filename=1.json", f"--plot={tmp_path}/c.png"]
    assert await serve(quick, *saved, *flags) == 0
    ramp = ["--ramp-up-strategy=linear", "--ramp-up-start-rps=20", "--ramp-up-end-rps=80"]
    assert await serve(quick, *saved, *ramp, "--result-filename=2.json") == 0
    steady, ramped = results(tmp_path)
    assert (steady["request_rate"], steady["burstiness"]) == (10.0, "inf")
    starts = steady["start_times"]
    assert max(starts) - min(starts) > 0.5, "11 gaps of 0.1 s, of which a busy machine may swallow some"
    assert [event["rps"] for event in ramped["rps_change_events"]] == list(range(20, 81))
    with PIL.Image.open(tmp_path / "c.png") as image:
        image.verify()
        assert image.format == "PNG"


@pytest.mark.asyncio(loop_scope="module")
async def test_when_every_request_fails_the_status_says_so(quick: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert await serve(quick, "--random-input-len=5000") == 1
    printed = capsys.readouterr()
    assert "Failed requests:                         12\n" in printed.out
    assert printed.err.count("quire: a request failed: HTTP 400: ") == 1, "each error once"
    with pytest.raises(Unavailable, match="is not ready after 1 s: HTTP 404"):
        await serve(quick, "--endpoint=/v1/completion", "--ready-check-timeout-sec=1")
    with pytest.raises(EngineFailure, match="HTTP 404"):
        await serve(quick, f"--base-url=http://127.0.0.1:{quick.port}/no")


async def test_a_server_that_dies_costs_what_was_under_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with server(talk(delay=0.01)) as stopped:
        flags = ["--max-concurrency=4", "--random-output-len=20", "--save-result", f"--result-dir={tmp_path}"]
        running = asyncio.create_task(serve(stopped, *flags, "--num-prompts=400"))  # in 20 seconds

        async def some_are_done() -> bool:
            return (await figures(stopped))["vllm:request_success_total:length"] >= 8

        await until(some_are_done)
        await stopped.gateway.stop()
        assert await running == 0, "some were answered"
    (result,) = results(tmp_path)
    assert result["completed"] + result["failed"] == 400
    assert result["completed"] >= 8
    assert result["failed"] >= 1
    assert result["total_output_tokens"] == 20 * result["completed"]
    assert "quire: a request failed: Client" in capsys.readouterr().err


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_without_a_tokenizer_here_is_told_of(quick: Server) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer \(name one with --tokenizer\): there is no folder /no/such"):
        await serve(quick, "--model=/no/such")


def test_a_key_with_a_line_end_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
    with pytest.raises(ConfigError, match="OPENAI_API_KEY: has a line end") as caught:
        bench(["serve", "--port=1"])
    assert "secret" not in str(caught.value)


@asynccontextmanager
async def answering(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """Yield the --port flag of a server that reads the head of each request and then runs `answer`."""
    under_way: list[asyncio.Task[None]] = []

    async def each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
            await asyncio.Event().wait()
        finally:
            writer.transport.abort()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        under_way.append(asyncio.create_task(each(reader, writer)))

    listener = await asyncio.start_server(begin, "127.0.0.1", 0)
    try:
        yield f"--port={listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await listener.wait_closed()


ONE = ["--model=m", f"--tokenizer={EMBEDDED}", *FLAGS, "--num-prompts=1"]
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def says(data: bytes) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return answer


async def pings(writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM)
    while True:
        writer.write(b": ping\n\n")
        await writer.drain()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("answer", [says(b""), pings, says(b"HTTP/1.1 500 No\r\n\r\nno")])
async def test_a_server_without_a_token_is_given_up(
    answer: Callable[[asyncio.StreamWriter], Awaitable[None]], capsys: pytest.CaptureFixture[str]
) -> None:
    async with answering(answer) as port:
        assert await asyncio.to_thread(bench, ["serve", port, *ONE, "--timeout=0.3"]) == 1
        with pytest.raises(Unavailable, match="is not ready after 1 s: it does not answer"):
            await asyncio.to_thread(bench, ["serve", port, *ONE, "--ready-check-timeout-sec=1"])
    assert "quire: a request failed: no token for 0.3 s\n" in capsys.readouterr().err


async def test_behind_done_nothing_is_waited_for() -> None:
    events = b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    async with answering(says(STREAM + events)) as port:  # and the connection stays open
        assert await asyncio.to_thread(bench, ["serve", port, *ONE]) == 0


async def test_a_server_that_does_not_name_its_models_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.bench.serve.LIST_TIMEOUT", 0.2)
    async with answering(says(b"")) as port:
        with pytest.raises(Unavailable, match=r"/v1/models does not answer in 0\.2 s"):
            await asyncio.to_thread(bench, ["serve", port])


@pytest.mark.parametrize(
    "body",
    [
        b'{"data": [{"id": 5}]}',
        b'{"data": [{"id": "m", "root": 7}]}',
        b'{"data": []}',
        b'{"data": [{"id": "a\\u0000"}]}',
        b"[" * 9999,
    ],
)
async def test_a_list_that_names_no_model_is_refused(body: bytes) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with answering(says(head + body)) as port:
        with pytest.raises(EngineFailure, match="names no model"):
            await asyncio.to_thread(bench, ["serve", port])


def test_trying_a_file_leaves_no_trace(tmp_path: Path) -> None:
    check_writable("--plot", tmp_path / "made" / "new.png")
    assert list((tmp_path / "made").iterdir()) == []
    (tmp_path / "old").write_text("kept")
    check_writable("--plot", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "kept"


@pytest.mark.parametrize("name", ["throughput", "latency"])
def test_a_result_that_cannot_be_written_is_told_of_before_the_engine_starts(name: str) -> None:
    with pytest.raises(ConfigError, match="--output-json: cannot write /dev/null/x: "):
        bench([name, "--output-json=/dev/null/x", "--model=/no/such"])


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_without_a_traceback(quick: Server, number: signal.Signals) -> None:
    async def idle() -> bool:
        return (await figures(quick))["vllm:num_requests_running"] == 0

    await until(idle)  # requests of an earlier test have ended
    flags = ["--random-input-len=20", "--random-output-len=1000", "--num-prompts=8", "--max-concurrency=2"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire", "bench", "serve", f"--port={quick.port}", *flags),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )

    async def it_asks() -> bool:
        return (await figures(quick))["vllm:num_requests_running"] > 0

    await until(it_asks)
    process.send_signal(number)
    out, err = await process.communicate()
    assert (process.returncode, out, err) == (130, b"", b"")


def test_a_server_that_is_not_there_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unavailable, match=f"http://127.0.0.1:{port}/v1/models cannot be reached"):
        bench(["serve", f"--port={port}"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--profile"], "unrecognized arguments: --profile"),
        (["--num-prompts=0"], "--num-prompts '0': Expected `int` >= 1"),
        (["--backend=tgi"], "--backend 'tgi': must be one of openai, vllm, openai-chat"),
        (["--request-rate=0"], "--request-rate '0'"),
        (["--request-rate=1e-300"], "--request-rate '1e-300': Expected `float` >= "),
        (["--timeout=0"], "--timeout '0': Expected `float` > 0"),
        (["--max-concurrency", "1", "x"], "--max-concurrency"),
        (["--goodput", "itl:5"], "--goodput itl:5: must be NAME:MILLISECONDS"),
        (["--goodput", "ttft:fast"], "--goodput ttft:fast: 'fast' is not a number"),
        (["--goodput", "ttft:-1"], "--goodput ttft:-1: -1 must be between 0 and inf"),
        (["--metric-percentiles=50,101"], "--metric-percentiles 50,101: 101 must be between 0 and 100"),
        (["--percentile-metrics=ttft,speed"], "--percentile-metrics speed: must be one of ttft"),
        (["--header", "x"], "--header x: must be KEY=VALUE"),
        (["--header", "x=1\n2"], "--header x: has a line end"),
        (["--header", "x y=1"], "--header 'x y': not a header"),
        (["--header", "x\ny=1"], "--header 'x\\ny': not a header"),
        (["--header", "Content-Length=1"], "--header 'Content-Length': not a header that can be set"),
        (["--request-id-prefix=a\nb"], "--request-id-prefix: has a line end"),
        (["--plot=/proc/no/x.png"], "--plot: cannot write /proc/no/x.png: "),
        (["--save-result", "--result-dir=/dev/null/x"], "--result-filename: cannot write /dev/null/x/openai-infqps-"),
        (["--save-result", "--result-dir=/", "--result-filename=proc"], "cannot write /proc: Is a directory"),
        (["--save-result", f"--result-filename={'x' * 300}"], ": File name too long"),
        (["--metadata", "=x"], "--metadata =x: must be KEY=VALUE"),
        (["--extra-body=[]"], "--extra-body: not a JSON object"),
        (["--random-range-ratio=2"], "--random-range-ratio 2"),
        (["--plot=chart.jpg"], "--plot chart.jpg: the name must end with .png or .svg"),
        (["--save-detailed"], "--save-detailed needs --save-result"),
        (["--max-concurrency", "1", "2", "--result-filename=x", "--save-result"], "needs --append-result"),
        (["--endpoint=v1"], "--endpoint v1: must begin with /"),
        (["--ramp-up-start-rps=1"], "need --ramp-up-strategy"),
        (["--ramp-up-strategy=linear"], "needs --ramp-up-start-rps and --ramp-up-end-rps"),
        (["--ramp-up-strategy=linear", "--request-rate=3"], "--request-rate must not be given"),
        (["--ramp-up-strategy=linear", "--ramp-up-start-rps=3", "--ramp-up-end-rps=2"], "must be at most"),
        (["--ramp-up-strategy=exponential", "--ramp-up-start-rps=0", "--ramp-up-end-rps=2"], "cannot begin at"),
    ],
)
def test_wrong_flags_are_named_before_anybody_is_asked(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bench(["serve", "--port=1", *flags])
    assert message in str(caught.value)


def test_vllms_defaults() -> None:
    result = resolve(ServeOptions, {}, {})
    expected = {
        "backend": "openai",
        "host": "127.0.0.1",
        "port": 8000,
        "dataset_name": "random",
        "random_input_len": 1024,
        "random_output_len": 128,
        "num_prompts": 1000,
        "request_rate": math.inf,
        "burstiness": 1.0,
        "max_concurrency": None,
        "num_warmups": 0,
        "percentile_metrics": "ttft,tpot,itl",
        "metric_percentiles": "99",
        "ready_check_timeout_sec": 0,
        "seed": 0,
        "prefix_repetition_num_prefixes": 10,
        "custom_output_len": 256,
    }
    assert {name: getattr(result, name) for name in expected} == expected


def test_a_chart_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.bench.chart.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--plot needs matplotlib, which is not installed"):
        bench(["serve", "--port=1", "--plot=x.png"])


def test_help_and_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: quire bench COMMAND")
    assert bench(["sweep"]) == 2
    assert capsys.readouterr().err.startswith("quire: there is no benchmark sweep\n")
    assert bench([]) == 2
    with pytest.raises(SystemExit) as left:
        bench(["serve", "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "--max-concurrency" in shown
    assert "QUIRE_" not in shown, "a run has no environment variables"
