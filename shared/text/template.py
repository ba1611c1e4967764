"""`ChatTemplate`: the model's Jinja template, which makes a prompt of messages.

Found in tokenizer_config.json, chat_template.jinja or chat_template.json, or in a file that the user names. It runs in
a sandbox, with what templates in the field expect: `raise_exception`, `strftime_now`, `tojson` that leaves non-ASCII
letters alone, loop controls, `{% generation %}`, and the special tokens by name. Whatever goes wrong while it runs is
the messages' fault, hence `InvalidRequest`; a template that does not parse, or shows no message, is a `ModelError`.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidRequest, ModelError
from shared.gguf.folder import display_path
from shared.text.content import ContentForms, Form, Message, find_forms
from shared.text.json_file import read_json
from shared.text.messages import append_text, plain_messages

TRIAL = 10.0
"""Seconds for the first messages, which take a millisecond each."""

FORMS = {"string": Form.STRING, "openai": Form.PARTS}
"""vLLM's words for the forms of content that a template may be given."""

RESERVED = frozenset({"messages", "add_generation_prompt", "continue_final_message", "self"})  # self is Jinja's


class ChatTemplate:
    """`render` messages to the text of a prompt. A `source` of None stands for a model that has no template."""

    def __init__(
        self,
        source: str | None,
        special: Mapping[str, str] | None = None,
        origin: Path | None = None,
        *,
        content_format: str = "auto",
        variables: Mapping[str, Any] = {},
    ) -> None:
        """Compile `source`. Raise `ModelError`, naming `origin` if there is one, for a template that does not parse.

        `content_format` is the form of content that all messages get, `string` or `openai`; `auto`: what the template
        is found to read. `variables` are for the template where a call of `render` does not name them.
        """
        self._special = dict(special or {})
        self._origin = origin
        self._form = FORMS.get(content_format)
        self._variables = dict(variables)
        environment = _environment()
        self._reserved = RESERVED | self._special.keys() | environment.globals.keys()
        if taken := sorted(self._reserved & self._variables.keys()):
            raise self._error(f"the chat template cannot be given values for {', '.join(taken)}")
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
        file: Path | None = None,
        *,
        content_format: str = "auto",
        variables: Mapping[str, Any] = {},
    ) -> "ChatTemplate":
        """The template of a model folder, or the one in `file`. Raises `ModelError`."""
        try:
            source = _find(folder) if file is None else file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ModelError(f"cannot read the chat template {file or f'of {folder}'}: {why}") from error
        return cls(source, special, file or display_path(folder), content_format=content_format, variables=variables)

    @property
    def exists(self) -> bool:
        return self._template is not None

    def try_out(self, seconds: float = TRIAL) -> None:
        """Raise `ModelError` for a template that cannot serve.

        That is one which short messages keep busy for so long, since it would stop a server, and one which shows
        nothing of a user's message, since the model would answer something else.
        """
        thread = Thread(target=lambda: self._forms, daemon=True)  # which the process ends with
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            raise self._error(f"the chat template has made nothing of one short message in {seconds:.0f} s")
        if self._forms.shows_nothing:
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
        """The prompt, special tokens included (so encode it without adding any).

        With `continue_final_message` it ends with the last message's content, its white space kept, whatever the
        template would have put behind it. `variables` are for the template, under any name that it does not have
        from here: not a special token's, nor a function's. Raises `InvalidRequest`.
        """
        given = dict(variables or {})
        if taken := sorted(self._reserved & given.keys()):
            raise InvalidRequest(f"chat_template_kwargs must not hold {', '.join(taken)}", "chat_template_kwargs")
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt to be false", "continue_final_message"
            )
        plain = plain_messages(messages, self._forms)
        if not continue_final_message:
            return self._run(plain, add_generation_prompt, given)
        mark = uuid.uuid4().hex  # the content's end in the output, even if the template trims or repeats it
        append_text(plain[-1], mark)
        before, found, _ = self._run(plain, False, given).rpartition(mark)
        if not found:
            raise InvalidRequest("the chat template leaves out the final message's content", "messages")
        return before

    @cached_property
    def _forms(self) -> ContentForms:
        """The form of content that the template reads, found when it is first needed."""
        if self._template is None:
            return ContentForms()
        found = find_forms(lambda messages: self._run(messages, True, {}))  # also if the user knows: it tries it out
        return found if self._form is None else ContentForms({"user": self._form})

    def _error(self, message: str) -> ModelError:
        return ModelError(message if self._origin is None else f"{self._origin}: {message}")

    def _run(self, messages: list[Message], add_generation_prompt: bool, variables: dict[str, Any]) -> str:
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use completions, or start with --chat-template")
        context: dict[str, Any] = {"tools": None, "documents": None}  # templates ask whether these are none
        context |= self._special | self._variables | variables
        context |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(context)
        except jinja2.TemplateError as error:
            raise InvalidRequest(error.message or type(error).__name__, "messages") from error
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the chat template cannot render these messages: {error}", "messages") from error


class _Generation(Extension):
    """`{% generation %}` marks the model's own words, for training; here it is only its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _find(folder: Path) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = read_json(folder / name).get("chat_template")
        if isinstance(found, str):
            return found
        if isinstance(found, list):
            return _pick(found, folder / name)
    return None


def _pick(named: list[Any], path: Path) -> str:
    """The template called default among several named ones, or the only one."""
    by_name = {one["name"]: one["template"] for one in named if isinstance(one, dict) and "name" in one}
    chosen = by_name.get("default", next(iter(by_name.values())) if len(by_name) == 1 else None)
    if not isinstance(chosen, str):
        raise ModelError(f"{path}: none of the chat templates is named default")
    return chosen
