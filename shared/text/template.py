"""`ChatTemplate`: the model's Jinja template, which turns messages into a prompt.

It is in tokenizer_config.json, chat_template.jinja or chat_template.json, or in a file that the user names. It runs in
a sandbox, with what templates expect: `raise_exception`, `strftime_now`, a `tojson` that does not escape non-ASCII
letters, loop controls, `{% generation %}`, and the special tokens by name. An error of a running template is an
`InvalidRequest`, since the messages probably caused it. A template that does not parse, or prints no message, is a
`ModelError`.
"""

import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidRequest, ModelError
from shared.gguf.folder import display_path
from shared.text.content_format import ContentFormat, ContentFormats, Message, detect_content_formats
from shared.text.cut_text import MAX_CUTS, CutText, NameCutter
from shared.text.json_file import read_json
from shared.text.messages import append_text, normalize_messages

SANITY_CHECK_TIMEOUT = 10.0
"""Seconds for rendering the probes, each of which takes about a millisecond."""

CONTENT_FORMATS = {"string": ContentFormat.STRING, "openai": ContentFormat.PARTS}
"""The formats by the values of --chat-template-content-format, which are vLLM's. `auto` is not one of them."""

RESERVED = frozenset({"messages", "add_generation_prompt", "continue_final_message", "self"})  # self is Jinja's


PROBE_MESSAGE = {"role": "user", "content": "1"}
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f4820759316",
        "description": "1",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "string", "description": "1"}},
            "required": ["a"],
        },
    },
}
"""A tool by whose name it shows whether a template prints tools."""


