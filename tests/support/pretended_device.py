"""A device that is not there: tensors that say they are on an accelerator, and are computed by the CPU.

    with PretendedDevice() as device:
        model = device.place(model)
        model.generate(input_ids.to(device.name), ...)
        print(*device.waits, sep="\n")

Caught as on a GPU: tensors of two devices in one operation; whatever has the host wait for the device (`waits`), with
the line that asked for it: values that are read back (`downloads`), and copies from the host (`uploads`) that are not
`non_blocking`, at which CUDA waits, too; generators of another device than the tensor that they fill. Allowed as there:
CPU tensors without dimensions in element-wise operations, CPU tensors as indices between brackets (an upload each).

Counted: the kernels that would have been launched (`launches`). Every operation that computes or writes a tensor of the
device is one launch, and so is a copy in either direction. Views, metadata and allocations are none.

CUDA graphs, without a recording:

    with device.capturing():  # raises CaptureError at everything that cannot be captured
        step(buffers)
    with device.replaying():  # one replay, no launches
        step(buffers)

Both run the function. `CaptureError` names the operation and the line that copies between host and device, draws random
numbers, touches the random state of the device or allocates pinned memory. It is also raised where CUDA would record a
value of the host, the same for every replay: a CPU tensor without dimensions as an operand, or its `item()`. In both,
`torch.cuda.is_current_stream_capturing()` is True.

It has its own random numbers: where CUDA draws others than a CPU, this device draws a CPU's, so that the same seed
gives the same text on both.

Not emulated:
- time, memory, streams, events: nothing is late, and pinned memory is ordinary memory;
- fixed addresses of CUDA graphs: a replay runs the function again, on new tensors and Python numbers. A non-blocking
  copy into pinned memory, which CUDA can record, is refused;
- kernels: arithmetic is a CPU's. `scaled_dot_product_attention` counts as its parts (6 to 8), an assignment of a number
  as 2. What only some kernels of CUDA refuse (dtypes, alignment, sizes) is taken;
- host waits that are inside a kernel of CUDA and not in its signature (`torch.linalg`, `torch.multinomial`);
- compilers, autograd through a copy between devices, in-place changes of shape, NumPy, DLPack;
- `torch.cuda`: code that asks for "cuda" by name takes its path for other devices.

How: a tensor is a wrapper with the device type "privateuseone", which PyTorch leaves to others, around a tensor of the
CPU; a `TorchDispatchMode` sees every operation below autograd. What it needs beyond that (a guard that does nothing, a
module `torch.privateuseone`, a `torch.Generator` that can be made for it) is set up for the time of the `with` block,
but for the guard, which PyTorch keeps for the rest of the process and nobody else asks for.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


TYPE = "privateuseone"
_REPOSITORY = str(Path(__file__).resolve().parents[2])
_PASSED_THROUGH = "hf_speculate/transfers.py"  # who calls that is of interest
_ATEN = torch.ops.aten
_INDEXING = {_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._unsafe_index, _ATEN._index_put_impl_}
# Element-wise, in part: a scalar that is filled in may be the CPU's.
_TAKE_SCALARS = {_ATEN.fill, _ATEN.fill_, _ATEN.masked_fill, _ATEN.masked_fill_, *_INDEXING}
_COPIES = {_ATEN._to_copy, _ATEN.copy_}
# Neither views nor kernels: allocations and metadata.
_NO_KERNEL = {
    *(_ATEN.empty, _ATEN.empty_like, _ATEN.empty_permuted, _ATEN.empty_strided),
    *(_ATEN.new_empty, _ATEN.new_empty_strided, _ATEN.resize_, _ATEN.set_),
    *(_ATEN._unsafe_view, _ATEN.unsafe_chunk, _ATEN.unsafe_split, _ATEN.unsafe_split_with_sizes),
    *(_ATEN.lift, _ATEN.is_same_size, _ATEN.record_stream),
}
_STATE_METHODS = {"get_state", "set_state", "manual_seed", "seed", "initial_seed", "get_offset", "set_offset"}
_RNG_STATE = "it reads or sets the random state of the device"
_FROZEN = "the value of a host tensor would be frozen in the recording"
_RealGenerator = torch.Generator

Module = TypeVar("Module", bound=nn.Module)


class CaptureError(RuntimeError):
    """CUDA cannot record this operation in a graph, or would record a value that may change."""


@dataclass(frozen=True)
class Transfer:
    """A copy between device and host.

    Attributes:
        operation: what copied.
        is_blocking: the host waits for what runs on the device. PyTorch's CUDA does so at every copy, in either
            direction, that is not asked to be `non_blocking`.
        where: the innermost line of this repository that asked for it: "hf_speculate/tree.py:12 host".
    """

    operation: str
    where: str
    is_blocking: bool = True

    def __str__(self) -> str:
        return f"{self.operation} at {self.where}"


class PretendedTensor(Tensor):
    """A tensor of the CPU that says it is elsewhere."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> PretendedTensor:
        new = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=device,
            requires_grad=False,
        )
        new.held = held
        return new

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func}: a tensor of a pretended device outside its `with` block.")

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False):
        if not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")
        return self.cpu().numpy()

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"PretendedTensor({list(self.shape)}, {self.dtype}, {self.device})"


