"""Tests settings from flags, environment and file. The services' own settings follow the same rules."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta, Struct

from quire.settings import ServeConfig
from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared.config import flag_parser, knobs, load, read_file, resolve, to_flags
from shared.errors import ConfigError


class Sample(Struct, frozen=True, kw_only=True):
    """A knob of each type."""

    name: Annotated[str, Meta(min_length=1, description="A name of 100%.")] = "x"
    size: Annotated[int, Meta(ge=1, le=9, description="A size.")] = 3
    share: Annotated[float, Meta(gt=0, description="A share.")] = 0.5
    limit: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="A limit.")] = None
    fast: Annotated[bool, Meta(description="Be fast.")] = False
    safe: Annotated[bool, Meta(description="Be safe.")] = True
    policy: Annotated[Literal["fcfs", "priority"], Meta(description="A policy.")] = "fcfs"
    block_size: Annotated[Literal[8, 16], Meta(description="Tokens.")] = 16
    keys: Annotated[list[str], Meta(description="Keys.")] = []


CONFIGS = [Sample, GatewayConfig, SchedulerConfig, WorkerConfig]


def read(*argv: str, environment: dict[str, str] | None = None) -> Sample:
    return load(Sample, argv, environment or {}, prog="sample")


def test_defaults() -> None:
    assert read() == Sample()


def test_flags_of_every_type() -> None:
    argv = ["--name=a b", "--size", "9", "--share=1", "--limit=7", "--fast", "--no-safe", "--policy=priority"]
    expected = Sample(name="a b", size=9, share=1.0, limit=7, fast=True, safe=False, policy="priority", block_size=8)
    assert read(*argv, "--block-size=8") == expected
    assert read("--keys=a", "--keys=b,c").keys == ["a", "b,c"]
    assert read("--keys", "a", "b", "--fast", "--keys", "c").keys == ["a", "b", "c"]


def test_environment_of_every_type() -> None:
    environment = {
        "QUIRE_NAME": "n",
        "QUIRE_SIZE": "2",
        "QUIRE_LIMIT": "4",
        "QUIRE_FAST": "true",
        "QUIRE_SAFE": "0",
        "QUIRE_BLOCK_SIZE": "8",
        "QUIRE_KEYS": "a,b",
        "QUIRE_OTHER": "?",
        "SIZE": "7",
    }
    expected = Sample(name="n", size=2, limit=4, fast=True, safe=False, block_size=8, keys=["a", "b"])
    assert read(environment=environment) == expected


def test_flags_win_over_environment_which_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("name: file\nsize: 5\nblock-size: 8\nkeys: [a, b]\nlimit: null\n")
    config = read(f"--config={file}", "--name=flag", environment={"QUIRE_NAME": "environment", "QUIRE_SIZE": "6"})
    assert config == Sample(name="flag", size=6, block_size=8, keys=["a", "b"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--size=0"], "--size '0': Expected `int` >= 1"),
        (["--size=ten"], "--size 'ten'"),
        (["--size=1.5"], "--size '1.5'"),
        (["--share=0"], "--share '0'"),
        (["--policy=lifo"], "--policy 'lifo': must be one of fcfs, priority"),
        (["--limit=0"], "--limit '0'"),
        (["--block-size=9"], "--block-size '9': must be one of 8, 16"),
        (["--name="], "--name ''"),
        (["--siz=1"], "--siz=1"),
        (["stray"], "stray"),
        (["--config=/nowhere.yaml"], "--config /nowhere.yaml"),
    ],
)
def test_a_wrong_setting_is_named(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*argv)
    assert message in str(caught.value)


def test_the_place_of_a_wrong_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^QUIRE_SIZE 'ten': "):
        read(environment={"QUIRE_SIZE": "ten"})
    file = tmp_path / "settings.yaml"
    file.write_text("block-size: 9\n")
    with pytest.raises(ConfigError, match=r"^--config .*settings\.yaml: block-size 9: must be one of 8, 16$"):
        read(f"--config={file}")
    assert read(f"--config={file}", environment={"QUIRE_BLOCK_SIZE": "8"}).block_size == 8


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: b: c", "just text"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"settings\.yaml"):
        read_file(str(file))


@pytest.mark.parametrize("config", CONFIGS)
def test_to_flags_leads_back_to_the_config(config: type[Struct]) -> None:
    """The test sets every knob to another value than its default, and the flags keep the value."""
    assert to_flags(config()) == []
    for knob in knobs(config):
        for value in OTHER_VALUES:
            try:
                changed = msgspec.convert({**PREREQUISITES.get(knob.name, {}), knob.name: value}, config, strict=False)
            except (msgspec.ValidationError, ConfigError):
                continue
            if getattr(changed, knob.name) != knob.default:
                break
        else:
            pytest.fail(f"no other value for {knob.flag}")
        assert load(config, to_flags(changed), {}, prog="x") == changed


PREREQUISITES: dict[str, dict[str, object]] = {
    "priority_ageing": {"scheduling_policy": "priority"},
    "rank": {"tensor_parallel_size": 8},
    "rendezvous": {"rank": 0},
}

OTHER_VALUES: list[object] = [
    True,
    False,
    7,
    2,
    8,
    0.75,
    64,
    4096,
    ["a", "--b", "c d"],
    "cpu",
    "priority",
    "recompute",
    "json",
    "text",
    "dummy",
    "int8",
    "bfloat16",
    "float32",
    "--x y",
    "transformers",
    "warning",
    "/under/here",
    "openai",
    "avx2",
    "least_loaded",
    "text",
]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_knob_says_what_it_does_and_what_it_takes(
    config: type[Struct], capsys: pytest.CaptureFixture[str]
) -> None:
    for knob in knobs(config):
        assert knob.doc.endswith((".", ")")), knob.name
        assert knob.type_text
    with pytest.raises(SystemExit):
        load(config, ["--help"], {}, prog="x")
    output = capsys.readouterr().out
    assert all(knob.flag in output and knob.variable in output for knob in knobs(config))
    if config is Sample:
        assert "--policy {fcfs,priority}" in output


@pytest.mark.parametrize("value", [5, object(), {"a": 1}, [5]])
def test_an_argument_of_python_that_is_no_list_is_named(value: object) -> None:
    with pytest.raises(ConfigError, match=r"--served-model-name .*: Expected"):
        resolve(GatewayConfig, {"served_model_name": value}, {})


def test_threads_are_bounded() -> None:
    """The library that starts them would end the process, an LLM's caller included."""
    with pytest.raises(ConfigError, match="--num-threads 1000000: Expected `int` <= 4096"):
        resolve(WorkerConfig, {"num_threads": 1_000_000}, {})


