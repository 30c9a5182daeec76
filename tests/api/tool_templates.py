"""Short chat templates that write tools and calls as the published ones of each format do; checkpoints with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checkpoints.families import make_checkpoint

_LOOP = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
_END = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
_JSON = '{"name": "{{ call.function.name }}", "KEY": {{ call.function.arguments | tojson }}}'


def _template(call: str, tools: str = "{{ tools | tojson }}", before: str = "", after: str = "") -> str:
    """``before`` and ``after``: around the calls of a message that has some."""
    calls = f"{{% for call in message.tool_calls %}}{call}{{% endfor %}}"
    if before:
        calls = f"{{% if message.tool_calls %}}{before}{calls}{after}{{% endif %}}"
    return f"{{% if tools %}}{tools}{{% endif %}}{_LOOP}{calls}{_END}"


HERMES = (
    _template(
        f"<tool_call>\n{_JSON.replace('KEY', 'arguments')}\n</tool_call>",
        tools="<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>",
    )
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>{% endif %}"
)
QWEN3_CODER = _template(
    "<tool_call>\n<function={{ call.function.name }}>\n{% for key, value in call.function.arguments | items %}"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
LLAMA3 = _template(_JSON.replace("KEY", "parameters"), tools="Environment: ipython <|python_tag|> {{ tools | tojson }}")
LLAMA3_2 = LLAMA3.replace(
    "Environment: ipython <|python_tag|>",
    'Respond as {"name": function name, "parameters": dictionary of argument name and its value}.',
)
MISTRAL = _template(_JSON.replace("KEY", "arguments"), before="[TOOL_CALLS] [", after="]")
MISTRAL_V11 = _template("[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}")
GRANITE = _template("", before="<|tool_call|>{{ message.tool_calls | tojson }}")
DEEPSEEK_V31 = _template(  # it joins the arguments to a text
    "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call.function.name + "
    "'<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}"
)
PLAIN = _LOOP + _END + "{# tools and tool_calls are named here alone, where nobody reads them: tools #}"

TEMPLATES = {  # of each format: the template, and which of its markers are special tokens there
    "hermes": (HERMES, ()),
    "qwen3_coder": (QWEN3_CODER, ("<tool_call>", "</tool_call>")),
    "llama3_json": (LLAMA3, ("<|python_tag|>",)),
    "mistral": (MISTRAL, ("[TOOL_CALLS]",)),
    "mistral_v11": (MISTRAL_V11, ("[TOOL_CALLS]", "[ARGS]")),
    "granite": (GRANITE, ("<|tool_call|>",)),
    "deepseek_v31": (DEEPSEEK_V31, ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")),
}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A function whose arguments all are required."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": schema}}


def make_tool_checkpoint(folder: Path, template: str, special: Sequence[Any], added: Sequence[Any] = ()) -> Path:
    """A tiny decoder with this chat template, these special tokens and other added ones, saved in ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_checkpoint("llama", folder)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.add_tokens(list(added))
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder
