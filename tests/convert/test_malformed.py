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

from tests.convert.test_cogvideox import ROTARY, SINCOS, published
from tools.convert_cogvideox.convert import main
from tools.convert_cogvideox.layout import POSITIONS
from tools.convert_cogvideox.tensor_file import HEADER_LIMIT

MEMORY = 100 << 20
NAME = "transformer_blocks.0.attn1.to_q.weight"

Header = dict[str, Any]


@pytest.fixture(scope="module")
def model() -> bytes:
    """One shard of a whole model, of one head and one block."""
    generator = torch.Generator().manual_seed(7)
    return save(published(generator, heads=1, layers=1, time=16, text=16, out=16))


def split(data: bytes) -> tuple[Header, bytes]:
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: bytes | Header | list | str | None, tensors: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + tensors


class Folder:
    """Converts what a case makes, and judges what came of it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder, self._capsys = folder, capsys
        self._out = folder / "out" / "model.safetensors"
        self._out.parent.mkdir()
        self.converted = self.refused = 0

    def convert(self, shard: bytes, config: bytes | dict | None = ROTARY) -> str:
        """The sentence, empty where the shard was converted."""
        source = self._folder / "in"
        source.mkdir(exist_ok=True)
        (source / "model.safetensors").write_bytes(shard)
        beside = source / "config.json"
        beside.unlink(missing_ok=True)
        if config is not None:
            beside.write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
        code = main([str(source), "--out", str(self._out)])
        out, error = self._capsys.readouterr()
        if code == 0:
            self._check_opens()
            assert error == ""
            self.converted += 1
            return ""
        assert code == 1 and out == ""
        assert error.startswith("not converted: ") and error.endswith("\n")
        assert error.count("\n") == 1 and error[:-1].isprintable() and len(error) < 1500
        assert list(self._out.parent.iterdir()) == [], "nothing is left behind"
        self.refused += 1
        return error

    def _check_opens(self) -> None:
        with safe_open(self._out, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                file.get_tensor(name)
        assert [path.name for path in self._out.parent.iterdir()] == [self._out.name]
        self._out.unlink()


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Folder:
    return Folder(tmp_path, capsys)


def test_the_model_itself_is_converted(folder: Folder, model: bytes) -> None:
    assert folder.convert(model) == ""
    assert folder.convert(model, SINCOS | {"sample_frames": 1}) == ""
    assert folder.convert(model, {"_class_name": "Other", "patch_size": 0}).count("config.json")


#: Field of a tensor's entry ("": all of it) -> values that it must not have.
WRONG: dict[str, list[Any]] = {
    "data_offsets": [
        [0, 0], [0, 2], [-200, -100], [2, 0], [0], [0, 1, 2], [], None, "0", 5, {}, [0.0, 8192.0],
        ["0", "8192"], [True, False], [0, 2**31], [0, 2**64], [0, 10**400], [2**63, 2**63 + 8192],
        [None, None], [[0], [1]], [0, -1],
    ],
    "dtype": [
        "F32", "F8_E4M3", "NOPE", "", "bf16", "C64", 5, None, [], {}, True, "BF16\n", "\ud800",
        "\x1b[31m", "x" * 100_000,
    ],
    "shape": [
        [], [64], [64, 65], [128, 32], [64, 64, 1], [0, 64], [-64, -64], [64.0, 64.0], ["64", 64],
        None, 5, "6464", {}, [True, True], [2**62, 4], [2**32, 2**32], [10**400, 10**400],
        [4096] * 50_000, [1] * 100 + [64, 64], [[64], [64]],
    ],
    "": [None, 5, "x", [], {}, {"dtype": "BF16"}, {"shape": [64, 64]}],
}  # fmt: skip


def test_a_tensor_described_wrongly(folder: Folder, model: bytes) -> None:
    for field, value in ((field, value) for field, values in WRONG.items() for value in values):
        header, tensors = split(model)
        if field:
            header[NAME][field] = value
        else:
            header[NAME] = value
        assert folder.convert(join(header, tensors)), (field, str(value)[:80])


def test_offsets_that_are_each_right_and_wrong_together(folder: Folder, model: bytes) -> None:
    def placed(change: Callable[[int, int], list[int]]) -> Callable[[Header], None]:
        def place(header: Header) -> None:
            for entry in header.values():
                entry["data_offsets"] = change(*entry["data_offsets"])

        return place

    def swapped(header: Header) -> None:
        """Of one length, so that each lies where the other does."""
        one, two = header[NAME], header["transformer_blocks.0.attn1.to_k.weight"]
        one["data_offsets"] = two["data_offsets"]

    changes: list[tuple[Callable[[Header], object], bytes, str]] = [
        (placed(lambda first, last: [0, last - first]), b"", "lies over another"),
        (placed(lambda first, last: [first + 2, last + 2]), b"xx", "leaves a gap"),
        (swapped, b"", "lies over another"),
        (lambda header: None, b"left over", "belong to no tensor"),
        (lambda header: header.pop(NAME), b"", "leaves a gap"),
        (lambda header: header.clear(), b"", "belong to no tensor"),
    ]
    for change, behind, complaint in changes:
        header, tensors = split(model)
        header.pop("__metadata__", None)
        change(header)
        assert complaint in folder.convert(join(header, tensors + behind))


def test_headers_that_are_none(folder: Folder, model: bytes) -> None:
    header, tensors = split(model)
    text = json.dumps(header).encode()
    wrong = [
        *(json.dumps(value).encode() for value in ([], [header], None, 5, 1.5, "text", True)),
        b"", b" ", b"{", b"{}", b"}", b"\xff\xfe{}", text[:-1], text + b"}", text + b"\0",
        text.decode().encode("utf-16"), b"\xef\xbb\xbf" + text, text.replace(b"BF16", b"B\xe916"),
        b"[" * 100_000, b'{"a":' * 100_000, b'{"a":' + b"[" * 900 + b"]" * 900 + b"}",
        text.replace(b"[64]", b"[NaN]"), text.replace(b"[64]", b"[Infinity]"),
        text.replace(b"[64]", b"[" + b"9" * 5000 + b"]"), text.replace(b"[64]", b"[6.4e1]"),
        text[:-1] + b',"' + NAME.encode() + b'":' + json.dumps(header[NAME]).encode() + b"}",
        json.dumps(header | {"__metadata__": [1]}).encode(),
        json.dumps(header | {"\ud800": header[NAME]}).encode(),
        json.dumps(header | {"x\nnot converted: y": header[NAME]}).encode(),
        json.dumps(header | {"x" * 1_000_000: header[NAME]}).encode(),
        json.dumps({f"{name}{i}": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}
                    for i in range(300) for name in header}).encode(),
    ]  # fmt: skip
    for each in wrong:
        assert folder.convert(join(each, tensors)), each[:80]
    for length in (0, 2**31, 2**63, 2**64 - 1, len(model), len(text) - 1, len(text) + 1):
        assert folder.convert(struct.pack("<Q", length) + model[8:]), length
    for end in (0, 7, 8, 9, len(text), len(text) + 9, len(model) - 1):
        assert folder.convert(model[:end]), end


def test_names_of_blocks(folder: Folder, model: bytes) -> None:
    for number in ("1", "999", "5000000", "9" * 5000, "00", "-1", "0x1", "٣", ""):
        header, tensors = split(model)
        header[f"transformer_blocks.{number}.attn1.to_q.weight"] = header.pop(NAME)
        assert folder.convert(join(header, tensors)), number[:20]
        header, tensors = split(model)
        own = "transformer_blocks.0."
        moved = {name.replace(own, own.replace("0", number)): x for name, x in header.items()}
        assert folder.convert(join(moved, tensors)), number[:20]


def test_parameters_beside_the_models(folder: Folder, model: bytes) -> None:
    """One under two names, and a position table of another shape."""
    shapes = [[64, 8], [1, 8, 63], [2, 4, 64], [], [1, 8, 64, 1]]
    cases = [("blocks.0.q.weight", [64, 64], "two names", ROTARY)]
    cases += [(POSITIONS, shape, "a table has [1, tokens, 64]", SINCOS) for shape in shapes]
    for name, shape, complaint, config in cases:
        header, tensors = split(model)
        length = 2 * int(torch.Size(shape).numel())
        offsets = [len(tensors), len(tensors) + length]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
        assert complaint in folder.convert(join(header, tensors + b"\0" * length), config)


NUMBERS: list[Any] = [
    0, -5, 10**9, 1e9, 10**400, "2", "", [], [2], {}, True, False, float("nan"), float("inf"),
    1e300, 1e-300,
]  # fmt: skip
WHOLE = (
    "patch_size", "sample_frames", "sample_height", "sample_width", "temporal_compression_ratio",
    "max_text_seq_length",
)  # fmt: skip
SCALES = ("spatial_interpolation_scale", "temporal_interpolation_scale")
ROTARY_NAME = "use_rotary_positional_embeddings"


def test_configs_with_other_values(folder: Folder, model: bytes) -> None:
    cases = [({name: value}, name) for name in (*WHOLE, *SCALES) for value in NUMBERS]
    cases += [({name: 2.5}, name) for name in WHOLE]  # it fits a scale
    cases += [({ROTARY_NAME: value}, ROTARY_NAME) for value in (0, 1, "false", [], {}, 0.0)]
    cases += [
        ({"sample_frames": 9999, "sample_height": 9999, "sample_width": 9999}, "tokens"),
        ({"sample_height": 1}, "less than one patch"),
        ({"patch_size": 64}, "less than one patch"),
    ]
    for change, complaint in cases:
        sentence = folder.convert(model, SINCOS | change)
        assert "config.json" in sentence or "damaged" in sentence, change
        assert complaint in sentence or "damaged" in sentence, change
    for name in (*WHOLE, *SCALES):
        said = folder.convert(model, SINCOS | {"sample_frames": 1, name: None})
        assert said == "" or name == "sample_frames"


def test_configs_that_are_none(folder: Folder, model: bytes) -> None:
    text = json.dumps(SINCOS).encode()
    wrong = [
        b"{", b"", b"[]", b"null", b'"x"', b"\x80\x02\x00", b"\0" * 50, text[:-1], text * 2,
        b"[" * 100_000, b'{"a":' * 100_000, b" " * (2 << 20), text.decode().encode("utf-16"),
        text[:-1] + b',"patch_size":2,"patch_size":2}', text[:-1] + b',"a":' + b"9" * 5000 + b"}",
    ]  # fmt: skip
    for each in wrong:
        assert "config.json" in folder.convert(model, each), each[:40]
    for said in ({}, {"_class_name": 5}, {"_class_name": None}):
        assert "config.json beside" in folder.convert(model, said), "one head decides nothing"


def test_flipped_bytes_of_a_header(folder: Folder, model: bytes, seed: int) -> None:
    """Some flips change nothing that counts, such as a letter of a block's metadata."""
    chance = random.Random(seed)
    length = struct.unpack("<Q", model[:8])[0]
    for case in range(150):
        data = bytearray(model)
        for _ in range(1 if case % 3 else 4):
            data[chance.randrange(8 if case % 10 else 0, 8 + length)] = chance.randrange(256)
        folder.convert(bytes(data))
    assert folder.converted + folder.refused == 150 and folder.refused > 100


