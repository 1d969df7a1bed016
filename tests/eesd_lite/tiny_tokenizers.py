"""Tiny tokenizers of the kinds that models use, trained on a few sentences and saved as model folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "Hello world, how are you? I am fine, thank you very much.",
    "The quick brown fox jumps over the lazy dog. User: system assistant",
    "What is the capital of France? The capital of France is Paris.",
    "one two three four five six seven eight nine ten ... 'quoted' words",
    "naïve café über Straße",
] * 3

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)


def byte_level(folder: Path, template: str | None = CHATML, *, add_bos: bool = False, **settings: Any) -> Path:
    """GPT-2 style with ChatML markers: ids 0 <|endoftext|>, 1 <|im_start|>, 2 <|im_end|>. An emoji is four tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    _train(tokenizer, special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
        settings["bos_token"] = "<|endoftext|>"
    return save(folder, tokenizer, {"eos_token": "<|im_end|>", "chat_template": template, **settings})


def sentencepiece(folder: Path, template: str | None = LLAMA2, *, prefix: str = "normalizer", **settings: Any) -> Path:
    """Llama 2 style: ids 0 <unk>, 1 <s>, 2 </s>, then <0x00> to <0xFF>; a BOS before every text.

    `prefix`: how the space before the first word comes about, as a normalizer (before every piece of text that stands
    between special tokens) or as Metaspace "first" (at the start of the whole text only).
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if prefix == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"]
    _train(tokenizer, [*special, *(f"<0x{byte:02X}>" for byte in range(256))])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in special]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return save(folder, tokenizer, {**names, "chat_template": template, **settings})


def metaspace(folder: Path, **settings: Any) -> Path:
    """Metaspace on both sides (T5 style), a Unigram model that has its control tokens in the plain vocabulary too."""
    pieces = [("<unk>", 0.0), ("</s>", -1.0), ("<turn>", -1.0), ("▁", -2.0)]
    words = sorted({word for line in CORPUS for word in line.split()})
    pieces += [(f"▁{word}", -4.0) for word in words] + [(chr(c), -8.0) for c in range(33, 127)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>", "<turn>"])
    return save(folder, tokenizer, {"eos_token": "</s>", **settings})


def wordpiece(folder: Path, **settings: Any) -> Path:
    """A decoder that is none of the usual ones."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    )
    return save(folder, tokenizer, {"eos_token": "[SEP]", **settings})


def save(folder: Path, tokenizer: Tokenizer, settings: dict[str, Any]) -> Path:
    """A model folder with a tokenizer and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    settings = {name: value for name, value in settings.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def _train(tokenizer: Tokenizer, special: list[str], **options: Any) -> None:
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False, **options)
    tokenizer.train_from_iterator(CORPUS, trainer)
