"""Small tokenizers and chat templates in short, to try conversations on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from memtrain.data.chat import Encoded
from memtrain.data.tokenizer import train_tokenizer


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


TALK = [user("a b"), answer("c d"), user("e"), answer("f")]


def byte_level(*special: str) -> PreTrainedTokenizerFast:
    """Bytes, a few merges that begin with a space, and the special tokens of a template."""
    tokenizer = train_tokenizer(["c d f said so. c d f said so."], 300)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def words(
    *, begin: bool = False, end: bool = False, special: tuple[str, ...] = ("<bos>", "<eos>", "<end>")
) -> PreTrainedTokenizerFast:
    """A token per word; sets ``<bos>`` before and ``<eos>`` behind a text of itself if asked to."""
    vocabulary = ["<unk>", "<bos>", "<eos>", "<end>", "<user>", "<assistant>", *"abcdefg"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    form = [*(["<bos>"] if begin else []), "$A", *(["<eos>"] if end else [])]
    tokenizer.post_processor = processors.TemplateProcessing(single=form, special_tokens=[("<bos>", 1), ("<eos>", 2)])
    tokenizer.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")


def learnt(tokenizer: Any, encoded: Encoded) -> str:
    """The text of what is learnt, with a bar where something that is not lies between."""
    assert len(encoded.input_ids) == len(encoded.learnt)
    runs: list[list[int]] = [[]]
    for token, counts in zip(encoded.input_ids, encoded.learnt, strict=True):
        if counts:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return "|".join(tokenizer.decode(run) for run in runs if run)


def rendered(tokenizer: Any, messages: list[dict[str, Any]], template: str, **more: Any) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=True, **more)["input_ids"]
    return ids


@dataclass(frozen=True)
class Case:
    """A template in short, its special tokens, what is learnt of TALK, and what of TALK with a question behind, if not that."""

    special: tuple[str, ...]
    learnt: str
    template: str
    followed: str = ""


CHATML_LOOP = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
ASK_CHATML = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
QWEN_THINK = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% set content = m.content if m.content is string else '' %}"
    "{% if m.role == 'assistant' %}"
    "{% set reasoning = '' %}"
    "{% if m.reasoning_content is string %}{% set reasoning = m.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{ '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{% else %}{{ content }}{% endif %}"
    "{% for call in m.tool_calls %}{{ '\n<tool_call>\n' + call.function.name + ' ' }}"
    "{{ call.function.arguments | tojson }}{{ '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)
CASES = {
    "ChatML": Case(
        ("<|im_start|>", "<|im_end|>"),
        "c d<|im_end|>|f<|im_end|>",
        "{% for m in messages %}" + CHATML_LOOP + "{% endfor %}" + ASK_CHATML,
    ),
    "Qwen2.5, with a system message of its own": Case(
        ("<|im_start|>", "<|im_end|>"),
        "c d<|im_end|>|f<|im_end|>",
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are c d.<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}" + CHATML_LOOP + "{% endfor %}" + ASK_CHATML,
    ),
    "Qwen3, which thinks in the last turn alone": Case(
        ("<|im_start|>", "<|im_end|>"),
        "c d<|im_end|>|<think>\n\n</think>\n\nf<|im_end|>",
        QWEN_THINK + ASK_CHATML,
        "c d<|im_end|>|f<|im_end|>",
    ),
    "Qwen3, asked to think": Case(
        ("<|im_start|>", "<|im_end|>"),
        "c d<|im_end|>|\n</think>\n\nf<|im_end|>",
        QWEN_THINK + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
        "c d<|im_end|>|f<|im_end|>",
    ),
    "Llama 3, which trims": Case(
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "c d<|eot_id|>|f<|eot_id|>",
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    ),
    "Llama 2, a begin for each pair and no header": Case(
        (),
        " c d <|eos|>| f <|eos|>",
        "{% for m in messages %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    ),
    "Mistral, whose header is a token": Case(
        ("[INST]", "[/INST]"),
        "c d<|eos|>|f<|eos|>",
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
        "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}",
    ),
    "Gemma, which calls the assistant model": Case(
        ("<start_of_turn>", "<end_of_turn>"),
        "c d<end_of_turn>|f<end_of_turn>",
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    ),
    "Phi-3, with the end of text where nothing is asked": Case(
        ("<|user|>", "<|assistant|>", "<|end|>"),
        "c d<|end|>|f<|end|>",
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    ),
    "DeepSeek, in wide letters": Case(
        ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        "c d<｜end▁of▁sentence｜>|f<｜end▁of▁sentence｜>",
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
        "{% else %}{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}",
    ),
    "gpt-oss, which returns at the end": Case(
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
        "<|channel|>final<|message|>c d<|end|>|<|channel|>final<|message|>f<|return|>",
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
        "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        "<|channel|>final<|message|>c d<|end|>|<|channel|>final<|message|>f<|end|>",
    ),
    "GLM, whose turns end where the next begins": Case(
        ("<|user|>", "<|assistant|>"),
        "c d|f<|eos|>",
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        "c d|f",
    ),
    "Vicuna, in words": Case(
        (),
        " c d<|eos|>| f<|eos|>",
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + '\n' }}"
        "{% else %}{{ 'ASSISTANT: ' + m.content + eos_token + '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
    ),
    "one with a header that cannot be asked for": Case(
        (),
        " c d<|eos|>| f<|eos|>",
        "{% for m in messages %}{{ m.role + ': ' + m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n"
        "{% endfor %}",
    ),
}


# chat-03: templates with and without generation tags.
TAGGED = {
    "without tags": "{{ m.content }} <end>\n",
    "with tags around the end": "{% generation %}{{ m.content }} <end>{% endgeneration %}{{ '\n' }}",
    "with tags around the end and what follows": "{% generation %}{{ m.content }} <end>\n{% endgeneration %}",
    "with tags around the words alone": "{% generation %}{{ m.content }}{% endgeneration %} <end>\n",
    "with tags that take spaces away": "{%- generation -%}\n  {{ m.content }} <end>\n  {%- endgeneration -%}\n{{ '\n' }}",
}


def tagged(name: str) -> str:
    return (
        "{% macro turn(m) %}<assistant>{{ ' ' }}" + TAGGED[name] + "{% endmacro %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ turn(m) }}{% else %}<user> {{ m.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )


QWEN = ("<|im_start|>", "<|im_end|>")


CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "d"}}}
