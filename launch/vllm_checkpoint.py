"""Writes a small Llama with random weights, a byte-level tokenizer and a chat template; run by the Python that has
vLLM. Its answers are nonsense, but each prompt has its own."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

SPECIAL = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] or '' }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTEXT = 8192


def write_checkpoint(
    folder: Path, *, hidden: int = 128, layers: int = 4, heads: int = 4, seed: int = 0, text: int = 0
) -> None:
    """Writes the checkpoint. The defaults compute 2,000 tokens in a quarter of a second.

    With ``text`` its answers have letters, digits and signs only, each token one: other front ends send nothing for a
    token that is no text yet."""
    torch, transformers, tokenizers = map(import_module, ("torch", "transformers", "tokenizers"))
    folder.mkdir(parents=True, exist_ok=True)
    _tokenizer(tokenizers, transformers).save_pretrained(folder)
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=384,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        max_position_embeddings=CONTEXT,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=262,
        tie_word_embeddings=False,
        # wide enough for different answers to different prompts
        initializer_range=0.3 * (128 / hidden) ** 0.5,
    )
    config.dtype = torch.float32
    model = transformers.LlamaForCausalLM(config).to(torch.float32)
    if text:
        kept = {number for number, letter in enumerate(_alphabet(tokenizers)) if "!" <= letter <= "~"}
        with torch.no_grad():
            for number in set(range(config.vocab_size)) - kept:
                model.lm_head.weight[number] = 0.0  # some of the others is always above 0
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # containers read it as another user


def _alphabet(tokenizers: Any) -> list[str]:
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def _tokenizer(tokenizers: Any, transformers: Any) -> Any:
    model = tokenizers.models.BPE(
        vocab={letter: number for number, letter in enumerate(_alphabet(tokenizers))}, merges=[]
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        pad_token=SPECIAL[-1],
        model_max_length=CONTEXT,
        chat_template=CHAT_TEMPLATE,
    )


if __name__ == "__main__":
    numbers = {name: int(value) for name, _, value in (each.partition("=") for each in sys.argv[2:])}
    write_checkpoint(Path(sys.argv[1]), **numbers)
