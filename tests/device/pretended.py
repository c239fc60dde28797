"""A pretended GPU: tensors that say `cuda:0` and hold their numbers in host memory.

It refuses what CUDA refuses (operands on two devices, numpy of a device tensor), counts kernel
launches, waits of the host and copies, and can be without float64 or run out of memory. The real
engine runs on it. It says nothing about time, and streams have no overlap.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.attention import bias
from torch.nn.attention.bias import CausalBias
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from kvboost.models import kernels

HOST = torch.device("cpu")
VIEWS = {
    "view", "_unsafe_view", "slice", "select", "transpose", "unsqueeze", "expand", "permute", "t",
    "alias", "detach", "as_strided", "split", "split_with_sizes", "unbind", "squeeze", "narrow",
    "movedim", "lift_fresh", "_reshape_alias", "diagonal", "unfold", "view_as_real", "_conj",
    "numpy_T",
}  # fmt: skip
MADE = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
FREE = VIEWS | MADE | {"resolve_conj", "resolve_neg", "is_same_size", "set_", "is_pinned"}
WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "_unique2",
}  # fmt: skip
MAY_MIX = {"copy_", "_to_copy", "index", "index_put_", "index_put", "_index_put_impl_", "set_"}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
CONCATENATIONS = ("cat", "stack")


@dataclass(frozen=True)
class Copy:
    """A copy between host and device."""

    to_device: bool
    num_bytes: int
    is_pinned: bool
    is_blocking: bool
    thread: str


@dataclass
class Device:
    """What a pretended device did, and what it cannot do."""

    has_float64: bool = True
    has_compiler: bool = True
    has_tf32: bool = False  # products of several rows round their factors
    total_bytes: int = 1 << 32
    fails_at: int | None = None  # this allocation, counted from now, runs out of memory
    by_kernel: Counter[str] = field(default_factory=Counter)
    by_wait: Counter[str] = field(default_factory=Counter)
    copies: list[Copy] = field(default_factory=list)
    joined_bytes: int = 0  # by concatenation
    thread: str | None = None  # only what this thread does is counted
    current: dict[int, int] = field(default_factory=dict)  # device by thread

    @property
    def num_launches(self) -> int:
        """Kernels that were launched."""
        return self.by_kernel.total()

    @property
    def num_waits(self) -> int:
        """How often the host waited for the device."""
        return self.by_wait.total()

    @contextmanager
    def counted(self, thread: str | None = None) -> Iterator[None]:
        """Count what happens inside, from zero."""
        self.by_kernel.clear()
        self.by_wait.clear()
        self.copies.clear()
        self.joined_bytes, self.thread = 0, thread
        yield

    def launch(self, name: str, count: int = 1) -> None:
        """Count launches."""
        if self._counts():
            self.by_kernel[name] += count

    def wait(self, why: str) -> None:
        """Count a wait."""
        if self._counts():
            self.by_wait[why] += 1

    def copy(self, *, to_device: bool, host: torch.Tensor, non_blocking: bool) -> None:
        """Count a copy; one of pageable memory, or one that is waited for, is a wait."""
        is_pinned = is_pinned_host(host)
        is_blocking = not (non_blocking and is_pinned)
        name = threading.current_thread().name
        if self._counts():
            self.copies.append(Copy(to_device, host.nbytes, is_pinned, is_blocking, name))
        if is_blocking:
            self.wait("copy to the device" if to_device else "copy to the host")

    def allocate(self) -> None:
        """Take memory, or fail."""
        if self.fails_at is not None:
            self.fails_at -= 1
            if self.fails_at < 0:
                self.fails_at = None
                raise torch.OutOfMemoryError("CUDA out of memory. (pretended)")

    def mem_get_info(self, device: torch.device | None = None) -> tuple[int, int]:
        """Free and total bytes; the second device has half of them."""
        is_second = device is not None and torch.device(device).index == 1
        return (self.total_bytes // (1 + is_second),) * 2

    def set_device(self, device: torch.device) -> None:
        """Make a device the current one of this thread."""
        self.current[threading.get_ident()] = device.index

    def current_device(self) -> int:
        """That of this thread."""
        return self.current.get(threading.get_ident(), 0)

    def _counts(self) -> bool:
        return self.thread is None or threading.current_thread().name == self.thread


class DeviceTensor(torch.Tensor):
    """Says that it is on the device; its numbers are in `held`."""

    held: torch.Tensor
    owner: Device

    @staticmethod
    def __new__(cls, held: torch.Tensor, owner: Device, index: int = 0) -> DeviceTensor:
        tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device("cuda", index),
            requires_grad=False,
        )
        tensor.held, tensor.owner = held, owner
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, _ = tree_flatten((args, kwargs or {}))
        owner = next(each.owner for each in flat if isinstance(each, DeviceTensor))
        return _run(owner, func, args, kwargs or {})

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def is_pinned(self, *_: Any) -> bool:
        return False

    def tolist(self) -> Any:
        self.owner.copy(to_device=False, host=self.held, non_blocking=False)
        return self.held.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.held!r})"

    def __deepcopy__(self, memo: Any) -> DeviceTensor:
        return DeviceTensor(self.held.clone(), self.owner, self.device.index)


class _Mode(TorchDispatchMode):
    """Lets tensors be made on the device, in this thread."""

    def __init__(self, owner: Device) -> None:
        super().__init__()
        self._owner = owner

    def __enter__(self) -> Any:
        self._lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        torch._C._set_only_lift_cpu_tensors(self._lifted)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(self._owner, func, args, kwargs or {})


def is_pinned_host(tensor: torch.Tensor) -> bool:
    """Whether memory of the host is pinned, as far as pretended."""
    return tensor.untyped_storage().data_ptr() in _pinned


_pinned: set[int] = set()  # addresses


def _pin(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return _as_pinned(tensor.clone())


def _as_pinned(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    _pinned.add(storage.data_ptr())
    weakref.finalize(storage, _pinned.discard, storage.data_ptr())
    return tensor


def _run(owner: Device, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: C901
    name = func._schema.name.split("::")[1]
    flat, _ = tree_flatten((args, kwargs))
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    ours = [each for each in tensors if isinstance(each, DeviceTensor)]
    wanted = kwargs.get("device")
    goes_there = wanted is not None and torch.device(wanted).type == "cuda"
    if kwargs.get("pin_memory"):
        return _as_pinned(func(*args, **kwargs | {"pin_memory": False}))
    if not ours and not goes_there:
        return func(*args, **kwargs)
    if name in _ATTENTION:
        return _ATTENTION[name](owner, *args, **kwargs)
    index = (torch.device(wanted).index or 0) if goes_there else ours[0].device.index
    _refuse_mixed(name, tensors)
    out_dtype = kwargs.get("dtype")
    if not owner.has_float64 and (
        out_dtype is torch.float64 or any(each.dtype is torch.float64 for each in ours)
    ):
        raise TypeError("Cannot convert a tensor to float64: the device has none. (pretended)")
    if name not in VIEWS and name != "copy_":
        owner.allocate()
    _count(owner, name, args, kwargs, goes_there=goes_there)
    held = {id(each.held): each for each in ours}
    plain_args, plain = tree_map(_held, args), tree_map(_held, kwargs)
    if wanted is not None:
        plain["device"] = HOST
    if name in ("copy_", "_to_copy"):
        plain.pop("non_blocking", None)
        plain_args = plain_args[:2] if name == "copy_" else plain_args
    if owner.has_tf32 and name in PRODUCTS and tensors[-2].shape[-2] > 1:
        plain_args = tree_map(_as_tf32, plain_args)
    if name == "histc" and not plain_args[0].dtype.is_floating_point:  # CUDA has it
        result = func(plain_args[0].float(), *plain_args[1:], **plain).to(plain_args[0].dtype)
    else:
        result = func(*plain_args, **plain)
    if name in ("copy_", "set_"):
        return args[0]
    comes_here = wanted is not None and not goes_there
    sources = {each.untyped_storage().data_ptr() for each in map(_held, tensors)}

    def wrap(each: Any) -> Any:
        if not isinstance(each, torch.Tensor) or isinstance(each, DeviceTensor):
            return each
        if id(each) in held:
            return held[id(each)]
        if name == "_to_copy" and each.numel() and each.untyped_storage().data_ptr() in sources:
            each = each.clone()
        return each if comes_here else DeviceTensor(each, owner, index)

    return tree_map(wrap, result)


def _as_tf32(each: Any) -> Any:
    """A factor with 10 bits of mantissa."""
    if not isinstance(each, torch.Tensor) or each.dtype != torch.float32:
        return each
    return ((each.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


def _held(each: Any) -> Any:
    return each.held if isinstance(each, DeviceTensor) else each


def _refuse_mixed(name: str, tensors: list[torch.Tensor]) -> None:
    places = {str(each.device) for each in tensors if each.dim() > 0 and each.numel()}
    if len(places) > 1 and (name not in MAY_MIX or (len(places - {"cpu"}) > 1 and name != "copy_")):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted(places))}! ({name})"
        )


def _count(  # noqa: C901
    owner: Device, name: str, args: Any, kwargs: Any, *, goes_there: bool
) -> None:
    if name == "copy_":
        target, source = args[0], args[1]
        non_blocking = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
        _count_copy(owner, target, source, non_blocking)
    elif name == "_to_copy":
        source = args[0]
        is_there = isinstance(source, DeviceTensor)
        goes = goes_there or (is_there and kwargs.get("device") is None)
        if goes and is_there:
            owner.launch(name)
        else:
            owner.copy(
                to_device=goes,
                host=_held(source),
                non_blocking=bool(kwargs.get("non_blocking")),
            )
    elif name in FREE:
        return
    elif name in WAITS:
        owner.wait(name)
        owner.launch(name, count=int(name not in ("_local_scalar_dense", "item")))
    else:
        owner.launch(name)
        if name in CONCATENATIONS:
            owner.joined_bytes += sum(each.nbytes for each in args[0])
        if name.startswith("index"):
            for each in args[1] if isinstance(args[1], list | tuple) else ():
                if isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8):
                    owner.wait("an index of booleans")
                if isinstance(each, torch.Tensor) and not isinstance(each, DeviceTensor):
                    owner.copy(to_device=True, host=each, non_blocking=False)


def _count_copy(owner: Device, target: Any, source: Any, non_blocking: bool) -> None:
    there, here = isinstance(target, DeviceTensor), not isinstance(source, DeviceTensor)
    if there and here:
        owner.copy(to_device=True, host=source, non_blocking=non_blocking)
        if not target.is_contiguous() or source.dtype != target.dtype:
            owner.launch("copy_ of what arrived")
    elif not there:
        owner.copy(to_device=False, host=target, non_blocking=non_blocking)
        if not source.is_contiguous():
            owner.launch("copy_ of what leaves")
    elif target.held.data_ptr() != source.held.data_ptr() or target.stride() != source.stride():
        owner.launch("copy_")


# Attention as CUDA chooses it.

_sdpa = F.scaled_dot_product_attention


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logarithm of the softmax sum, in single precision."""
    group = query.shape[-3] // key.shape[-3]
    key, value = (each.float().repeat_interleave(group, -3) for each in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.float() @ key.mT * factor
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    total = scores.logsumexp(-1)
    return (scores - total[..., None]).exp().nan_to_num() @ value, total


def _lower_right(num_queries: int, num_keys: int, window: int = -1) -> torch.Tensor:
    own = torch.arange(num_queries)[:, None] + num_keys - num_queries
    keys = torch.arange(num_keys)
    return (keys <= own) & ((keys >= own - window) if window >= 0 else True)


def _chosen(query: Any, key: Any, value: Any, mask: Any, *, is_causal: bool) -> str:
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    is_plain = query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
    fits = not is_causal or query.shape[2] == key.shape[2]
    if torch.backends.cuda.flash_sdp_enabled() and is_half and is_plain and mask is None and fits:
        return "flash"
    return "efficient" if query.shape[1] == key.shape[1] else "math"


def _scaled_dot_product(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if isinstance(attn_mask, CausalBias):
        dispatch: Any = CausalBias._dispatch
        return dispatch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not isinstance(query, DeviceTensor):
        return _sdpa(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    for each in (key, value, attn_mask):
        assert each is None or isinstance(each, DeviceTensor), "attention over two devices"
    kind = _chosen(query, key, value, attn_mask, is_causal=is_causal)
    query.owner.launch(f"sdpa {kind}", {"flash": 1, "efficient": 1, "math": 9}[kind])
    mask = _held(attn_mask)
    if is_causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    with _disable_current_modes():
        output, _ = _attend(query.held, key.held, value.held, mask, scale)
        return _as_kernels_do(output, query)


def _as_kernels_do(output: torch.Tensor, query: DeviceTensor) -> DeviceTensor:
    """Memory [batch, queries, heads, dims], seen as [batch, heads, queries, dims]."""
    shaped = output.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return DeviceTensor(shaped, query.owner, query.device.index)


def _flash_lower_right(
    owner: Device, query: Any, key: Any, value: Any, *args: Any, scale: Any = None, **_: Any
) -> Any:
    """`aten::_scaled_dot_product_flash_attention`, as torch calls it for lower-right masks."""
    is_causal = len(args) > 1 and args[1]
    owner.launch("flash")
    mask = _lower_right(query.shape[2], key.shape[2]) if is_causal else None
    with _disable_current_modes():
        output, total = _attend(query.held, key.held, value.held, mask, scale)
        empty = torch.empty(0)
        found = DeviceTensor(total, owner, query.device.index)
        return (_as_kernels_do(output, query), found, empty, empty, 0, 0, empty, empty, empty)


def _flash_varlen(
    owner: Device,
    query: Any,
    key: Any,
    value: Any,
    first_queries: Any,
    first_keys: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    window_size_left: int = -1,
    window_size_right: int = -1,
    seqused_k: Any = None,
    **_: Any,
) -> Any:
    """`aten::_flash_attention_forward`: sequences one after another [tokens, heads, dims]."""
    assert query.dtype in (torch.float16, torch.bfloat16), "flash attention wants 16 bits"
    assert first_queries.dtype == first_keys.dtype == torch.int32
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    owner.launch("flash of several")
    with _disable_current_modes():
        starts, firsts = first_queries.held.tolist(), first_keys.held.tolist()
        used = None if seqused_k is None else seqused_k.held.tolist()
        output = torch.zeros(query.shape, dtype=torch.float32)
        total = torch.full((query.shape[1], query.shape[0]), -torch.inf)
        for number, (start, stop) in enumerate(itertools.pairwise(starts)):
            first = firsts[number]
            last = firsts[number + 1] if used is None else first + used[number]
            assert stop - start <= max_q and last - first <= max_k
            parts = [query.held[start:stop], key.held[first:last], value.held[first:last]]
            mask = None
            if is_causal:
                mask = _lower_right(stop - start, last - first, window_size_left)
            heads = [part.transpose(0, 1) for part in parts]
            if last > first and stop > start:
                seen, sums = _attend(heads[0], heads[1], heads[2], mask, scale)
                output[start:stop], total[:, start:stop] = seen.transpose(0, 1), sums
        index, empty = query.device.index, torch.empty(0)
        made = DeviceTensor(output.to(query.dtype), owner, index)
        return made, DeviceTensor(total, owner, index), empty, empty, empty


_ATTENTION: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _flash_lower_right,
    "_flash_attention_forward": _flash_varlen,
}


class _Stream:
    """In order with all others: nothing overlaps here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, other: Any) -> None:
        assert isinstance(other, _Stream)

    def wait_event(self, event: Any) -> None:
        assert isinstance(event, _Stream)

    def record_event(self, *_: Any) -> _Stream:
        return self

    def synchronize(self) -> None:
        if _Stream.owner is not None:
            _Stream.owner.wait("a stream")

    record, wait, query = record_event, wait_stream, lambda self: True
    owner: Device | None = None


@contextmanager
def _entered(stream: Any) -> Iterator[None]:
    yield


def _flex_mask(rule: Any, positions: Any, num_keys: int) -> Any:
    """FlexAttention's compiler cannot be had for a pretended device: its mask, written out."""
    owner = positions.owner
    if not owner.has_compiler:
        raise RuntimeError("Cannot find a working triton installation. (pretended)")
    owner.launch("block mask", 12)
    with _disable_current_modes():
        none, held = torch.zeros((), dtype=torch.long), positions.held
        over_keys = torch.vmap(lambda q, k: rule(none, none, q, k), (None, 0))
        seen = torch.vmap(over_keys, (0, None))(held, torch.arange(num_keys))
    mask = _BlockMask.__new__(_BlockMask)
    mask.seen = seen
    return mask


class _BlockMask(BlockMask):
    seen: torch.Tensor

    def to(self, *_: Any, **__: Any) -> _BlockMask:
        return self


def _flex(query: Any, key: Any, value: Any, mask: Any, scale: Any) -> Any:
    query.owner.launch("flex attention")
    with _disable_current_modes():
        output, _ = _attend(query.held, key.held, value.held, mask.seen, scale)
        return _as_kernels_do(output, query)


@contextmanager
def _guard_of_cpus() -> Iterator[None]:
    """Let torch find the guard of CPUs where it looks for that of CUDA devices."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before, guards[1] = guards[1], guards[0]
    try:
        yield
    finally:
        guards[1] = before


@contextmanager
def pretended(**traits: Any) -> Iterator[Device]:
    """A device, for everything that runs inside, in any thread."""
    owner = Device(**traits)
    run = threading.Thread.run

    def run_with_device(thread: threading.Thread) -> None:
        with _Mode(owner):
            run(thread)

    def lower_right(*sizes: int) -> Any:
        with _disable_current_modes():
            return causal_lower_right(*sizes)

    causal_lower_right = kernels.causal_lower_right
    _Stream.owner = owner
    is_half: Any = lambda parameters, debug=False: parameters.query.dtype in kernels.HALVES  # noqa: E731
    patches = [
        patch.object(F, "scaled_dot_product_attention", _scaled_dot_product),
        patch.object(bias, "can_use_flash_attention", is_half),
        patch.object(kernels, "causal_lower_right", lower_right),
        patch.object(kernels, "scattered_mask", _flex_mask),
        patch.object(kernels, "attend_scattered", _flex),
        patch.object(threading.Thread, "run", run_with_device),
        patch.object(torch.Tensor, "pin_memory", _pin),
        patch.object(torch.Tensor, "is_pinned", lambda self, *_: is_pinned_host(self)),
        patch.object(torch.cuda, "_lazy_init", lambda: None),
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "device_count", lambda: 2),
        patch.object(torch.cuda, "current_device", owner.current_device),
        patch.object(torch.cuda, "set_device", owner.set_device),
        patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        patch.object(torch.cuda, "get_device_name", lambda device=None: "pretended"),
        patch.object(torch.cuda, "mem_get_info", owner.mem_get_info),
        patch.object(torch.cuda, "max_memory_allocated", lambda device=None: 1 << 20),
        patch.object(
            torch.accelerator, "synchronize", lambda device=None: owner.wait("synchronize")
        ),
        patch.object(torch.cuda, "Stream", _Stream),
        patch.object(torch.cuda, "Event", _Stream),
        patch.object(torch.cuda, "stream", _entered),
        patch.object(torch.cuda, "current_stream", lambda device=None: _Stream()),
        patch.object(torch.cuda, "default_stream", lambda device=None: _Stream()),
    ]
    for each in patches:
        each.start()
    try:
        with _guard_of_cpus(), _Mode(owner):
            yield owner
    finally:
        for each in reversed(patches):
            each.stop()
        _pinned.clear()


def to_device(model: Any, owner: Device, index_of: Callable[[str], int] = lambda name: 0) -> Any:
    """Move a model there; `index_of` a module's name says to which device."""
    for name, module in model.named_modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                there = DeviceTensor(parameter.data, owner, index_of(name))
                module._parameters[key] = torch.nn.Parameter(there, requires_grad=False)
        for key, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[key] = DeviceTensor(buffer, owner, index_of(name))
    return model
