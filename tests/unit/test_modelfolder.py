"""Reading a model folder: which weights count, and what is said of a folder that is not whole."""

from __future__ import annotations

import json

import pytest

from gateway.sizing.kvcaches import Dtype
from gateway.sizing.modelfolder import ModelFolderError, read_model

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "torch_dtype": "bfloat16",
}
SIZES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E4M3": 1}


def tensors(dtype="BF16", **numbers):
    """Describe tensors: a name (`__` for a dot) and how many numbers it has."""
    return {name.replace("__", "."): (dtype, number) for name, number in numbers.items()}


LLAMA = tensors(
    model__embed_tokens__weight=6400,
    model__layers__0__mlp__weight=1000,
    model__layers__1__mlp__weight=3000,
    model__norm__weight=64,
    lm_head__weight=6400,
)


def safetensors(path, described, *, cut=0, junk=b""):
    place, header = 0, {"__metadata__": {"format": "pt"}}
    for name, (dtype, number) in described.items():
        end = place + number * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": [number], "data_offsets": [place, end]}
        place = end
    raw = junk or json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(place - cut))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def configure(folder, **more):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **more}))


def test_weights_are_divided_by_layer_embedding_and_head(folder):
    safetensors(folder / "model.safetensors", LLAMA)
    weights = read_model(folder).weights
    assert weights.total_bytes == 2 * (6400 + 1000 + 3000 + 64 + 6400)
    assert weights.layer_bytes == (2000, 6000)
    assert (weights.embedding_bytes, weights.head_bytes) == (12800, 12800)
    assert weights.stored is Dtype.BFLOAT16
    assert weights.stage_bytes(range(1), 2) == 12800 + 2000 + 128


def test_a_tied_head_that_is_stored_all_the_same_does_not_count(folder):
    configure(folder, tie_word_embeddings=True)
    safetensors(folder / "model.safetensors", LLAMA)
    weights = read_model(folder).weights
    assert (weights.total_bytes, weights.head_bytes) == (2 * 10464, 0)


def test_layers_that_only_speculation_uses_do_not_count(folder):
    draft = tensors(model__layers__2__mlp__weight=5000, mtp__fc__weight=700)
    safetensors(folder / "model.safetensors", LLAMA | draft)
    assert read_model(folder).weights.total_bytes == 2 * 16864


def test_a_vision_tower_counts_and_is_not_a_decoder_layer(folder):
    tower = tensors(vision_tower__encoder__layers__7__weight=500)
    safetensors(folder / "model.safetensors", LLAMA | tower)
    weights = read_model(folder).weights
    assert weights.total_bytes == 2 * (16864 + 500)
    assert weights.layer_bytes == (2000, 6000)


def test_the_index_tells_which_files_count(folder):
    half = list(LLAMA)[:3]
    safetensors(folder / "a.safetensors", {name: LLAMA[name] for name in half})
    safetensors(folder / "b.safetensors", {n: LLAMA[n] for n in LLAMA if n not in half})
    safetensors(folder / "other.safetensors", LLAMA)
    files = {name: "a.safetensors" if name in half else "b.safetensors" for name in LLAMA}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert read_model(folder).weights.total_bytes == 2 * 16864


def test_consolidated_weights_beside_the_others_are_the_same_again(folder):
    safetensors(folder / "model.safetensors", LLAMA)
    safetensors(folder / "consolidated.safetensors", LLAMA)
    assert read_model(folder).weights.total_bytes == 2 * 16864
    (folder / "model.safetensors").unlink()
    assert read_model(folder).weights.total_bytes == 2 * 16864


def test_float32_weights_are_known_for_what_they_are(folder):
    safetensors(folder / "model.safetensors", {n: ("F32", k) for n, (_, k) in LLAMA.items()})
    model = read_model(folder)
    assert model.weights.stored is Dtype.FLOAT32
    assert model.weights.loaded(model.dtype).total_bytes == model.weights.total_bytes // 2


def test_quantised_weights_count_as_they_are(folder):
    configure(folder, quantization_config={"quant_method": "fp8"})
    packed = {name: ("F8_E4M3", number) for name, (_, number) in LLAMA.items()}
    safetensors(folder / "model.safetensors", packed | tensors("F32", scale=10))
    weights = read_model(folder).weights
    assert (weights.total_bytes, weights.stored) == (16864 + 40, None)


def test_pickled_weights_count_by_the_size_of_their_files(folder):
    (folder / "pytorch_model-00001.bin").write_bytes(bytes(3000))
    (folder / "pytorch_model-00002.bin").write_bytes(bytes(2000))
    (folder / "training_args.bin").write_bytes(bytes(999))
    weights = read_model(folder).weights
    assert weights.total_bytes == 5000
    assert weights.stored is Dtype.BFLOAT16


# --- what is not whole ----------------------------------------------------------------------------


def refused(folder):
    with pytest.raises(ModelFolderError) as told:
        read_model(folder)
    assert str(folder) in str(told.value)
    return str(told.value)


def test_a_path_that_is_no_folder_is_said(folder):
    assert "is not a folder" in refused(folder / "absent")


def test_a_folder_without_a_config_is_said(folder):
    (folder / "config.json").unlink()
    assert "has no config.json" in refused(folder)


@pytest.mark.parametrize(("text", "said"), [("{", "is not JSON"), ("[1]", "not a JSON object")])
def test_a_config_that_cannot_be_read_is_said(folder, text, said):
    (folder / "config.json").write_text(text)
    assert said in refused(folder)


def test_a_config_that_tells_too_little_is_said(folder):
    safetensors(folder / "model.safetensors", LLAMA)
    (folder / "config.json").write_text('{"num_hidden_layers": 2}')
    assert "num_attention_heads" in refused(folder)


def test_a_folder_without_weights_is_said(folder):
    assert "no weights" in refused(folder)


def test_a_download_that_lacks_a_file_is_said_by_its_name(folder):
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "is missing one.safetensors and 1 more" in refused(folder)


def test_an_index_that_is_none_is_said(folder):
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "does not say which file" in refused(folder)


def test_a_file_that_ends_early_is_said(folder):
    safetensors(folder / "model.safetensors", LLAMA, cut=100)
    assert "is incomplete" in refused(folder)


def test_a_file_that_is_no_safetensors_is_said(folder):
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "is not a complete safetensors file (43 bytes)" in refused(folder)


@pytest.mark.parametrize("junk", [b"not json", b'{"a": 1}', b'{"a": {}}'])
def test_a_header_that_is_no_header_is_said(folder, junk):
    safetensors(folder / "model.safetensors", {}, junk=junk)
    assert "cannot be read" in refused(folder)
