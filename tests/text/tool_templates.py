"""Chat templates in the formats of the families whose tool calls are parsed: tools, calls, results, and a next turn.

They are shorter than the families' own, and do what those do with the messages that are given to them: some join the
arguments of a call to other text, some want ids of nine characters, some print an object as JSON or item by item.
"""

_TOOLS = "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"

_CHATML = (
    _TOOLS
    + """{% for message in messages %}
{% if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}CALL{% endfor %}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
)

_JSON_CALL = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'

TEMPLATES: dict[str, str] = {
    "hermes": _CHATML.replace("CALL", f"\n<tool_call>\n{_JSON_CALL}\n</tool_call>"),
    "qwen3_coder": _CHATML.replace(
        "CALL",
        """
<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>""",
    ),
    "glm45": _CHATML.replace(
        "CALL",
        """
<tool_call>{{ call.function.name }}
{% for name, value in call.function.arguments.items() %}<arg_key>{{ name }}</arg_key>
<arg_value>{{ value | tojson if value is not string else value }}</arg_value>
{% endfor %}</tool_call>""",
    ),
    "kimi_k2": _CHATML.replace(
        "{% for call in message.tool_calls %}CALL{% endfor %}",
        "{% if message.tool_calls %}<|tool_calls_section_begin|>{% for call in message.tool_calls %}<|tool_call_begin|>"
        "{{ call.id }}<|tool_call_argument_begin|>{% if call.function.arguments is string %}"
        "{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}<|tool_call_end|>"
        "{% endfor %}<|tool_calls_section_end|>{% endif %}",
    ),
    "granite": _CHATML.replace(
        "{% for call in message.tool_calls %}CALL{% endfor %}",
        "{% if message.tool_calls %}<|tool_call|>{{ message.tool_calls | map(attribute='function') | list | tojson }}"
        "{% endif %}",
    ),
    "phi4_mini_json": _CHATML.replace("<tools>", "<|tool|>").replace(
        "CALL", "<|tool_call|>{{ call.function | tojson }}<|/tool_call|>"
    ),
    "mistral": """{% for message in messages %}
{% if message.role == 'user' %}
{% if tools is not none and loop.index0 == 0 %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9') }}
{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']</s>') }}
{%- endfor %}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id }}
{{- '"}[/TOOL_RESULTS]' }}
{%- else %}
{{- ' ' + message.content + '</s>' }}
{%- endif %}
{%- endfor %}""",
    "deepseek_v3": """{{ tools | tojson if tools }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' and message.tool_calls %}
{{- '<｜Assistant｜>' + message.content + '<｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
{{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif message.role == 'tool' %}
{{- '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- else %}{{ '<｜Assistant｜>' + message.content + '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}""",
    "llama3_json": """{% if tools %}Respond in the format {"name": function name, "parameters": dictionary of argument
name and its value}.{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once!') }}{% endif %}
{%- set call = message.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}""",
    "llama4_pythonic": """{% if tools %}Use the format: [func_name1(param1=value1)]{{ tools | tojson }}{% endif %}
{%- for message in messages %}<|header_start|>{{ message.role }}<|header_end|>

{{ message.content }}
{%- if message.tool_calls %}[{% for call in message.tool_calls %}{{ call.function.name }}(
{%- for name in call.function.arguments %}{{ name }}={{ call.function.arguments[name] | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}<|eot|>
{%- endfor %}
{%- if add_generation_prompt %}<|header_start|>assistant<|header_end|>

{% endif %}""",
    "openai": """{% if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>{{ message.content }}
{%- elif message.tool_calls %}
{%- set call = message.tool_calls[0].function %}<|start|>assistant
{%- if message.reasoning_content %}<|channel|>analysis<|message|>{{ message.reasoning_content }}<|end|>
{{- '<|start|>assistant' }}
{%- endif %} to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}""",
}
TEMPLATES["deepseek_v31"] = (
    TEMPLATES["deepseek_v3"]
    .replace(
        "call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n'", "call.function.name + '<｜tool▁sep｜>'"
    )
    .replace("\\n```<", "<")
)

ONE_CALL = {"llama3_json", "openai"}
"""Families whose templates take one call a message."""