def test_two_types_of_odd_lengths_can_be_read(folder: Folder) -> None:
    """A reader takes numbers of four bytes from where four bytes begin."""
    generator = torch.Generator().manual_seed(7)
    state = published(generator, heads=1, layers=1, time=16, text=15, out=15)
    for index, name in enumerate(sorted(state)):
        kind = (torch.float8_e4m3fn, torch.float32, torch.bfloat16)[index % 3]
        state[name] = state[name].to(kind)
    assert folder.convert(save(state)) == ""


def test_absurd_files_take_little_memory(folder: Folder, model: bytes) -> None:
    header, tensors = split(model)
    many = {f"transformer_blocks.{number}.x.weight": header[NAME] for number in (0, 5_000_000)}
    largest = b'{"a":[' + b"[]," * (HEADER_LIMIT // 3 - 10) + b"[]]}"
    cases: list[tuple[bytes, Any]] = [
        (join(header | many, tensors), ROTARY),
        (join(b" " * (HEADER_LIMIT + 1), tensors), ROTARY),
        (join(largest, tensors), ROTARY),
        (model, SINCOS | {"sample_frames": 10_000, "sample_height": 10_000}),
        (model, SINCOS | {"max_text_seq_length": 10_000, "sample_frames": 4_000}),
        (model, b"[" * (64 << 20)),
    ]
    for shard, config in cases:
        tracemalloc.start()
        assert folder.convert(shard, config)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY, peak