class ChatTemplate:
    """Renders messages to the text of a prompt. A `source` of None stands for a model that has no template."""

    def __init__(
        self,
        source: str | None,
        special: Mapping[str, str] | None = None,
        origin: Path | None = None,
        *,
        content_format: str = "auto",
        variables: Mapping[str, Any] = {},
        plain_names: Collection[str] = (),
    ) -> None:
        """Compile `source`. Raise `ModelError`, which names `origin`, if the template does not parse.

        `content_format` is the format of all messages' content: `string` or `openai`, or `auto` to detect what the
        template reads. `variables` are passed to the template; those of a call of `render` override them.
        `plain_names` are special tokens that stay text where a message has their names, but not one of the assistant.
        """
        self._cutter = NameCutter(plain_names) if plain_names else None
        self.arguments: dict[str, Any] = {  # that make a template like this one of another source, without plain names
            "special": dict(special or {}),
            "content_format": content_format,
            "variables": dict(variables),
        }
        self._special = dict(special or {})
        self._origin = origin
        self._format = CONTENT_FORMATS.get(content_format)
        self._variables = dict(variables)
        environment = _environment()
        self.source = source or ""
        self._reserved = RESERVED | self._special.keys() | environment.globals.keys()
        if reserved := sorted(self._reserved & self._variables.keys()):
            raise self._error(f"the chat template cannot be given values for {', '.join(reserved)}")
        try:
            self._template = None if source is None else environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise self._error(f"the chat template is wrong in line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise self._error("the chat template is nested too deeply") from error

    @classmethod
    def load(
        cls,
        folder: Path,
        special: Mapping[str, str],
        override: str | Path | None = None,
        *,
        content_format: str = "auto",
        variables: Mapping[str, Any] = {},
        plain_names: Collection[str] = (),
    ) -> "ChatTemplate":
        """Return the template of a model folder, or `override`. Raise `ModelError` if it cannot be used.

        `override` is the path of a file, or, as a string, a template itself, which is known by its braces.
        """
        if isinstance(override, str) and "{" in override:
            return cls(override, special, content_format=content_format, variables=variables, plain_names=plain_names)
        file = Path(override) if override else None
        try:
            source = _find(folder) if file is None else file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ModelError(f"cannot read the chat template {file or f'of {folder}'}: {reason}") from error
        return cls(
            source,
            special,
            file or display_path(folder),
            content_format=content_format,
            variables=variables,
            plain_names=plain_names,
        )

    def variant(self, source: str | None, content_format: str) -> "ChatTemplate":
        """Return the template for one caller: `source` instead of this one, unless that is None, or another format.

        It has the same variables. Raise `ModelError` if it does not parse.
        """
        own = self.source if self.exists else None
        return ChatTemplate(own if source is None else source, **self.arguments | {"content_format": content_format})

    @property
    def exists(self) -> bool:
        return self._template is not None

    @cached_property
    def shows_tools(self) -> bool:
        """Return whether the template shows the model which tools there are."""
        try:
            return PROBE_TOOL["function"]["name"] in self.render([PROBE_MESSAGE], variables={"tools": [PROBE_TOOL]})
        except InvalidRequest:
            return True  # this conversation may be what it refuses

    def sanity_check(self, seconds: float = SANITY_CHECK_TIMEOUT) -> None:
        """Raise `ModelError` if the template cannot be served.

        That is a template that does not render short messages within `seconds`, since it would block the server, or
        that prints nothing of a user's message, since the model could not answer it.
        """
        thread = Thread(target=lambda: self._formats, daemon=True)  # ends with the process
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            raise self._error(f"the chat template has not rendered one short message in {seconds:g} s")
        if self._formats.shows_nothing:
            raise self._error(
                "the chat template shows nothing of a user's message, whether its content is a string or a list of "
                "text parts"
            )

    def render(
        self,
        messages: Sequence[Any],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt with its special tokens. Encode it without adding any. It is cut where names stay text.

        With `continue_final_message` it ends with the last message's content, white space included, without the text
        that the template would put after it. `variables` are passed to the template; the names of special tokens and
        functions are reserved. Raise `InvalidRequest` if the template refuses the messages.
        """
        extra = dict(variables or {})
        if reserved := sorted(self._reserved & extra.keys()):
            raise InvalidRequest(f"chat_template_kwargs must not hold {', '.join(reserved)}", "chat_template_kwargs")
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt to be false", "continue_final_message"
            )
        normalized = normalize_messages(messages, self._formats)
        if self._cutter is None:
            return self._render(normalized, add_generation_prompt, continue_final_message, extra)
        cut = uuid.uuid4().hex
        marked = [
            message if message["role"] == "assistant" else self._cutter.mark(message, cut) for message in normalized
        ]
        text = CutText.at(cut, self._render(marked, add_generation_prompt, continue_final_message, extra))
        if len(text.cuts) > MAX_CUTS:
            raise InvalidRequest(
                f"messages hold {len(text.cuts)} names of special tokens, of which at most {MAX_CUTS} can stay text",
                "messages",
            )
        return text

    def _render(
        self,
        normalized: list[Message],
        add_generation_prompt: bool,
        continue_final_message: bool,
        extra: dict[str, Any],
    ) -> str:
        if not continue_final_message:
            return self._run(normalized, add_generation_prompt, extra)
        mark = (
            uuid.uuid4().hex
        )  # finds the content's end in the output, even if the template trims or repeats the content
        append_text(normalized[-1], mark)
        prompt, is_marked, _ = self._run(normalized, False, extra).rpartition(mark)
        if not is_marked:
            raise InvalidRequest("the chat template leaves out the final message's content", "messages")
        return prompt

    @cached_property
    def _formats(self) -> ContentFormats:
        """Return the formats of content that the template reads. They are detected on first use."""
        if self._template is None:
            return ContentFormats()
        # probe even if the user has set the format, since `sanity_check` needs the errors of the probes
        formats = detect_content_formats(lambda messages: self._run(messages, True, {}))
        return formats if self._format is None else msgspec.structs.replace(formats, by_role={"user": self._format})

    def _error(self, message: str) -> ModelError:
        return ModelError(message if self._origin is None else f"{self._origin}: {message}")

    def _run(self, messages: list[Message], add_generation_prompt: bool, variables: dict[str, Any]) -> str:
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template: use completions, or pass one (--chat-template)",
                "messages",
            )
        context: dict[str, Any] = {"tools": None, "documents": None}  # templates compare these with none
        context |= self._special | self._variables | variables
        context |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(context)
        except jinja2.TemplateError as error:
            raise InvalidRequest(error.message or type(error).__name__, "messages") from error
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the chat template cannot render these messages: {error}", "messages") from error


class _GenerationTag(Extension):
    """`{% generation %}` marks the model's own text for training. Here it only renders its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _find(folder: Path) -> str | None:
    """Return the source of a model folder's template, or None. Raise `ModelError` or `OSError`."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(folder / name).get("chat_template")
        if isinstance(template, str):
            return template
        if isinstance(template, list):
            return _default_template(template, folder / name)
    return None


def _default_template(named: list[Any], path: Path) -> str:
    """Return the template named default, or the only one. Raise `ModelError` if there is neither."""
    by_name = {item["name"]: item["template"] for item in named if isinstance(item, dict) and "name" in item}
    template = by_name.get("default", next(iter(by_name.values())) if len(by_name) == 1 else None)
    if not isinstance(template, str):
        raise ModelError(f"{path}: none of the chat templates is named default")
    return template