class PretendedDevice(TorchDispatchMode):
    """The device, while the `with` block lasts. Blocks of several threads, and blocks in blocks, are not foreseen.

    Attributes:
        downloads: what was read back, in order: the host has waited for each.
        uploads: what was copied to the device.
        launches: number of kernels that would have been launched, outside `capturing` and `replaying`.
        replays: number of `replaying` blocks.
    """

    name = f"{TYPE}:0"

    def __init__(self) -> None:
        super().__init__()
        self.downloads: list[Transfer] = []
        self.uploads: list[Transfer] = []
        self.launches = self.replays = 0
        self._is_recording = False
        self._rng_state = _RealGenerator().manual_seed(0).get_state()
        self._generators: dict[int, Any] = {}  # kept alive: others may get the address of one that is gone

    @property
    def waits(self) -> list[Transfer]:
        """What the host had to wait for: it stands still until all that was launched before is done."""
        return [*self.downloads, *(upload for upload in self.uploads if upload.is_blocking)]

    def forget(self) -> None:
        """Counts anew."""
        self.downloads.clear()
        self.uploads.clear()
        self.launches = self.replays = 0

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """A recording of a CUDA graph: what it forbids raises. Launches are not counted.

        Raises:
            CaptureError: with the operation and the line that asked for it.
        """
        if self._is_recording:
            raise CaptureError(f"capturing at {_caller()}: another graph is being recorded or replayed")
        self._is_recording = True
        try:  # transformers asks, and skips checks that would have the host wait
            with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
                yield
        finally:
            self._is_recording = False

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """A replay of what was captured: the block runs it again. It counts once, and the same is forbidden."""
        with self.capturing():
            self.replays += 1
            yield

    def place(self, module: Module) -> Module:
        """A copy of a module on the device; not counted."""
        num_uploads, launches = len(self.uploads), self.launches
        placed = copy.deepcopy(module).to(self.name)
        del self.uploads[num_uploads:]
        self.launches = launches
        return placed

    def __enter__(self):
        _register_guard()
        self._lifts_on_cpu = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device=)` is a copy that a mode sees
        sys.modules[f"torch.{TYPE}"] = _MODULE
        setattr(torch, TYPE, _MODULE)
        _MODULE.present = self
        torch.Generator = _generator_class(self)  # type: ignore[misc]
        return super().__enter__()

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        torch.Generator = _RealGenerator  # type: ignore[misc]
        delattr(torch, TYPE)
        del sys.modules[f"torch.{TYPE}"]
        _MODULE.present = None
        torch._C._set_only_lift_cpu_tensors(self._lifts_on_cpu)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if torch.is_inference_mode_enabled() and func._can_decompose():  # elsewhere only its parts arrive here
            TorchDispatchMode.__enter__(self)
            try:
                return func.decompose(*args, **kwargs)
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)
        tensors = list(_tensors((args, kwargs)))
        here = _common_device(func, tensors, args)
        there = _indexed(kwargs.pop("device", None)) or here
        self._count(func, args, kwargs, there)
        if self._is_recording:
            self._check_recording(func, tensors, kwargs, there)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        held_args, held_kwargs = _unwrapped(args), _unwrapped(kwargs)
        if _takes_device(func):
            held_kwargs["device"] = torch.device("cpu") if there.type == TYPE else there
        result = self._computed(func, held_args, held_kwargs, here if here.type == TYPE else there)
        return _wrapped(result, there, {id(t.held): t for t in tensors if isinstance(t, PretendedTensor)})

    def _computed(self, func, args, kwargs, device: torch.device) -> Any:
        """On the CPU; random numbers are those of the device."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        generator = next((v for v in (*args, *kwargs.values()) if isinstance(v, _RealGenerator)), None)
        if generator is not None:
            found = TYPE if generator._cdata in self._generators else "cpu"
            if found != device.type:
                raise RuntimeError(f"{func}: expected a {device.type!r} generator but found {found!r}")
            return func(*args, **kwargs)
        if device.type != TYPE:
            return func(*args, **kwargs)
        cpu_state = torch.get_rng_state()
        torch.set_rng_state(self._rng_state)
        try:
            return func(*args, **kwargs)
        finally:
            self._rng_state = torch.get_rng_state()
            torch.set_rng_state(cpu_state)

    def _count(self, func, args, kwargs, there: torch.device) -> None:
        packet = func.overloadpacket
        if packet in _COPIES:
            source = args[1] if packet is _ATEN.copy_ else args[0]
            if source.device.type == TYPE and there.type == "cpu":
                self._note(self.downloads, packet)
            elif source.device.type == "cpu" and there.type == TYPE:
                is_blocking = not (args[2:3] == (True,) or kwargs.get("non_blocking"))
                self._note(self.uploads, packet, is_blocking)
            self._count_launches(TYPE in (source.device.type, there.type))
        elif there.type == TYPE:
            is_indexing = packet in _INDEXING
            for index in args[1] if is_indexing else ():
                if index is not None and index.device.type == "cpu":
                    self._note(self.uploads, packet)
                    self._count_launches(1)
            if _asks_where(args) if is_indexing else _depends_on_values(func, kwargs):
                self._note(self.downloads, packet)
            self._count_launches(_is_kernel(func))

    def _count_launches(self, number: int) -> None:
        self.launches += 0 if self._is_recording else number

    def _note(self, transfers: list[Transfer], packet, is_blocking: bool = True) -> None:
        if transfers is self.downloads:
            self.check_not_recording(packet.__name__, "the host would wait for values of the device")
        else:
            self.check_not_recording(packet.__name__, "it copies from the host")
        transfers.append(Transfer(packet.__name__, _caller(), is_blocking))

    def _check_recording(self, func, tensors: list[Tensor], kwargs, there: torch.device) -> None:
        """Raises CaptureError at what is no transfer and cannot be captured either."""
        packet = func.overloadpacket
        name = packet.__name__
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.check_not_recording(name, "it draws random numbers")
        if kwargs.get("pin_memory"):
            self.check_not_recording(name, "it allocates pinned memory")
        takes_values = there.type == TYPE or packet is _ATEN._local_scalar_dense
        if takes_values and any(tensor.device.type == "cpu" and not tensor.dim() for tensor in tensors):
            self.check_not_recording(name, _FROZEN)

    def check_not_recording(self, operation: str, reason: str) -> None:
        """
        Args:
            operation: name of the operation that is about to run.
            reason: why it cannot be captured.

        Raises:
            CaptureError: a graph is being recorded or replayed.
        """
        if self._is_recording:
            raise CaptureError(f"{operation} at {_caller()} cannot be captured in a CUDA graph: {reason}")


def _common_device(func, tensors: list[Tensor], args) -> torch.device:
    """Where an operation computes.

    Raises:
        RuntimeError: its tensors are on several devices, and it is not one that may be.
    """
    packet = func.overloadpacket
    if packet in _COPIES:
        return args[0].device
    devices = {tensor.device for tensor in tensors}
    if len(devices) <= 1:
        return devices.pop() if devices else torch.device("cpu")
    takes_scalars = torch.Tag.pointwise in func.tags or packet in _TAKE_SCALARS
    if takes_scalars and not (func._schema.is_mutable and args[0].device.type == "cpu"):
        tensors = [tensor for tensor in tensors if tensor.dim() or tensor.device.type == TYPE]
    if packet in _INDEXING and args[0].device.type == TYPE:
        indices = {id(index) for index in args[1] if index is not None and index.device.type == "cpu"}
        tensors = [tensor for tensor in tensors if id(tensor) not in indices]
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        found = ", ".join(f"{list(tensor.shape)} on {tensor.device}" for tensor in tensors)
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {found}")
    return devices.pop()


def _depends_on_values(func, kwargs) -> bool:
    """Whether the host has to know values before it can go on: what they are, or how many."""
    if func.overloadpacket is _ATEN.repeat_interleave and kwargs.get("output_size") is not None:
        return False  # the caller says how many
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _asks_where(args) -> bool:
    """Whether indexing has to ask the device how many values of a mask are true."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


@cache
def _is_kernel(func) -> bool:
    """Whether an operation computes or writes something."""
    is_metadata = func.is_view or torch.Tag.inplace_view in func.tags
    return not is_metadata and func.overloadpacket not in _NO_KERNEL


@cache
def _takes_device(func) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _indexed(device: torch.device | None) -> torch.device | None:
    """The device by the name that its tensors have."""
    return torch.device(TYPE, 0) if device is not None and device.type == TYPE and device.index is None else device


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _unwrapped(value: Any) -> Any:
    if isinstance(value, PretendedTensor):
        return value.held
    if isinstance(value, list | tuple):
        return type(value)(_unwrapped(each) for each in value)
    return {key: _unwrapped(each) for key, each in value.items()} if isinstance(value, dict) else value


def _wrapped(value: Any, device: torch.device, known: dict[int, PretendedTensor]) -> Any:
    """What an operation returns: the arguments that it has changed, and new tensors on `device`."""
    if isinstance(value, Tensor):
        changed = known.get(id(value))
        if changed is None:
            return PretendedTensor(value, device) if device.type == TYPE else value
        if changed.shape != value.shape:
            raise NotImplementedError("a pretended device has no in-place changes of shape")
        return changed
    if isinstance(value, list | tuple):
        return type(value)(_wrapped(each, device, known) for each in value)
    return value


def _caller() -> str:
    """The innermost line of this repository outside this file, or of any other code."""
    frame, fallback = sys._getframe(1), "?"
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and "/torch/" not in file:
            if file.startswith(_REPOSITORY) and "/.venv/" not in file and not file.endswith(_PASSED_THROUGH):
                return f"{file[len(_REPOSITORY) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
            fallback = fallback if fallback != "?" else f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return fallback


@cache
def _register_guard() -> None:
    """What PyTorch asks to make a device the current one: there is nothing to do."""
    guard = _Guard()
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    _kept.append(guard)


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self):
        return torch._C._autograd.DeviceType.PrivateUse1


_kept: list[Any] = []


def _device_module() -> Any:
    """As much of `torch.cuda` as is asked for of any accelerator; of the device that is `present`."""

    def get_rng_state(_device: Any = None) -> Tensor:
        module.present.check_not_recording("get_rng_state", _RNG_STATE)
        return module.present._rng_state.clone()

    def set_rng_state(state: Tensor, _device: Any = None) -> None:
        module.present.check_not_recording("set_rng_state", _RNG_STATE)
        module.present._rng_state = state.clone()

    def manual_seed_all(seed: int) -> None:
        set_rng_state(_RealGenerator().manual_seed(seed).get_state())

    functions: dict[str, Callable[..., Any]] = {
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed_all": manual_seed_all,  # `torch.manual_seed` calls it
        "_is_in_bad_fork": lambda: False,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
    }
    module: Any = types.ModuleType(f"torch.{TYPE}")
    vars(module).update(functions, present=None)
    return module


_MODULE = _device_module()  # one for all: PyTorch remembers it


def _generator_class(device: PretendedDevice) -> Any:
    """`torch.Generator` that takes the device, too; notes which generators are its own."""

    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, _RealGenerator)

    class Generator(metaclass=Kind):
        def __new__(cls, device: Any = "cpu") -> Any:
            if torch.device(device).type != TYPE:
                return _RealGenerator(device)
            generator = _DeviceGenerator()
            present._generators[generator._cdata] = generator
            return generator

    class _DeviceGenerator(_RealGenerator):
        def __getattribute__(self, name: str) -> Any:
            if name in _STATE_METHODS:
                present.check_not_recording(f"Generator.{name}", _RNG_STATE)
            return super().__getattribute__(name)

    present = device
    return Generator
