"""A Hugging Face checkpoint as a source of parameters for any layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from paro_lm.model.hf.config import model_from_hf, read_json
from paro_lm.model.hf.files import open_files
from paro_lm.model.hf.hub import hf_folder
from paro_lm.model.spec import ParameterSpec
from paro_lm.model.transformer import Transformer

MAX_NAMES = 8
EMBEDDING, OUTPUT = "embedding.tokens.weight", "head.output.weight"


class HFCheckpoint:
    """A folder (or hub id) of a supported architecture, its files checked and open, nothing of the weights read yet.

        checkpoint = HFCheckpoint(folder)
        specs = model.parameter_specs()
        build_engine(cfg, model, ..., value_of=lambda name: checkpoint.value_of(name, specs[name]))

    values       its config.json
    model        the options of the model, vocab_size included
    specs        every parameter, whole
    dtype        the type of the embedding, which stands for the model
    Raises ValueError for an architecture or option that is not supported, and naming every tensor that is missing, left over or of
    a wrong shape.
    """

    def __init__(self, source: Path | str, *, allow_pickle: bool = False) -> None:
        self.folder = hf_folder(source, allow_pickle=allow_pickle)
        self.values = read_json(self.folder / "config.json")
        self.family, self.model = model_from_hf(self.values, where=self.folder / "config.json")
        assert self.model.vocab_size is not None
        self.vocab_size: int = self.model.vocab_size
        with torch.device("meta"):
            self.specs = Transformer(self.model, vocab_size=self.vocab_size).parameter_specs()
        self._files = open_files(self.folder, allow_pickle=allow_pickle)
        self._bare = not any(name.startswith(self.family.prefix) for name in self._files.shapes)
        self._names = {name: self._stored_name(self.family.place(name).name) for name in self.specs}
        self._twin: str | None = None
        if self.model.tie_embeddings:
            self._find_tied()
        self._check()
        self.dtype = self.dtype_of(EMBEDDING)

    def dtype_of(self, name: str) -> torch.dtype:
        """The stored type of a parameter."""
        return self._files.dtypes[self._names[name]]

    def value_of(self, name: str, spec: ParameterSpec | None = None) -> Tensor:
        """The box of a parameter that `spec` describes (None: all of it), in the stored type, on the CPU; padded rows are zero.

        Only that box of the file is read, as a view into the mapped file where it can be.
        Raises ValueError for a parameter that the checkpoint does not have, and when its rows are not those of `spec`.
        """
        if name not in self.specs:
            raise ValueError(f"{self.folder} has no parameter {name}; the model of the run must have the options of its config.json.")
        own, spec = self.specs[name], spec or self.specs[name]
        rows = valid_shape(spec)[0]
        if valid_shape(spec) != valid_shape(own):
            raise ValueError(f"{name}: the model wants the shape {valid_shape(spec)}, {self.folder} has {valid_shape(own)}.")
        value = self._read(self._names[name], name, spec)
        if name == EMBEDDING and self._twin is not None and not torch.equal(value, self._read(self._twin, name, spec)):
            raise ValueError(
                f"{self.folder}: config.json says tie_word_embeddings=true, but {self._names[name]} and {self._twin} differ; "
                "set it to false to keep both."
            )
        if spec.offset[0] + spec.local_shape[0] <= rows:
            return value
        padded = value.new_zeros(spec.local_shape)
        padded[: value.shape[0]] = value
        return padded

    def _read(self, stored: str, name: str, spec: ParameterSpec) -> Tensor:
        """The box without rows of padding."""
        place, rows = self.family.place(name), valid_shape(spec)[0]
        region = [slice(start, start + size) for start, size in zip(spec.offset, spec.local_shape, strict=True)]
        first, last = (min(edge, rows) + place.part * rows for edge in (region[0].start, region[0].stop))
        region[0] = slice(first, last)
        if first == last:
            return torch.zeros((0, *spec.local_shape[1:]), dtype=self._files.dtypes[stored])
        return self._files.read(stored, region[::-1]).t() if place.transposed else self._files.read(stored, region)

    def _stored_name(self, name: str) -> str:
        return name.removeprefix(self.family.prefix) if self._bare else name

    def _find_tied(self) -> None:
        """A tied matrix may be stored under either name, or under both."""
        output = self.family.place(OUTPUT).name
        if output not in self._files.shapes:
            return
        if self._names[EMBEDDING] in self._files.shapes:
            self._twin = output
        else:
            self._names[EMBEDDING] = output

    def _check(self) -> None:
        expected = {self._names[name]: self._stored_shape(name) for name in self.specs}
        if self._twin is not None:
            expected[self._twin] = expected[self._names[EMBEDDING]]
        stored: Mapping[str, tuple[int, ...]] = self._files.shapes
        ignored = {name for name in stored if name not in expected and self.family.is_ignored(name)}
        problems = [
            _listed("missing", sorted(expected.keys() - stored.keys())),
            _listed("unknown", sorted(stored.keys() - expected.keys() - ignored)),
            _listed(
                "of a wrong shape",
                [
                    f"{name} (file {stored[name]}, config.json {expected[name]})"
                    for name in expected
                    if stored.get(name, expected[name]) != expected[name]
                ],
            ),
            _listed("of an unsupported type", sorted((expected.keys() & stored.keys()) - self._files.dtypes.keys())),
        ]
        told = [problem for problem in problems if problem]
        if told:
            raise ValueError(f"{self.folder} does not fit its config.json ({self.family.architecture}): {'; '.join(told)}.")

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        place, shape = self.family.place(name), valid_shape(self.specs[name])
        shape = (shape[0] * place.parts, *shape[1:])
        return shape[::-1] if place.transposed else shape


def valid_shape(spec: ParameterSpec) -> tuple[int, ...]:
    """The shape without rows of padding."""
    return (spec.shape[0] if spec.valid_rows is None else spec.valid_rows, *spec.shape[1:])


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{len(names)} {'tensor' if len(names) == 1 else 'tensors'} {what}: {', '.join(names[:MAX_NAMES])}{more}"