@pytest.mark.parametrize("config", [GatewayConfig, SchedulerConfig, WorkerConfig, ServeConfig])
def test_no_number_with_a_fraction_may_be_infinite(config: type[Struct]) -> None:
    """Clocks, timers and sizes in bytes cannot be: a service would end with a traceback when it comes to use one."""
    for knob in (knob for knob in knobs(config) if knob.type_text.startswith("float")):
        for value in ("inf", "-inf", "nan", "1e308"):
            with pytest.raises(ConfigError, match=f"{knob.flag} '{value}': Expected `float`"):
                resolve(config, {knob.name: value}, {})


def test_types_are_shown_with_their_bounds() -> None:
    types = {knob.name: knob.type_text for knob in knobs(Sample)}
    assert types["size"] == "int ≥ 1 ≤ 9"
    assert types["limit"] == "int ≥ 1"
    assert types["policy"] == "fcfs | priority"
    assert types["keys"] == "list of str"


def test_one_parser_serves_several_configs() -> None:
    parser = flag_parser([GatewayConfig, SchedulerConfig, WorkerConfig], prog="all")
    flags = vars(parser.parse_args(["--model=m", "--drain-timeout=7", "--max-num-seqs=5", "--port=1"]))
    assert resolve(WorkerConfig, flags, {}).model == resolve(GatewayConfig, flags, {}).model == "m"
    assert resolve(SchedulerConfig, flags, {}) == SchedulerConfig(drain_timeout=7, max_num_seqs=5)
    assert resolve(GatewayConfig, flags, {}).drain_timeout == 7


def test_a_string_is_a_list_of_one_and_what_is_empty_is_unset(tmp_path: Path) -> None:
    """API-03: files may have plain strings, and variables may be set but empty."""
    file = tmp_path / "settings.yaml"
    file.write_text("keys: just one\nname: 12\nsize: null\n")
    config = read(f"--config={file}", environment={"QUIRE_LIMIT": "", "QUIRE_FAST": " ", "QUIRE_POLICY": ""})
    assert config == Sample(keys=["just one"], name="12")
    file.write_text("keys: [1, two]\n")
    assert read(f"--config={file}", environment={"QUIRE_KEYS": ""}).keys == ["1", "two"]


def test_spaces_around_the_commas_of_a_variable_are_no_part_of_its_words() -> None:
    """No client could send a key that begins with a space."""
    assert read(environment={"QUIRE_KEYS": "a, b ,c"}).keys == ["a", "b", "c"]


def test_dates_in_a_files_objects_are_strings(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("name: {day: 2020-01-02}\n")
    assert read(f"--config={file}").name == '{"day": "2020-01-02"}'


def test_a_file_may_be_empty(tmp_path: Path) -> None:
    """API-03: a file of comments is valid."""
    file = tmp_path / "settings.yaml"
    for text in ("", "# size: 5\n"):
        file.write_text(text)
        assert read(f"--config={file}") == Sample()


def test_lists_may_be_json() -> None:
    """API-02: vLLM's command lines have lists as JSON."""
    assert read("--keys", '["a", "b,c"]').keys == ["a", "b,c"]
    assert read(environment={"QUIRE_KEYS": '["a,b"]'}).keys == ["a,b"]
    assert read("--keys", "[]").keys == read(environment={"QUIRE_KEYS": "[]"}).keys == []
    assert read("--keys", "[a", "b").keys == ["[a", "b"]
    assert read("--keys=[1]").keys == ["[1]"]


def test_an_empty_json_list_is_an_empty_list() -> None:
    assert read("--keys", "[]").keys == []
    assert read(environment={"QUIRE_KEYS": "[]"}).keys == []
