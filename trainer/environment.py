"""The software, machine and switches that decide whether the same computation gives the same bits."""

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from trainerd.trainer import comm


def capture(model: nn.Module | None) -> dict[str, Any]:
    """Return, as plain values, what the results of `model`'s device depend on beside the state.

    Source: "Reproducibility" in PyTorch's documentation.
    """
    device = device_of(model)
    facts: dict[str, Any] = {
        "torch": str(torch.__version__),
        "device": device,
        "world_size": comm.get_world_size(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }
    if device == "cpu":
        # Reductions are split among threads, and kernels chosen by instruction set.
        facts["num_threads"] = torch.get_num_threads()
        facts["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    if device == "cuda":
        facts |= _versions_of_cuda()
        facts["cudnn.deterministic"] = torch.backends.cudnn.deterministic
        facts["cudnn.benchmark"] = torch.backends.cudnn.benchmark
        facts["cudnn.allow_tf32"] = torch.backends.cudnn.allow_tf32
        facts["CUBLAS_WORKSPACE_CONFIG"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    return facts


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Name what has changed, with both values; what only one side recorded is passed over."""
    common = [name for name in saved if name in now]
    return [f"{name} was {saved[name]!r}, is {now[name]!r}" for name in common if saved[name] != now[name]]


def unrepeatable(model: nn.Module | None) -> str:
    """Say why a restarted process may compute other bits with `model` although nothing has changed; empty if not.

    With dynamic shapes the kernels depend on which shapes came first, and a resume begins in the middle.
    """
    for module in model.modules() if model is not None else ():
        context = getattr(module, "dynamo_ctx", None)
        by_inductor = getattr(context, "compiler_config", None) is not None
        if by_inductor and getattr(context, "_dynamic", None) is not False:
            return "torch.compile picks kernels by the shapes it has met; with dynamic=False it is bitwise"
        if module._compiled_call_impl is not None:
            return "a module compiled in place doesn't say how; torch.compile(model, dynamic=False) is bitwise"
    return ""


def device_of(model: nn.Module | None) -> str:
    """Return the type of the device that a model lies on, "cpu" for one without parameters."""
    parameter = next(model.parameters(), None) if model is not None else None
    return "cpu" if parameter is None else parameter.device.type


@lru_cache(maxsize=1)
def _versions_of_cuda() -> dict[str, Any]:
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return {
        "cuda": torch.version.cuda or "",
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "gpu": ", ".join(sorted(names)),
    }
