# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch

from sparge.kernels.params import PARAMS
from sparge.kernels.spec import (
    ARCHS,
    ENTRIES,
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


def test_defines_of_one_kernel():
    spec = KernelSpec("attend", "sm_90a", 64, Element.FP16, pv_filter=True)
    assert spec.defines == [
        "-DSPARGE_ARCH=90",
        "-DSPARGE_HEAD_DIM=64",
        "-DSPARGE_ELEMENT=3",
        "-DSPARGE_PV_FILTER=1",
        f"-DSPARGE_PARAMS_BYTES={ctypes.sizeof(PARAMS['attend'])}",
    ]


def test_every_entry_has_parameters():
    assert set(PARAMS) == set(ENTRIES)


def test_an_entry_without_parameters_is_refused():
    with pytest.raises(ValueError, match="no struct"):
        _ = KernelSpec("nothing", "sm_90a").defines


def test_fields_an_entry_ignores_do_not_split_it():
    plain = KernelSpec("route", "sm_80")
    assert KernelSpec("route", "sm_80", element=Element.BF16, pv_filter=True) == plain
    quantize = KernelSpec("quantize", "sm_80", element=Element.BF16, pv_filter=True)
    assert quantize == KernelSpec("quantize", "sm_80", element=Element.BF16)
    attend = KernelSpec("attend", "sm_80")
    assert dataclasses.replace(attend, pv_filter=True) != attend


@pytest.mark.parametrize("wrong", [{"arch": "sm_75"}, {"arch": "sm_90a", "head_dim": 96}])
def test_what_is_not_built_is_refused(wrong):
    with pytest.raises(ValueError, match=r"sm_75|96"):
        KernelSpec("attend", **wrong)


@pytest.mark.parametrize("arch", ARCHS)
def test_e4m3_only_where_it_is_built(arch):
    has_e4m3 = any(spec.element is Element.INT8_E4M3 for spec in all_specs(arch))
    assert has_e4m3 == (arch in ("sm_89", "sm_90a", "sm_120a", "sm_121a"))


@pytest.mark.parametrize("arch", ARCHS)
def test_native_elements_are_built(arch):
    native = native_specs(arch)
    assert set(native) <= set(all_specs(arch))
    for sixteen_bit in (False, True):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            element = native_element(arch, sixteen_bit, dtype)
            entry = attend_path(arch, element).entry
            assert KernelSpec(entry, arch, 128, element, True) in native


def test_the_warpgroup_kernel_is_chosen_where_it_runs():
    hopper = attend_path("sm_90a", Element.INT8_E4M3)
    assert hopper.entry == HOPPER_ATTEND and "wgmma" in hopper.reason
    assert not hopper.filter_saves
    for element in (Element.BF16, Element.FP16):
        path = attend_path("sm_90a", element)
        assert path.entry == HOPPER_ATTEND_16 and "wgmma" in path.reason
        assert not path.filter_saves
    for arch, element in (
        ("sm_80", Element.BF16),
        ("sm_90a", Element.INT8_FP16),
        ("sm_90", Element.INT8_FP16),
        ("sm_120a", Element.INT8_E4M3),
    ):
        path = attend_path(arch, element)
        assert path.entry == "attend" and "mma.sync" in path.reason
        assert path.filter_saves


def test_hopper_without_its_own_instructions_is_told_from_gpus_that_lack_them():
    reason = attend_path("sm_90", Element.BF16).reason
    assert reason == "mma.sync: sm_90 is built without wgmma"
    assert "sm_100a has no wgmma" in attend_path("sm_100a", Element.BF16).reason
    with pytest.raises(ValueError, match="only sm_90a has wgmma"):
        KernelSpec(HOPPER_ATTEND_16, "sm_90", element=Element.BF16)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_filter_saves_time_but_on_hopper(arch):
    assert pv_filter_saves(arch) == (arch != "sm_90a")


def test_native_element():
    half, brain = torch.float16, torch.bfloat16
    assert native_element("sm_89", False, half) is Element.INT8_E4M3
    assert native_element("sm_120a", False, brain) is Element.INT8_E4M3
    assert native_element("sm_90a", False, brain) is Element.INT8_E4M3
    assert native_element("sm_100a", False, brain) is Element.INT8_FP16
    assert native_element("sm_90a", True, half) is Element.FP16
    assert native_element("sm_89", True, torch.float32) is Element.BF16


def test_newer_chips_run_the_code_of_their_family():
    assert KernelSpec("attend", "sm_121a").defines == KernelSpec("attend", "sm_120a").defines
    assert KernelSpec("attend", "sm_90").defines == KernelSpec("attend", "sm_80").defines
    assert set(RELEASE_ARCHS) < set(ARCHS)
