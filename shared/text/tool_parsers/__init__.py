"""The parsers of tool calls, one family a file. `FAMILIES` has vLLM's names for them."""

from collections.abc import Mapping

from shared.text.tool_parsers.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from shared.text.tool_parsers.glm45 import Glm45Parser, Glm47Parser
from shared.text.tool_parsers.hermes import HermesParser
from shared.text.tool_parsers.json_list import GraniteParser, Phi4MiniParser
from shared.text.tool_parsers.kimi_k2 import KimiK2Parser
from shared.text.tool_parsers.llama3_json import Llama3JsonParser
from shared.text.tool_parsers.mistral import MistralParser
from shared.text.tool_parsers.pythonic import Lfm2Parser, Llama4PythonicParser, PythonicParser
from shared.text.tool_parsers.qwen3_coder import Qwen3CoderParser
from shared.text.tool_parsers.tool_parser import ToolParser

FAMILIES: Mapping[str, type[ToolParser]] = {
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "glm45": Glm45Parser,
    "glm47": Glm47Parser,
    "granite": GraniteParser,
    "granite4": HermesParser,
    "hermes": HermesParser,
    "kimi_k2": KimiK2Parser,
    "lfm2": Lfm2Parser,
    "llama3_json": Llama3JsonParser,
    "llama4_pythonic": Llama4PythonicParser,
    "mistral": MistralParser,
    "phi4_mini_json": Phi4MiniParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
    "qwen3_xml": Qwen3CoderParser,
}
