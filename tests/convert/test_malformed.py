# SPDX-License-Identifier: Apache-2.0
"""Files that nobody vouches for: one sentence and nothing left behind, or a file that opens."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from sparge.cogvideox.layout import POSITIONS
from sparge.cogvideox.tensor_file import HEADER_LIMIT
from tests.convert.parts import ROTARY, SINCOS, published
from tools.convert_cogvideox.convert import main

MEMORY = 100 << 20
NAME = "transformer_blocks.0.attn1.to_q.weight"
OTHER = NAME.replace("to_q", "to_k")  # of the same size

Header = dict[str, Any]
Convert = Callable[..., str]


@pytest.fixture(scope="module")
def model() -> bytes:
    """One shard of a whole model, of one head and one block."""
    generator = torch.Generator().manual_seed(7)
    return save(published(generator, heads=1, layers=1, time=16, text=16, out=16))


@pytest.fixture
def parts(model: bytes) -> tuple[Header, bytes]:
    length = struct.unpack("<Q", model[:8])[0]
    return json.loads(model[8 : 8 + length]), model[8 + length :]


def join(header: bytes | Header, tensors: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + tensors


@pytest.fixture
def convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Convert:
    """convert(shard, config): the sentence, empty where the shard was converted."""
    source, out = tmp_path / "in", tmp_path / "out" / "model.safetensors"
    for folder in (source, out.parent):
        folder.mkdir()

    def convert(shard: bytes, config: bytes | dict | None = ROTARY) -> str:
        (source / "model.safetensors").write_bytes(shard)
        data = config if isinstance(config, bytes) else json.dumps(config).encode()
        (source / "config.json").write_bytes(data)
        code = main([str(source), "--out", str(out)])
        said, error = capsys.readouterr()
        if code == 0:
            with safe_open(out, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it cannot be iterated
                    file.get_tensor(name)
            out.unlink()
            assert error == ""
        else:
            assert code == 1 and said == ""
            assert error.startswith("not converted: ") and error.count("\n") == 1
            assert error[:-1].isprintable() and len(error) < 1500
        assert list(out.parent.iterdir()) == [], "nothing is left behind"
        return error

    return convert


def test_the_model_itself_is_converted(convert: Convert, model: bytes) -> None:
    assert convert(model) == convert(model, SINCOS | {"sample_frames": 1}) == ""
    nothing = dict.fromkeys((*WHOLE, *SCALES)) | {"sample_frames": 1}
    assert convert(model, SINCOS | nothing) == "", "null is the usual value"


#: Values that no field of a tensor and none of a config may have, whatever the field.
WEIRD: list[Any] = [
    -5, 1e-300, 10**400, True, "2", "BF16\n", "\ud800", "\x1b[31m", "x" * 100_000, [], {}, [0],
    [-64, -64], [64.0, 64.0], ["64", 64], [True, False], [10**400, 10**400], [[64], [64]],
    [1] * 50_000, float("nan"), float("inf"),
]  # fmt: skip
#: Values of a tensor's own fields that are of the right kind, and wrong.
WRONG: dict[str, list[Any]] = {
    "data_offsets": [[0, 0], [2, 0], [0, 1, 2], [0, 2**63], None, 5],
    "dtype": ["F32", "NOPE", None, 5],
    "shape": [[64, 65], [128, 32], [0, 64], [10**4000] * 8, [1] * 100 + [64, 64], None, 5],
    "": [None, 5, {"dtype": "BF16"}],
}


@pytest.mark.parametrize("field", WRONG)
def test_a_tensor_described_wrongly(convert: Convert, parts: tuple[Header, bytes], field) -> None:
    header, tensors = parts
    for value in [*WEIRD, *WRONG[field]]:
        entry = header[NAME] | {field: value} if field else value
        assert convert(join(header | {NAME: entry}, tensors)), str(value)[:80]


def moved(header: Header, first: Callable[[int], int]) -> Header:
    """All tensors begin elsewhere, and are as long as before."""
    placed = {name: entry["data_offsets"] for name, entry in header.items()}
    return {
        name: header[name] | {"data_offsets": [first(begin), first(begin) + end - begin]}
        for name, (begin, end) in placed.items()
    }


def test_offsets_that_are_each_right_and_wrong_together(convert: Convert, parts) -> None:
    header, tensors = parts
    header.pop("__metadata__", None)
    without = {name: entry for name, entry in header.items() if name != NAME}
    cases: list[tuple[Header, bytes, str]] = [
        (moved(header, lambda first: 0), b"", "lies over another"),
        (moved(header, lambda first: first + 2), b"xx", "leaves a gap"),
        (header | {NAME: header[OTHER]}, b"", "lies over another"),
        (header, b"left over", "belong to no tensor"),
        (without, b"", "leaves a gap"),
        ({}, b"", "belong to no tensor"),
    ]
    for changed, behind, complaint in cases:
        assert complaint in convert(join(changed, tensors + behind))


def broken(text: bytes) -> list[bytes]:
    """Texts that are not, or not in JSON alone, the object that `text` is."""
    digits = b"9" * 5000
    return [
        b"", b"{", b"[]", b"null", b"\x80\x02\x00", b"\xff\xfe{}", text[:-1], text + b"\0",
        text.decode().encode("utf-16"), b"\xef\xbb\xbf" + text, b"[" * 100_000,
        b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", text[:-1] + b',"a":' + digits + b"}",
        text[:-1] + b',"a":NaN}', text[:-1] + b',"a":{},"a":{}}',
    ]  # fmt: skip


def test_headers_that_are_none(convert: Convert, model: bytes, parts: tuple[Header, bytes]) -> None:
    header, tensors = parts
    text = json.dumps(header).encode()
    empty = {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}
    strangers = ("\ud800", "x\nnot converted: y", "x" * 1_000_000)
    wrong: list[Any] = [
        *broken(text), header | {"__metadata__": [1]},
        *(header | {name: header[NAME]} for name in strangers),
        {f"{name}{i}": empty for i in range(300) for name in header},
    ]  # fmt: skip
    for each in wrong:
        assert convert(join(each, tensors)), str(each)[:80]
    for length in (0, 2**31, 2**64 - 1, len(model), len(text) - 1, len(text) + 1):
        assert convert(struct.pack("<Q", length) + model[8:]), length
    for end in (0, 7, 8, len(text), len(model) - 1):
        assert convert(model[:end]), end


@pytest.mark.parametrize("number", ["1", "999", "5000000", "9" * 5000, "00", "-1", "0x1", "٣", ""])
def test_names_of_blocks(convert: Convert, parts: tuple[Header, bytes], number: str) -> None:
    header, tensors = parts
    own, other = "transformer_blocks.0.", f"transformer_blocks.{number}."
    assert convert(join({n.replace(own, other): x for n, x in header.items()}, tensors))
    header[NAME.replace(own, other)] = header.pop(NAME)
    assert convert(join(header, tensors))


@pytest.mark.parametrize(
    ("name", "shape", "complaint"),
    [
        ("blocks.0.q.weight", [64, 64], "two names"),
        *((POSITIONS, shape, "a table has [1, tokens, 64]")
          for shape in ([64, 8], [1, 8, 63], [2, 4, 64], [], [1, 8, 64, 1])),
    ],
)  # fmt: skip
def test_parameters_beside_the_models(convert: Convert, parts, name, shape, complaint) -> None:
    header, tensors = parts
    length = 2 * int(torch.Size(shape).numel())
    offsets = [len(tensors), len(tensors) + length]
    header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
    assert complaint in convert(join(header, tensors + b"\0" * length), SINCOS)


WHOLE = (
    "patch_size", "sample_frames", "sample_height", "sample_width", "temporal_compression_ratio",
    "max_text_seq_length",
)  # fmt: skip
SCALES = ("spatial_interpolation_scale", "temporal_interpolation_scale")
HEADS = "num_attention_heads"
ROTARY_NAME = "use_rotary_positional_embeddings"


def test_configs_with_other_values(convert: Convert, model: bytes) -> None:
    cases: list[tuple[Header, str]] = [
        *(({name: value}, name) for name in (*WHOLE, *SCALES) for value in [*WEIRD, 0, 10**9]),
        *(({name: 2.5}, name) for name in WHOLE),  # it fits a scale
        *(({HEADS: value}, HEADS) for value in [*WEIRD, 0, 10**9, 2.5]),
        ({HEADS: 30}, "is of a model with 30 heads"),
        *(({ROTARY_NAME: value}, ROTARY_NAME) for value in (0, 1, "false", [])),
        ({"sample_frames": 9999, "sample_height": 9999, "sample_width": 9999}, "tokens"),
        ({"sample_height": 1}, "less than one patch"),
    ]
    for change, complaint in cases:
        said = convert(model, SINCOS | change)
        assert "config.json" in said and (complaint in said or "damaged" in said), change


def test_configs_that_are_none(convert: Convert, model: bytes) -> None:
    for each in [*broken(json.dumps(SINCOS).encode()), b" " * (2 << 20)]:
        assert "config.json" in convert(model, each), each[:40]
    for said in ({}, {"_class_name": 5}, {"_class_name": "Other", "patch_size": 0}):
        assert "config.json beside" in convert(model, said), "one head decides nothing"


def test_flipped_bytes_of_a_header(convert: Convert, model: bytes, seed: int) -> None:
    """Some flips change nothing that counts, such as a letter of a block's metadata."""
    chance, refused = random.Random(seed), 0
    length = struct.unpack("<Q", model[:8])[0]
    for case in range(150):
        data = bytearray(model)
        for _ in range(1 if case % 3 else 4):
            data[chance.randrange(8 if case % 10 else 0, 8 + length)] = chance.randrange(256)
        refused += bool(convert(bytes(data)))
    assert refused > 100


