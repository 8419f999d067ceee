# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from sparge.kernels import spec as specs_of
from sparge.kernels.spec import (
    ARCHS,
    HEAD_DIMS,
    HOPPER_ATTEND,
    HOPPER_ATTEND_16,
    Element,
    KernelSpec,
    Source,
    all_specs,
    attend_entry,
    measuring_element,
    native_specs,
    spec_from_id,
)
from sparge.kernels.warmup import Needs, eight_bit_specs

#: 8-bit elements of the targets that take no FP16, written down apart from the library.
EIGHT_BIT = {"sm_90a": Element.INT8_E4M3} | dict.fromkeys(
    ("sm_86", "sm_89", "sm_120a", "sm_121a", "sm_90_as_86", "sm_90_as_89", "sm_90_as_120"),
    Element.INT8_INT8,
)
EIGHT_BIT["sm_103a"] = Element.BF16


def test_ids_and_defines_name_one_kernel_each(monkeypatch):
    monkeypatch.setattr(specs_of, "all_specs", cache(all_specs))  # which each id is looked up in
    specs = [spec for arch in ARCHS for spec in all_specs(arch)]
    assert len({spec.id for spec in specs}) == len(specs)
    assert all(spec_from_id(spec.id) == spec for spec in specs)
    told = {(spec.entry, *spec.defines) for spec in all_specs("sm_89")}
    assert len(told) == len(all_specs("sm_89"))
    assert KernelSpec("attend", "sm_121a").defines == KernelSpec("attend", "sm_120a").defines
    assert set(specs_of.RELEASE_ARCHS) < set(ARCHS)
    # Fields that an entry ignores do not split it.
    bf16: dict[str, Any] = {"element": Element.BF16}
    reads = {"route": {}, "quantize": bf16, "attend": bf16 | {"pv_filter": True}}
    for entry, fields in reads.items():
        given = KernelSpec(entry, "sm_80", 128, Element.BF16, True)
        assert given == KernelSpec(entry, "sm_80", 128, **fields)
    assert KernelSpec("attend", "sm_80", **reads["attend"]) != KernelSpec("attend", "sm_80", **bf16)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("attend", "sm_75"), "sm_75"),
        (("attend", "sm_90a", 96), "96"),
        ((HOPPER_ATTEND_16, "sm_80", 128, Element.BF16), "only sm_90a has wgmma"),
    ],
)
def test_what_is_not_built_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        KernelSpec(*arguments)
    with pytest.raises(ValueError, match="no kernel is called"):
        spec_from_id("attend-sm_90a-d96")


@pytest.mark.parametrize("arch", ARCHS)
def test_the_path_of_a_call(arch):
    """The element and the kernel that serve it are built."""
    eight_bit = EIGHT_BIT.get(arch, Element.INT8_FP16)
    of_fp16 = Element.FP16 if arch == "sm_103a" else eight_bit
    hopper, built = arch == "sm_90a", set(native_specs(arch))
    assert built <= set(all_specs(arch))
    for sixteen_bit, dtype, expected in (
        (False, torch.bfloat16, eight_bit),
        (False, torch.float16, of_fp16),
        (True, torch.float16, Element.FP16),
        (True, torch.float32, Element.BF16),
    ):
        element = specs_of.native_element(arch, sixteen_bit, dtype)
        path = attend_entry(arch, element)
        entry = HOPPER_ATTEND if element.quantized else HOPPER_ATTEND_16
        assert element is expected and path == (entry if hopper else "attend")
        assert specs_of.pv_filter_saves(arch) == (not hopper)
        assert KernelSpec(path, arch, 128, element, True) in built
        assert KernelSpec("attend", arch, 64, eight_bit) in all_specs(arch)
    assert attend_entry("sm_90a", Element.INT8_FP16) == "attend"
    of_another = {(Element.BF16, Source.FP16), (Element.FP16, Source.BF16)}
    assert not of_another & {(spec.element, spec.source) for spec in all_specs(arch)}


@pytest.mark.parametrize("arch", ARCHS)
def test_heads_can_be_measured_everywhere_with_quantized_keys(arch: str) -> None:
    element = measuring_element(arch)
    assert element.quantized
    ready = {(spec.entry, spec.head_dim) for spec in native_specs(arch) if spec.element is element}
    assert ready >= {(attend_entry(arch, element), head_dim) for head_dim in HEAD_DIMS}


@pytest.mark.parametrize("arch", ["sm_86", "sm_89", "sm_90a", "sm_103a", "sm_120a"])
def test_a_model_waits_for_five_kernels(arch: str) -> None:
    """Those of its own head_dim and dtype, one a stage."""
    specs = eight_bit_specs(arch, Needs(96, torch.bfloat16))
    own = attend_entry(arch, EIGHT_BIT[arch])
    assert sorted(spec.entry for spec in specs) == sorted(
        ["means", "quantize", "route", own, "score"]
    )
    assert {spec.head_dim for spec in specs} == {128} and not any(spec.pv_filter for spec in specs)
    sources = {Source.BF16: Needs(64, torch.bfloat16), Source.FP16: Needs(64, torch.float16)}
    sources[Source.ANY] = Needs(64, torch.float32)
    for source, needs in sources.items():
        (quantize,) = (x for x in eight_bit_specs(arch, needs) if x.entry == "quantize")
        assert quantize.source is source
    assert {x.source for x in eight_bit_specs(arch) if x.entry == "quantize"} == {
        Source.BF16,
        Source.FP16,
    }
