"""A chat template with tools, as Hermes 2 Pro and Qwen 2.5 have one, and two tools."""

import json
import pathlib

import tiny_hf

from jaxlm.data.tokenizer import coder

CALLS = (
    "{% if m.tool_calls %}{% for call in m.tool_calls %}{{ '\\n' if m.content or not loop.first }}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}{{ call.function.arguments | tojson }}'
    "{{ '}\\n</tool_call>' }}{% endfor %}{% endif %}"
)
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool.function | tojson + '\\n' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}" + CALLS + "{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA = (  # the parts of Llama 3.2's that matter: a call is JSON without marks, one at a time
    "{{ tools | length if tools }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + f.name + '\", \"parameters\": ' }}{{ f.arguments | tojson + '}' }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tool(name: str, **properties) -> dict:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"{name}.", "parameters": parameters}}


WEATHER = tool("weather", city={"type": "string", "maxLength": 12})
ADD = tool(
    "add", a={"type": "integer", "minimum": 0, "maximum": 99}, b={"type": "integer", "minimum": 0, "maximum": 99}
)
TOOLS = [WEATHER, ADD]


def tokenizer(
    folder: pathlib.Path, template: str = TEMPLATE, controls: tuple[str, ...] = (), vocab_size: int = 420, **more
) -> coder.Coder:
    """A byte-level tokenizer with ChatML's tokens and further ones, written into a folder too."""
    more |= {"controls": (*tiny_hf.CHATML, *controls), "chat_template": template}
    tiny_hf.byte_level(folder, vocab_size, **more)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return coder.load(folder)


def arguments_of(tools: list[dict], name: str) -> dict:
    return next(tool["function"]["parameters"] for tool in tools if tool["function"]["name"] == name)