def test_two_types_of_odd_lengths_can_be_read(convert: Convert) -> None:
    """A reader takes numbers of four bytes from where four bytes begin."""
    generator = torch.Generator().manual_seed(7)
    state = published(generator, heads=1, layers=1, time=16, text=15, out=15)
    for index, name in enumerate(sorted(state)):
        dtype = (torch.float8_e4m3fn, torch.float32, torch.bfloat16)[index % 3]
        state[name] = state[name].to(dtype)
    assert convert(save(state)) == ""


def test_absurd_files_take_little_memory(convert: Convert, model: bytes, parts) -> None:
    header, tensors = parts
    many = {f"transformer_blocks.{number}.x.weight": header[NAME] for number in (0, 5_000_000)}
    largest = b'{"a":[' + b"[]," * (HEADER_LIMIT // 3 - 10) + b"[]]}"
    cases: list[tuple[bytes, Any]] = [
        (join(header | many, tensors), ROTARY),
        (join(b" " * (HEADER_LIMIT + 1), tensors), ROTARY),
        (join(largest, tensors), ROTARY),
        (model, SINCOS | {"sample_frames": 10_000, "sample_height": 10_000}),
        (model, b"[" * (64 << 20)),
    ]
    for shard, config in cases:
        tracemalloc.start()
        assert convert(shard, config)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY, peak
