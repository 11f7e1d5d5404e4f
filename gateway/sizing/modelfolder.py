"""Read a local model folder: config.json, and of the weights only their headers.

The files that count are vLLM's choice: those of model.safetensors.index.json, else every *.safetensors,
else *.bin (vLLM model_executor/model_loader/default_loader.py, `_prepare_weights`;
weight_utils.py, `filter_duplicate_safetensors_files`). Their tensors count, except those of layers
that only speculative decoding uses, and an output head that is the input embedding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gateway.sizing.kvcaches import Dtype
from gateway.sizing.modelconfig import ModelConfig, ModelShapeError
from gateway.sizing.modelshape import ModelShape, Weights, is_tied

_INDEX: Final = "model.safetensors.index.json"
_HEADER_LENGTH_BYTES: Final = 8  # little-endian, before the JSON header of a safetensors file
_LARGEST_HEADER_BYTES: Final = 100_000_000  # the format's own limit
_LARGEST_CONFIG_BYTES: Final = 16 << 20
_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_TOWER: Final = re.compile(r"vision|visual|audio|image|projector|encoder")
_EMBEDDING: Final = re.compile(r"(?:^|\.)(?:embed_tokens|embedding|wte|word_embeddings)\.weight$")
_HEAD: Final = re.compile(r"(?:^|\.)(?:lm_head|output_layer|embed_out)\.")
_DRAFT: Final = re.compile(r"^(?:model\.)?mtp\.")  # heads of multi-token prediction
_FLOATS: Final = {"F32": Dtype.FLOAT32, "F16": Dtype.FLOAT16, "BF16": Dtype.BFLOAT16}


class ModelFolderError(ValueError):
    """A folder is no model, or an incomplete one, or its model is not known here. The message says why."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: str
    size_bytes: int


def read_model(folder: Path) -> ModelShape:
    """Return the shape of the model in a folder. Reads the headers of its weights, not the data.

    Raises:
        ModelFolderError: it is no folder, has no config.json or no weights, or some are missing.
    """
    config = _config(folder)
    tensors = _tensors(folder)
    try:
        if tensors is None:
            return ModelShape.of_config(config, _unread_bytes(folder))
        weights = _weights(ModelConfig(config), tensors)
        return ModelShape.of_config(config, weights.total_bytes, weights)
    except ModelShapeError as error:
        raise ModelFolderError(f"{folder}: {error}") from error


def _config(folder: Path) -> Mapping[str, object]:
    if not folder.is_dir():
        raise ModelFolderError(
            f"{folder} is not a folder; pass a folder with config.json and weights"
        )
    file = folder / "config.json"
    if not file.is_file():
        raise ModelFolderError(f"{folder} has no config.json; is it a model folder?")
    if file.stat().st_size > _LARGEST_CONFIG_BYTES:
        raise ModelFolderError(f"{file} is too large to be a configuration")
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelFolderError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelFolderError(f"{file} is not a JSON object")
    return config


def _tensors(folder: Path) -> list[_Tensor] | None:
    """Return the tensors that vLLM would load; None: their format is not read here."""
    named = _indexed(folder)
    files = sorted(folder.glob("*.safetensors")) if named is None else named
    whole = [file for file in files if not file.name.startswith("consolidated")]
    if not files:
        return None
    return [tensor for file in whole or files for tensor in _header(file)]


def _indexed(folder: Path) -> list[Path] | None:
    """Return the files that the index lists; None where there is no index."""
    file = folder / _INDEX
    if not file.is_file():
        return None
    try:
        names = sorted(set(json.loads(file.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFolderError(f"{file} does not say which file contains which weight") from error
    files = [folder / Path(str(name)).name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelFolderError(f"{folder} is missing {missing[0]}{more}, listed in {_INDEX}")
    return files


def _header(file: Path) -> Iterator[_Tensor]:
    """Yield the tensors that the header of a safetensors file lists."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_HEADER_LENGTH_BYTES), "little")
        if not 2 <= length <= min(_LARGEST_HEADER_BYTES, size - _HEADER_LENGTH_BYTES):
            raise ModelFolderError(f"{file} is not a complete safetensors file ({size} bytes)")
        raw = opened.read(length)
    try:
        header = json.loads(raw)
        spans = {
            name: (entry["dtype"], *entry["data_offsets"])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFolderError(f"the header of {file} cannot be read") from error
    end = _HEADER_LENGTH_BYTES + length + max((last for _, _, last in spans.values()), default=0)
    if end > size:
        raise ModelFolderError(f"{file} is incomplete: {size} of {end} bytes")
    for name, (dtype, first, last) in spans.items():
        yield _Tensor(name, str(dtype), last - first)


def _unread_bytes(folder: Path) -> int:
    """Return the size of weights in a pickled format."""
    for pattern in ("*.bin", "*.pt"):
        files = [file for file in folder.glob(pattern) if not file.name.startswith("training")]
        if files:
            return sum(file.stat().st_size for file in files)
    raise ModelFolderError(f"{folder} has no weights (*.safetensors or *.bin)")


def _weights(model: ModelConfig, tensors: list[_Tensor]) -> Weights:
    """Add up what is loaded, by layer, embedding and head."""
    by_layer = [0] * model.layers
    embedding = head = rest = 0
    floats: dict[Dtype, int] = {}
    tied = is_tied(model)
    for tensor in tensors:
        layer = _layer_of(tensor.name)
        is_head = layer is None and _HEAD.search(tensor.name) is not None
        unused = is_head and tied or layer is not None and layer >= len(by_layer)
        if unused or _DRAFT.match(tensor.name):
            continue
        if tensor.dtype in _FLOATS:
            found = _FLOATS[tensor.dtype]
            floats[found] = floats.get(found, 0) + tensor.size_bytes
        if layer is not None:
            by_layer[layer] += tensor.size_bytes
        elif is_head:
            head += tensor.size_bytes
        elif _EMBEDDING.search(tensor.name):
            embedding += tensor.size_bytes
        else:
            rest += tensor.size_bytes
    total = sum(by_layer) + embedding + head + rest
    most = max(floats, key=lambda dtype: floats[dtype], default=None)
    stored = None if model.quantization is not None else most
    return Weights(total, embedding, head, tuple(by_layer), stored)


def _layer_of(name: str) -> int | None:
    """Return the number of the decoder layer of a tensor; None: it is of none, or of an encoder."""
    found = _LAYER.search(name)
    if found is None or _TOWER.search(name[: found.start()]):
        return None
    return int(found[1])
