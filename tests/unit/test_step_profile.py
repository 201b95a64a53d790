"""What a step's kernels add up to."""

from __future__ import annotations

import pytest

from benchmarks.step_profile import Kernel, kernels_of, summarise


def test_exposed_idle_and_busy() -> None:
    kernels = [
        Kernel("sm90_xmma_gemm_bf16", 0, 1000),
        Kernel("ncclDevKernel_AllGather_RING_LL", 500, 2000),  # 1000 µs of it alone
        Kernel("triton_poi_fused_cat_0", 2500, 3000),
        Kernel("triton_red_fused_add_mul_1", 2600, 3000),
    ]
    found = summarise(kernels, 2)
    assert (found.span, found.busy, found.exposed, found.idle, found.launches) == (1.5, 1.25, 0.5, 0.25, 2.0)
    assert found.kinds == {"matmul": 0.5, "communication": 0.75, "packing": 0.25, "other": 0.2}
    assert list(found.largest)[0] == "ncclDevKernel_AllGather_RING_LL"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_TNT", "matmul"),
        ("pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized", "packing"),
        ("void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel", "packing"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("triton_red_fused__to_copy_mean_mul_pow_rsqrt_3", "other"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert Kernel(name, 0, 1).kind == kind


def test_only_what_runs_on_the_device_is_read_from_a_trace() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 5, "dur": 2},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 8, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 100},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "nccl:all_gather", "ts": 0, "dur": 100},
        {"ph": "i", "cat": "kernel", "name": "mark", "ts": 0},
    ]
    assert kernels_of({"traceEvents": events}) == [Kernel("k", 5, 7), Kernel("Memcpy DtoD", 8, 9)]


def test_nothing_measured_is_no_profile() -> None:
    with pytest.raises(ValueError, match="found 0 of 3"):
        summarise([], 3)
