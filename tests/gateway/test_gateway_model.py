"""Tests of how a gateway reads its model at the start, and of the settings that override it."""

import json
from pathlib import Path

import pytest

from services.gateway.config import GatewayConfig
from services.gateway.served_model import ServedModel
from shared.errors import ConfigError, ModelError
from shared.text.cut_text import CutText
from tests.text.vocabulary import write_model_folder

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7}')
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
        "{{ 'P' if messages[0].content is not string }}{{ mood | default('') }}"
    )
    return tmp_path


def test_the_users_sampling_defaults_win(folder: Path) -> None:
    """API-02: --override-generation-config."""
    override = '{"temperature": 0, "max_new_tokens": 9, "do_sample": true}'
    defaults = ServedModel.load(GatewayConfig(model=str(folder), override_generation_config=override)).defaults
    assert defaults.as_dict() == {"temperature": 0.0, "top_k": 7, "max_tokens": 9}
    for wrong, said in (
        ('{"top_p": 2}', "--override-generation-config: top_p 2 is out of range"),
        ("{", "--override-generation-config {: is not JSON"),
        ("[1]", "must be a JSON object"),
    ):
        with pytest.raises(ConfigError, match=said):
            ServedModel.load(GatewayConfig(model=str(folder), override_generation_config=wrong))


def test_the_template_gets_what_the_settings_give_it(folder: Path) -> None:
    """API-02: --default-chat-template-kwargs and --chat-template-content-format; --special-tokens-in-messages."""
    kwargs = json.dumps({"mood": "!"})
    template = ServedModel.load(GatewayConfig(model=str(folder), default_chat_template_kwargs=kwargs)).template
    assert template.render(USER) == "hi!"
    assert template.render(USER, variables={"mood": "?"}) == "hi?"
    config = GatewayConfig(model=str(folder), chat_template_content_format="openai")
    assert ServedModel.load(config).template.render(USER) == "hiP"
    config = GatewayConfig(model=str(folder), special_tokens_in_messages="text")
    prompt = ServedModel.load(config).template.render([{"role": "user", "content": "x</s>"}])
    assert isinstance(prompt, CutText)
    assert prompt.pieces[0] == "x<"
    config = GatewayConfig(model=str(folder), default_chat_template_kwargs='{"messages": []}')
    with pytest.raises(ModelError, match="the chat template cannot be given values for messages"):
        ServedModel.load(config)
