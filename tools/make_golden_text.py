"""A script that makes ``tests/data/golden_text``: tiny random checkpoints, and what ``transformers`` makes of texts
there.

It is run once, by hand, in an environment of its own (the project does not depend on these)::

    pip install torch transformers tokenizers
    python -m tools.make_golden_text tests/data/golden_text

Each folder is a complete Hugging Face checkpoint in the form that models of its kind have, plus ``golden.json``. That
has text prompts with their tokens (with and without special tokens around them), and conversations with their rendering
and tokens. For each there is the greedy continuation by ``generate`` and its text; two prompts have the
log-probabilities of their tokens, and two a repetition penalty. All is computed in float32 on one thread.
``settings.json`` has what other tokenizer_config.json files beside these tokenizers come to. The values there were made
with transformers 5.23.0."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tools.make_golden import LLAMA3_ROPE, SMALL, randomise

VOCAB = 416
GREEDY_TOKENS = 24
PENALTY = 1.3
# As in make_golden.py: a greedy choice closer than this would test luck.
MARGIN_MIN = 1e-3

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "the prefix of a prompt is computed once and never twice",
    "a block of tokens has a key and equal keys mean equal prefixes",
    "Übergröße, naïve café, 日本語のテキスト, emoji 🙂🙃 and numbers 0123456789",
    "def step(self, prefills, decodes): return self.engine.step(prefills, decodes)\n\tindented",
    "user assistant system, don't you'll we've",
] * 8

TEXTS = [
    "The prefix of a prompt",
    "  two leading spaces, and two behind  ",
    "naïve café, Übergröße, cafe\u0301",
    "日本語のテキスト 🙂🙃👩‍👧",
    "def step(x):\n\treturn x ** 2  # 1234 + 007\r\n",
    "don't, you'll, WE'VE",
    "{bos}a block of tokens",
    "equal keys {eos} mean {eos}equal",
    "<think>\nhm </think> a marker that is none: <|nothing|> </",
    "{empty}",
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": text}]
    for text in ("What is a block?", " leading", "naïve 日本語 🙂", "", "a\n\nb\n", "don't 12345")
] + [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": " two "},
        {"role": "user", "content": "three <|not a marker|>"},
    ],
    [{"role": "system", "content": "def f():\n    pass"}, {"role": "user", "content": "explain {{ this }} {% that %}"}],
    [{"role": "user", "content": "the prefix of a prompt " * 4}],
]

LLAMA2_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if loop.index0 == 0 and system %}"
    "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
LLAMA3_TEMPLATE = (
    "{% for message in messages %}"
    "{% set content = '<|start|>' + message['role'] + '<|sep|>\n\n' + message['content'] | trim + '<|end|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|sep|>\n\n' }}{% endif %}"
)
QWEN_TEMPLATE = """{%- if messages[0].role != 'system' %}
    {{- '<|start|>system\\nYou are a jay.<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start|>' + message.role + '\\n' + message.content + '<|end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

SPECIAL = ("<|bos|>", "<|eos|>", "<|start|>", "<|sep|>", "<|end|>")


def byte_level(digits: str, *, nfc: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS % digits), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 2,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    return tokenizer


def metaspace(*, prepend: bool) -> Tokenizer:
    """Returns a tokenizer in SentencePiece's form with byte fallback; ``prepend``: as Llama 2, else as newer ones."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=VOCAB - 259, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if prepend:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


def put_bos(tokenizer: Tokenizer, bos: str) -> Tokenizer:
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    if bos == "<s>":
        tokenizer.post_processor = template
    return tokenizer


BYTES = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
PIECES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LLAMA3 = put_bos(byte_level("{1,3}", nfc=False), "<|bos|>")
QWEN = byte_level("", nfc=True)
QWEN.post_processor = processors.ByteLevel(trim_offsets=False)

# name: configuration, model, changes, tokenizer, tokenizer_config.json, chat template, loader of the tokenizer
VARIANTS: dict[str, tuple[Any, Any, dict[str, Any], Tokenizer, dict[str, Any], str, Any]] = {
    "llama-bytes-bos": (
        *(LlamaConfig, LlamaForCausalLM, {"rope_scaling": LLAMA3_ROPE}, LLAMA3),
        *(BYTES | {"tokenizer_class": "PreTrainedTokenizerFast"}, LLAMA3_TEMPLATE, AutoTokenizer),
    ),
    "llama-pieces-bos": (
        *(LlamaConfig, LlamaForCausalLM, {}, put_bos(metaspace(prepend=True), "<s>")),
        *(PIECES | {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False}, LLAMA2_TEMPLATE),
        AutoTokenizer,
    ),
    "qwen2-bytes": (
        *(Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}, QWEN),
        *({"bos_token": None, "eos_token": "<|end|>", "add_bos_token": False, "tokenizer_class": "Qwen2Tokenizer"},),
        *(QWEN_TEMPLATE, AutoTokenizer),
    ),
    # AutoTokenizer of version 5 would put Qwen's rules for bytes around these pieces, which loses all spaces.
    "qwen2-pieces-bos": (
        *(Qwen2Config, Qwen2ForCausalLM, {}, put_bos(metaspace(prepend=False), "<s>")),
        *(PIECES | {"tokenizer_class": "PreTrainedTokenizerFast"}, LLAMA2_TEMPLATE, PreTrainedTokenizerFast),
    ),
    "qwen3-bytes": (
        *(Qwen3Config, Qwen3ForCausalLM, {"head_dim": 12}, QWEN),
        *({"eos_token": "<|end|>"}, QWEN_TEMPLATE, AutoTokenizer),
    ),
    "qwen3-pieces-bos": (
        *(Qwen3Config, Qwen3ForCausalLM, {"head_dim": 12}, put_bos(metaspace(prepend=True), "<s>")),
        *(PIECES | {"tokenizer_class": "PreTrainedTokenizerFast"}, LLAMA2_TEMPLATE, AutoTokenizer),
    ),
}


class TooClose(Exception):
    """A greedy choice hangs on rounding."""


def generated(model: Any, tokens: list[int], penalty: float = 1.0) -> list[int]:
    out = model.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        do_sample=False,
        max_new_tokens=GREEDY_TOKENS,
        repetition_penalty=penalty,
        return_dict_in_generate=True,
        output_scores=True,
    )
    for scores in out.scores:
        best = torch.topk(scores[0], 2).values
        if float(best[0] - best[1]) < MARGIN_MIN:
            raise TooClose
    made: list[int] = out.sequences[0, len(tokens) :].tolist()
    return made


def golden(model: Any, tokenizer: Any, thinks: bool) -> dict[str, Any]:
    named = {"bos": tokenizer.bos_token or "<|bos|>", "eos": tokenizer.eos_token}
    texts: list[dict[str, Any]] = []
    chats: list[dict[str, Any]] = []
    for form in TEXTS:
        empty = "" if tokenizer("").input_ids else " "
        text = form.replace("{bos}", named["bos"]).replace("{eos}", named["eos"]).replace("{empty}", empty)
        tokens = tokenizer(text).input_ids
        bare = tokenizer(text, add_special_tokens=False).input_ids
        greedy = generated(model, tokens)
        decoded = tokenizer.decode(greedy, skip_special_tokens=True)
        texts.append({"text": text, "tokens": tokens, "bare": bare, "greedy": greedy, "decoded": decoded})
    for i, messages in enumerate(CHATS):
        variables = {"enable_thinking": False} if thinks and i % 2 else {}
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **variables)
        greedy = generated(model, tokens)
        decoded = tokenizer.decode(greedy, skip_special_tokens=True)
        chats.append({"messages": messages, "variables": variables, "rendered": rendered, "tokens": tokens,
                      "greedy": greedy, "decoded": decoded})  # fmt: skip
    scored, penalised = [], []
    for case in texts[:2]:
        tokens = case["tokens"]
        rows = torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), -1)
        logprobs = [round(float(rows[i, token]), 6) for i, token in enumerate(tokens[1:])]
        scored.append({"tokens": tokens, "logprobs": logprobs})
        greedy = generated(model, tokens, PENALTY)
        penalised.append({"tokens": tokens, "repetition_penalty": PENALTY, "greedy": greedy})
    return {"texts": texts, "chats": chats, "scored": scored, "penalised": penalised}


def make(folder: Path, name: str) -> None:
    config_class, model_class, changes, tokenizer, settings, template, loader = VARIANTS[name]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    if name == "qwen3-bytes":
        (folder / "chat_template.jinja").write_text(template)
    elif name.startswith("qwen2-bytes"):
        named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
        settings = settings | {"chat_template": named}
    else:
        settings = settings | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False, indent=1) + "\n")
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None}
    for seed in range(200):
        model = model_class(config_class(**{**SMALL, **sizes, **changes})).eval()
        randomise(model, seed)
        model.to(torch.bfloat16).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        try:
            with torch.no_grad():
                values = golden(wide, loader.from_pretrained(folder), name == "qwen3-bytes")
        except TooClose:
            continue
        break
    else:
        raise SystemExit(f"{name}: no seed has a margin of {MARGIN_MIN}")
    config = json.loads((folder / "config.json").read_text())
    eos = tokenizer.token_to_id(settings["eos_token"])
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": eos}, indent=1) + "\n")
    lines = [f' "{part}": [\n  ' + ",\n  ".join(json.dumps(each, ensure_ascii=False) for each in values[part]) + "\n ]"
             for part in values]  # fmt: skip
    (folder / "golden.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{name}: seed {seed}, vocabulary {tokenizer.get_vocab_size()}")


ODD_TEXTS = ["a 12345 don't", " <s>x</s> y ", "<|bos|>\nkey <|end|> <|new|>", "<think> the prefix </think>"]
KEY = {"__type": "AddedToken", "content": "key", "lstrip": True, "normalized": False}
ODD: list[tuple[str, str, dict[str, Any]]] = [
    ("llama-pieces-bos", "llama", {}),
    ("llama-pieces-bos", "llama", {**PIECES, "add_bos_token": False, "add_eos_token": True}),
    ("llama-pieces-bos", "llama", {**PIECES, "tokenizer_class": "LlamaTokenizerFast", "legacy": True}),
    ("llama-pieces-bos", "llama", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}),
    ("llama-pieces-bos", "llama", {"tokenizer_class": "LlamaTokenizer", "additional_special_tokens": ["the", "key"]}),
    ("llama-bytes-bos", "llama", {**BYTES, "tokenizer_class": "LlamaTokenizer"}),
    ("llama-bytes-bos", "qwen2", {**BYTES, "tokenizer_class": "PreTrainedTokenizerFast"}),
    ("llama-bytes-bos", "qwen3", {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "key"}),
    ("qwen3-bytes", "qwen3", {"tokenizer_class": "Qwen2TokenizerFast", "add_bos_token": True, "bos_token": "<|bos|>"}),
    ("qwen3-bytes", "llama", {"extra_special_tokens": ["<think>"], "eos_token": KEY}),
    ("qwen2-bytes", "qwen2", {"added_tokens_decoder": {"4": {"content": "<|end|>", "lstrip": True, "special": True}}}),
    ("qwen2-bytes", "llama", {"added_tokens_decoder": {"4": {"content": "<|end|>", "rstrip": True, "special": False}}}),
]
"""Checkpoints, model types and tokenizer_config.json files, in combinations that are rare or contradict each other."""


def make_odd(folder: Path) -> None:
    cases = []
    for name, model_type, settings in ODD:
        with tempfile.TemporaryDirectory() as odd:
            shutil.copy(folder / name / "tokenizer.json", odd)
            Path(odd, "config.json").write_text(json.dumps({"model_type": model_type}))
            Path(odd, "tokenizer_config.json").write_text(json.dumps(settings))
            tokenizer = AutoTokenizer.from_pretrained(odd)
            values = [{"text": text, "tokens": tokenizer(text).input_ids} for text in ODD_TEXTS]
        named = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        cases.append({"checkpoint": name, "model_type": model_type, "settings": settings, "texts": values,
                      "named": named})  # fmt: skip
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (folder / "settings.json").write_text(f"[\n{lines}\n]\n")


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for name in VARIANTS:
        make(folder / name, name)
    make_odd(folder)


if __name__ == "__main__":
    main()
