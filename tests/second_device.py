"""A second device, for tests on machines that have none: its tensors compute on the CPU, but mix with no others.

It stands where a GPU would: tensors say that they are on ``DEVICE``, factories make them there,
``.to`` and ``.cpu()`` copy, and an operation on tensors of two devices raises, but for numbers of
no dimension, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing


class _Module(backend_registration._DummyBackendModule):
    """``torch.elsewhere``, as ``torch.cuda``; random numbers are the CPU's."""

    entered = 0  # how many SecondDevice are; to others there is no such device

    def is_available(self) -> bool:
        return self.entered > 0

    def device_count(self) -> int:
        return int(self.entered > 0)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, _device: Any = None) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, _state: Tensor, _device: Any = None) -> None:
        pass


_MODULE = _Module()
_HOOK, _GUARD = (
    backend_registration._DummyPrivateUse1Hook(),
    backend_registration._DummyDeviceGuard(),
)
backend_registration._setup_privateuseone_for_python_backend(
    rename="elsewhere", backend_module=_MODULE, hook=_HOOK, device_guard=_GUARD
)
DEVICE = torch.device("elsewhere:0")
_COPIES = ("aten._to_copy", "aten.copy_", "aten._copy_from", "aten.set_")


class OnDevice(Tensor):
    """A tensor of the device, with its values in ``values``, on the CPU."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
            requires_grad=False,
        )
        made.values = values
        return made

    def __init__(self, values: Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied: Tensor = OnDevice(self.values.clone())
            own = isinstance(self, nn.Parameter)
            memo[id(self)] = (
                nn.Parameter(copied, self.requires_grad)
                if own
                else copied.requires_grad_(self.requires_grad)
            )
        return memo[id(self)]

    def __repr__(self, **_: Any) -> str:
        return f"on the device: {self.values!r}"

    def __format__(self, form: str) -> str:
        return self.item().__format__(form) if self.dim() == 0 else super().__format__(form)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.values.untyped_storage()

    def tolist(self) -> Any:
        return self.values.tolist()

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    @property
    def data(self) -> Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other: OnDevice) -> None:
        torch.Tensor.data.__set__(self, other)
        self.values = other.values


class _Generator(torch.Generator):
    """A generator that says it is on the device; it draws what the CPU's does."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        there = torch.device(device).type == DEVICE.type
        return super().__new__(cls) if there else _PLAIN(device)

    @property
    def device(self) -> torch.device:
        return DEVICE


_PLAIN = torch.Generator
_FROM_DATA = {name: getattr(torch, name) for name in ("tensor", "as_tensor")}


def _from_data(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that makes tensors of data, which torch does out of the modes' sight."""

    def made(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        if device is None or torch.device(device).type != DEVICE.type:
            return make(data, device=device, **options)
        return (
            data.to(device, **options)
            if isinstance(data, Tensor)
            else make(data, **options).to(device)
        )

    return made


class SecondDevice(TorchDispatchMode):
    """While it is entered, there is a second device."""

    def __enter__(self) -> SecondDevice:
        _MODULE.entered += 1
        torch.Generator = _Generator
        for name, make in _FROM_DATA.items():
            setattr(torch, name, _from_data(make))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        _MODULE.entered -= 1
        torch.Generator = _PLAIN
        for name, make in _FROM_DATA.items():
            setattr(torch, name, make)
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operation, here or there."""
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    there = [isinstance(t, OnDevice) for t in tensors]
    asked = kwargs.get("device")
    target = None if asked is None else torch.device(asked)
    if target is None and not any(there):
        return func(*args, **kwargs)
    name = str(func).rsplit(".", 1)[0]
    if name not in _COPIES and not all(there):
        alien = next(
            (t for t, own in zip(tensors, there, strict=True) if not own and t.dim()), None
        )
        if alien is not None and any(there):
            raise RuntimeError(
                f"{func} mixes a tensor on {alien.device} of shape {tuple(alien.shape)} with {DEVICE}"
            )
    if target is not None:
        kwargs = kwargs | {"device": torch.device("cpu") if target.type == DEVICE.type else target}
    own_args, own_kwargs = pytree.tree_map_only(OnDevice, lambda t: t.values, (args, kwargs))
    result = func(*own_args, **own_kwargs)
    stays = target.type == DEVICE.type if target is not None else True
    if name in ("aten.copy_", "aten._copy_from") and not there[0]:
        return args[0]
    if not stays:
        return result
    result = pytree.tree_map_only(Tensor, OnDevice, result)
    return return_and_correct_aliasing(func, args, kwargs, result) if any(there) else result
