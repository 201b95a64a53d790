"""Makes the second device known to torch and Inductor, with C++ kernels; changes the process it is called in."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device
from torch._inductor.codegen import common, cpp, wrapper

from . import NAME, library


class _Kernels:
    """Kernels of the device are C++ on host memory: they are called as the CPU's are."""

    def _generate_kernel_call_helper(self, kernel_name: Any, call_args: Any, *, device: Any = None, **kw: Any) -> None:
        super()._generate_kernel_call_helper(  # type: ignore[misc]
            kernel_name, call_args, device=torch.device("cpu"), **kw
        )


class _Subgraph(_Kernels, wrapper.SubgraphPythonWrapperCodegen):
    pass


class _Wrapper(_Kernels, wrapper.PythonWrapperCodegen):
    @staticmethod
    def create(is_subgraph: bool, name: Any, parent: Any, partition_signatures: Any = None) -> Any:
        return _Subgraph(name, parent, partition_signatures) if is_subgraph else _Wrapper()


class _Overrides(common.DeviceOpOverrides):
    def import_get_raw_stream_as(self, name: str) -> str:
        return f"def {name}(index): return 0"

    def set_device(self, device_idx: int) -> str:
        return "pass"

    def synchronize(self) -> str:
        return "pass"

    def device_guard(self, device_idx: int) -> str:
        return "torch._C._DisableFuncTorch()"


class _Interface(DeviceInterface):
    class Worker(DeviceInterface.Worker):
        @staticmethod
        def current_device() -> int:
            return 0

        @staticmethod
        def set_device(device: Any) -> None: ...

        @staticmethod
        def get_device_properties(device: Any = None) -> Any:
            return types.SimpleNamespace(
                name=NAME, multi_processor_count=1, total_memory=1 << 30, major=0, warp_size=1,
                max_threads_per_multi_processor=1, regs_per_multiprocessor=1,
            )  # fmt: skip

    get_device_properties = Worker.get_device_properties

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def synchronize(device: Any = None) -> None: ...

    @staticmethod
    def exchange_device(device: int) -> int:
        return device

    maybe_exchange_device = exchange_device

    @staticmethod
    def get_compute_capability(device: Any = None) -> str:
        return "0"

    @staticmethod
    def is_bf16_supported(including_emulation: bool = False) -> bool:
        return True


def install() -> None:
    """Register the device; once per process."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(str(library()))
    module = types.ModuleType(f"torch.{NAME}")
    answers = {
        "current_device": 0, "device_count": 1, "is_available": True, "synchronize": None,
        "_is_in_bad_fork": False, "get_amp_supported_dtype": [torch.float16], "manual_seed_all": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(module, name, lambda *_, answer=answer: answer)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    register_interface_for_device(NAME, _Interface)
    common.register_device_op_overrides(NAME, _Overrides())
    common.init_backend_registration()
    common.register_backend_for_device(NAME, cpp.CppScheduling, _Wrapper)  # type: ignore[arg-type]
