"""Extracts of published chat templates: how they write reasoning, switch it, and begin a turn of the model. Each was
read in a repository of templates, mostly in llama.cpp's ``models/templates`` of 2025 and 2026, which names its source.
Left out is what writes tools and system messages."""

from __future__ import annotations

_USER = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"

QWEN3 = (  # Qwen/Qwen3-0.6B
    "{%- for message in messages %}{%- if message.role != 'assistant' %}" + _USER + "{%- else %}"
    "{%- set content = message.content %}{%- set reasoning_content = '' %}"
    "{%- if message.reasoning_content is defined and message.reasoning_content is not none %}"
    "{%- set reasoning_content = message.reasoning_content %}{%- else %}{%- if '</think>' in message.content %}"
    "{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- set reasoning_content = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n')"
    " %}{%- endif %}{%- endif %}{%- if loop.last %}"
    "{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + "
    "content.lstrip('\\n') }}{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
QWQ = (  # Qwen/QwQ-32B
    "{%- for message in messages %}{%- if message.role != 'assistant' %}" + _USER + "{%- else %}"
    "{%- set content = message.content %}{%- if not loop.last %}"
    "{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)
SMOLLM3 = (  # HuggingFaceTB/SmolLM3-3B
    "{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}"
    '{%- if enable_thinking -%}{%- set reasoning_mode = "/think" -%}{%- else -%}'
    '{%- set reasoning_mode = "/no_think" -%}{%- endif -%}'
    '{%- if messages[0].role == "system" -%}{%- if "/no_think" in messages[0].content -%}'
    '{%- set reasoning_mode = "/no_think" -%}{%- endif -%}{%- endif -%}'
    '{{- "<|im_start|>system\\nReasoning Mode: " + reasoning_mode + "\\n\\n" -}}{%- if reasoning_mode == "/think" -%}'
    '{{- "Please structure your response into two main sections: Thought and Solution using the specified format: '
    '<think> Thought section </think> Solution section.\\n\\n" -}}{%- endif -%}{{- "<|im_end|>\\n" -}}'
    '{%- for message in messages -%}{%- if message.role == "user" -%}'
    '{{ "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}'
    '{%- elif message.role == "assistant" -%}'
    '{{ "<|im_start|>assistant\\n" + message.content.lstrip("\\n") + "<|im_end|>\\n" }}{%- endif -%}{%- endfor -%}'
    '{%- if add_generation_prompt -%}{%- if reasoning_mode == "/think" -%}{{ "<|im_start|>assistant\\n" }}{%- else -%}'
    '{{ "<|im_start|>assistant\\n" + "<think>\\n\\n</think>\\n" }}{%- endif -%}{%- endif -%}'
)
DEEPSEEK_R1 = (  # deepseek-ai/DeepSeek-R1-Distill-Qwen-32B
    "{%- for message in messages -%}{%- if message['role'] == 'user' -%}{{'<｜User｜>' + message['content']}}"
    "{%- endif -%}{%- if message['role'] == 'assistant' and message['content'] is not none -%}"
    "{%- set content = message['content'] -%}{%- if '</think>' in content -%}"
    "{%- set content = content.split('</think>')[-1] -%}{%- endif -%}"
    "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{'<｜Assistant｜><think>\\n'}}{%- endif %}"
)
DEEPSEEK_V31 = (  # deepseek-ai/DeepSeek-V3.1
    "{%- if not thinking is defined -%}{%- set thinking = false -%}{%- endif -%}{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{'<｜User｜>' + message['content']}}{%- else -%}"
    "{{'<｜Assistant｜></think>' + message['content'] + '<｜end▁of▁sentence｜>'}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{'<｜Assistant｜>'}}{%- if not thinking -%}{{'</think>'}}{%- else -%}"
    "{{'<think>'}}{%- endif -%}{%- endif %}"
)
MAGISTRAL = (  # mistralai/Ministral-3-14B-Reasoning-2512
    "{%- set default_system_message = 'Your thinking process must follow the template below:[THINK]Your thoughts "
    "or/and draft.[/THINK]Here, provide a self-contained response.' %}"
    "{{- '[SYSTEM_PROMPT]' + default_system_message + '[/SYSTEM_PROMPT]' }}{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}{%- else %}"
    "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}"
    "{%- for block in message['content'] %}{%- if block['type'] == 'text' %}{{- block['text'] }}"
    "{%- elif block['type'] == 'thinking' %}{{- '[THINK]' + block['thinking'] + '[/THINK]' }}{%- endif %}{%- endfor %}"
    "{%- endif %}{{- eos_token }}{%- endif %}{%- endfor %}"
)
GLM = (  # zai-org/GLM-4.5
    "{% for m in messages %}{%- if m.role == 'user' -%}<|user|>\n{{ m.content }}"
    "{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not m.content.endswith(\"/nothink\")) "
    "else '' -}}{%- elif m.role == 'assistant' -%}<|assistant|>{%- if m.reasoning_content is string -%}"
    "{{ '\\n<think>' + m.reasoning_content.strip() +  '</think>'}}{%- else -%}{{ '\\n<think></think>' }}{%- endif -%}"
    "{%- if m.content.strip() -%}{{ '\\n' + m.content.strip() }}{%- endif -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not "
    "enable_thinking) else '' -}}{%- endif -%}"
)
GRANITE = (  # ibm-granite/granite-3.3-2b-instruct
    "{%- if thinking %}{{- '<|start_of_role|>system<|end_of_role|>Write your thoughts between <think></think> and "
    "write your response between <response></response> for each user query.<|end_of_text|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}"
    "{%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
    "{%- endfor %}"
)
GRANITE_32 = GRANITE.replace(  # ibm-granite/granite-3.2-2b-instruct
    "between <think></think> and write your response between <response></response>",
    'after "Here is my thought process:" and write your response after "Here is my response:"',
)
GEMMA4 = (  # google/gemma-4-31B-it
    "{%- macro strip_thinking(text) -%}{%- set ns = namespace(result='') -%}"
    "{%- for part in text.split('<channel|>') -%}{%- if '<|channel>' in part -%}"
    "{%- set ns.result = ns.result + part.split('<|channel>')[0] -%}{%- else -%}"
    "{%- set ns.result = ns.result + part -%}{%- endif -%}{%- endfor -%}{{- ns.result | trim -}}{%- endmacro -%}"
    "{%- if enable_thinking is defined and enable_thinking -%}{{- '<|turn>system\\n<|think|><turn|>\\n' -}}{%- endif %}"
    "{%- for message in messages -%}{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{- '<|turn>' + role + '\\n' }}{%- if role == 'model' -%}{{- strip_thinking(message['content']) -}}{%- else -%}"
    "{{- message['content'] | trim -}}{%- endif -%}{{- '<turn|>\\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}"
    "{{- '<|turn>model\\n' -}}{%- if not enable_thinking | default(false) -%}{{- '<|channel>thought\\n<channel|>' -}}"
    "{%- endif -%}{%- endif -%}"
)
GPT_OSS = (  # openai/gpt-oss-120b
    '{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}'
    '{{- "<|start|>system<|message|>Reasoning: " + reasoning_effort + "\\n\\n<|end|>" }}'
    "{%- for message in messages -%}{%- if message.role == 'assistant' -%}"
    '{%- if loop.last and not add_generation_prompt %}{%- if "thinking" in message %}'
    '{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}{%- endif %}'
    '{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}{%- else %}'
    '{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}{%- endif %}'
    '{%- elif message.role == \'user\' -%}{{- "<|start|>user<|message|>" + message.content + "<|end|>" }}{%- endif -%}'
    "{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)
SEED = (  # ByteDance-Seed/Seed-OSS-36B-Instruct
    "{%- set think_begin_token = '<seed:think>' -%}{%- set think_end_token = '</seed:think>' -%}"
    "{%- set budget_begin_token = '<seed:cot_budget_reflect>' -%}{%- if not thinking_budget is defined %}"
    "{%- set thinking_budget = -1 -%}{%- endif -%}{%- if not thinking_budget == -1 %}"
    '{{ "<seed:bos>system" }}\n{{ "thinking budget, which is " }}{{ thinking_budget }}\n{{ "<seed:eos>" }}{%- endif %}'
    '{%- for message in messages %}{{ "<seed:bos>" + message.role }}{%- if message.reasoning_content is defined %}'
    '{{ "\\n" + think_begin_token + message.reasoning_content | trim + think_end_token }}{%- endif %}'
    '{{ "\\n" + message.content | trim + "<seed:eos>" }}{%- endfor %}'
    '{%- if add_generation_prompt %}{{ "<seed:bos>assistant\\n" }}{%- if thinking_budget == 0 %}'
    "{{ think_begin_token + budget_begin_token }}{%- endif %}{%- endif %}"
)
COHERE = (  # CohereForAI/c4ai-command-r7b-12-2024
    "{%- for message in messages %}{%- if message.role == 'user' %}"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ message.content }}<|END_OF_TURN_TOKEN|>{%- else %}"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% if message.tool_calls %}"
    "<|START_THINKING|>{{ message.reasoning_content }}<|END_THINKING|>{% else %}"
    "<|START_RESPONSE|>{{ message.content }}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>{% endif %}{%- endif %}{%- endfor %}"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
)
EXAONE = (  # LGAI-EXAONE/EXAONE-Deep-2.4B
    "{% for message in messages %}{{ '[|' + message['role'] + '|]' + message['content'] }}"
    "{% if not message['role'] == 'user' %}{{ '[|endofturn|]' }}{% endif %}{% if not loop.last %}{{ '\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\\n[|assistant|]<thought>\\n' }}{% endif %}"
)
PLAIN = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}<|assistant|>"
