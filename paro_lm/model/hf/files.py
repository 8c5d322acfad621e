"""The weights of a Hugging Face checkpoint on disk: one file or several with an index, safetensors or (when asked for) pickles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paro_lm.model.hf.config import read_json

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorFiles(Protocol):
    """Tensors by name; `read` gives the box of `region`, one slice per dim, and touches no more of the file than that."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]: ...

    def read(self, name: str, region: Sequence[slice]) -> Tensor: ...


class SafetensorsFiles:
    """safetensors files, mapped into memory: pages are read when a slice of them is used."""

    def __init__(self, paths: Sequence[Path]) -> None:
        from safetensors import safe_open

        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        for path in paths:
            try:
                file = safe_open(str(path), framework="pt")
            except FileNotFoundError:
                raise ValueError(f"{path} is missing, though the index names it; download the checkpoint again.") from None
            except Exception as error:
                raise ValueError(
                    f"{path} is not a complete safetensors file ({path.stat().st_size} bytes: {error}); download it again."
                ) from error
            for name in file.keys():  # noqa: SIM118 (no mapping)
                self._add(name, path, file)

    def _add(self, name: str, path: Path, file: Any) -> None:
        if name in self._files:
            raise ValueError(f"{name} is in {self._paths[name]} and in {path}; remove one of the files.")
        header = file.get_slice(name)
        kind = header.get_dtype()
        if kind in DTYPES:  # others (masks of older files) can only be ignored
            self._dtypes[name] = DTYPES[kind]
        self._shapes[name], self._files[name], self._paths[name] = tuple(header.get_shape()), file, path

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return self._dtypes

    def read(self, name: str, region: Sequence[slice]) -> Tensor:
        return self._files[name].get_slice(name)[tuple(region)]


class PickleFiles:
    """`.bin` files of torch.save, read by torch's restricted unpickler and mapped into memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._tensors: dict[str, Tensor] = {}
        for path in paths:
            try:
                self._tensors.update(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
            except FileNotFoundError:
                raise ValueError(f"{path} is missing, though the index names it; download the checkpoint again.") from None
            except Exception as error:
                raise ValueError(f"{path} cannot be read as a file of tensors ({error}); download it again.") from error
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in self._tensors.items() if tensor.dtype in DTYPES.values()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return self._dtypes

    def read(self, name: str, region: Sequence[slice]) -> Tensor:
        return self._tensors[name][tuple(region)]


def open_files(folder: Path, *, allow_pickle: bool = False) -> TensorFiles:
    """The weights in a folder. Raises ValueError, naming the file, when there are none, or one is missing, damaged or not allowed."""
    found = _named_files(folder, SAFETENSORS)
    if found:
        return _checked(folder, SAFETENSORS, found, SafetensorsFiles)
    found = _named_files(folder, PICKLE)
    if found and not allow_pickle:
        raise ValueError(
            f"{folder} holds its weights only as pickles ({found[0].name}), which are made to run code. If you trust where they come "
            f"from, convert them once: paro-export run={folder} to=<new folder> allow_pickle=true"
        )
    if found:
        return _checked(folder, PICKLE, found, PickleFiles)
    raise ValueError(f"{folder} has no weights: neither {SAFETENSORS} nor {SAFETENSORS}.index.json; download the checkpoint again.")


def _index(folder: Path, name: str) -> Path:
    return folder / f"{name}.index.json"


def _named_files(folder: Path, name: str) -> list[Path]:
    """One file of that name, or all files that its index names."""
    if (folder / name).is_file():
        return [folder / name]
    if not _index(folder, name).is_file():
        return []
    weights = read_json(_index(folder, name)).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise ValueError(f"{_index(folder, name)} has no weight_map; download the checkpoint again.")
    return [folder / file for file in sorted(set(weights.values()))]


def _checked(folder: Path, name: str, paths: list[Path], read: Callable[[list[Path]], TensorFiles]) -> TensorFiles:
    files = read(paths)
    if paths != [folder / name]:
        lacking = sorted(set(read_json(_index(folder, name))["weight_map"]) - set(files.shapes))
        if lacking:
            raise ValueError(f"{_index(folder, name)} names tensors that its files lack: {', '.join(lacking[:10])}; download them again.")
    return files
