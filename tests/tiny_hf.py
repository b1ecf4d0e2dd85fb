"""Small Hugging Face folders for tests, made without PyTorch: tokenizers of both kinds, weights, config.json."""

import json
import pathlib

import numpy as np
import safetensors.numpy
import tiny_models as tiny

from jaxlm import models
from jaxlm.devices import tree
from jaxlm.interop import hf_config, hf_folder, leaves

TEXTS = (
    "the cat sat on the mat and the dog ran after it.\n\tdef f(x):\n    return x + 12345\n",
    "Prose of no great worth, but with commas; and é, ü, 日本語 beside them.",
)


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
LLAMA3_TEMPLATE = (
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + strftime_now('%d %b %Y') + '<|eot_id|>' }}"
    "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def llama3(folder: pathlib.Path, template: str = LLAMA3_TEMPLATE, **model) -> None:
    """Writes a random model as Llama 3 is: its template names the day, and generation_config.json what ends an answer."""
    byte_level(folder, controls=LLAMA3, eos_token=LLAMA3[0], **({"chat_template": template} if template else {}))
    weights(folder, vocab_size=400, **model)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 4, 3]}')


def byte_level(
    folder: pathlib.Path, vocab_size: int = 400, controls: tuple[str, ...] = CHATML, texts=TEXTS, **settings
) -> None:
    """Writes a byte-level BPE tokenizer, as GPT-2, Llama 3 and Qwen have; `settings` go to tokenizer_config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*controls], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*texts] * 3, trainer)
    _write(folder, json.loads(tokenizer.to_str()), {"eos_token": "<|endoftext|>"} | settings)


def byte_fallback(folder: pathlib.Path, **settings) -> None:
    """Writes a tokenizer with byte fallback and a space in front of each text, as Llama 2 and TinyLlama have."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    controls = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=controls, show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat and ran"] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [added for added in spec["added_tokens"] if added["id"] < 3]  # bytes are no control tokens
    _write(folder, spec, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | settings)


def _write(folder: pathlib.Path, spec: dict, settings: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | settings))


def weights(folder: pathlib.Path, files: int = 1, dtype=None, **model) -> tuple:
    """Writes weights and config.json of a random tiny model; returns (its config, its parameters)."""
    config = tiny.model_config(**model)
    params = tiny.random_params(models.build(config, "xla"))
    state = params_to_hf(params, config)
    if dtype is not None:
        state = {name: value.astype(dtype) for name, value in state.items()}
    save(folder, state, files)
    (folder / "config.json").write_text(json.dumps(hf_config.content(config) | {"eos_token_id": 0}))
    return config, params


def save(folder: pathlib.Path, state: dict, files: int = 1) -> None:
    """Writes tensors into one file, or into several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    if files == 1:
        safetensors.numpy.save_file(state, folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    of = {tensor: names[i % files] for i, tensor in enumerate(state)}
    for name in names:
        safetensors.numpy.save_file({t: v for t, v in state.items() if of[t] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": of}))


def params_of(state: dict, config) -> dict:
    """Our parameters (float32 numpy) for a Hugging Face state dict; the padding rows of the vocabulary become zero."""
    hf_folder.check_tensors({name: tuple(value.shape) for name, value in state.items()}, config)
    params: list[tuple[str, np.ndarray]] = []
    for tensor in leaves.tensors(config):
        value = np.asarray(state[tensor.name], np.float32)
        params += [(leaf, tensor.to_leaf(value, place)) for place, leaf in enumerate(tensor.leaves)]
    return tree.nested(params)


def params_to_hf(params: dict, config) -> dict[str, np.ndarray]:
    """The Hugging Face state dict (float32 numpy) for our parameters: no padding rows, no `lm_head` if embeddings are tied."""
    values = {name: np.asarray(leaf, np.float32) for name, leaf in tree.named_leaves(params)}
    return {t.name: t.from_leaves([values[leaf] for leaf in t.leaves]) for t in leaves.tensors(config)}
