# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses

import pytest
import torch

from sparge.kernels.spec import (
    ARCHS,
    HOPPER_ATTEND,
    HOPPER_ATTEND_16,
    RELEASE_ARCHS,
    Element,
    KernelSpec,
    all_specs,
    attend_path,
    native_element,
    native_specs,
    pv_filter_saves,
    spec_from_id,
)


def test_ids_name_one_kernel_each():
    ids = [spec.id for arch in ARCHS for spec in all_specs(arch)]
    assert len(ids) == len(set(ids))
    assert all(spec_from_id(spec.id) == spec for spec in all_specs("sm_120a"))
    with pytest.raises(ValueError, match="no kernel is called"):
        spec_from_id("attend-sm_90a-d96")


def test_defines_tell_every_field_apart():
    specs = all_specs("sm_89")
    told = {(spec.entry, *spec.defines) for spec in specs}
    assert len(told) == len(specs)


def test_fields_an_entry_ignores_do_not_split_it():
    plain = KernelSpec("route", "sm_80")
    assert KernelSpec("route", "sm_80", element=Element.BF16, pv_filter=True) == plain
    quantize = KernelSpec("quantize", "sm_80", element=Element.BF16, pv_filter=True)
    assert quantize == KernelSpec("quantize", "sm_80", element=Element.BF16)
    attend = KernelSpec("attend", "sm_80")
    assert dataclasses.replace(attend, pv_filter=True) != attend


def test_newer_chips_run_the_code_of_their_family():
    assert KernelSpec("attend", "sm_121a").defines == KernelSpec("attend", "sm_120a").defines
    assert KernelSpec("attend", "sm_90").defines == KernelSpec("attend", "sm_80").defines
    assert set(RELEASE_ARCHS) < set(ARCHS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("attend", "sm_75"), "sm_75"),
        (("attend", "sm_90a", 96), "96"),
        ((HOPPER_ATTEND_16, "sm_90", 128, Element.BF16), "only sm_90a has wgmma"),
    ],
)
def test_what_is_not_built_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        KernelSpec(*arguments)


#: The 8-bit element of each target, written down apart from the library.
EIGHT_BIT = {
    arch: Element.INT8_E4M3
    if arch in ("sm_89", "sm_90a", "sm_120a", "sm_121a")
    else Element.INT8_FP16
    for arch in ARCHS
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_path_of_a_call(arch, dtype):
    """The element and the kernel that serve it are built, and the reason says which."""
    sixteen = Element.FP16 if dtype == torch.float16 else Element.BF16
    assert {KernelSpec("attend", arch, 64, EIGHT_BIT[arch])} <= set(all_specs(arch))
    for sixteen_bit, expected in ((False, EIGHT_BIT[arch]), (True, sixteen)):
        element = native_element(arch, sixteen_bit, dtype)
        assert element is expected
        path = attend_path(arch, element)
        entry = "attend"
        if arch == "sm_90a":
            entry = HOPPER_ATTEND_16 if sixteen_bit else HOPPER_ATTEND
        assert path.entry == entry
        assert path.reason.startswith("wgmma: " if arch == "sm_90a" else "mma.sync: ")
        assert path.filter_saves == pv_filter_saves(arch) == (arch != "sm_90a")
        assert KernelSpec(entry, arch, 128, element, True) in native_specs(arch)
    assert set(native_specs(arch)) <= set(all_specs(arch))


def test_why_there_is_no_wgmma():
    assert attend_path("sm_90a", Element.INT8_FP16).entry == "attend"
    reason = attend_path("sm_90", Element.BF16).reason
    assert reason == "mma.sync: sm_90 is built without wgmma"
    assert "sm_100a has no wgmma" in attend_path("sm_100a", Element.BF16).reason
