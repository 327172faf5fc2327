"""Runs in SGLang's process, as a custom weight loader: writes only the elements that changed.

Where an element of a Hugging Face tensor lies in the server's parameters, fused and cut for its rank as they
are, only the model's own `load_weights` knows. So that is given tensors which are NaN wherever nothing
changed, and a NaN that it copies leaves what is there. What it copies of a tensor is noted, and compared with
what came: from then on changes of that tensor are written where they belong without the model, and a thread
has them on the device before the server is paused. Imports nothing of Sluice."""

import gc
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch
from weakref import WeakKeyDictionary, ref

import torch
from safetensors import safe_open
from torch.overrides import TorchFunctionMode

log = logging.getLogger(__name__)
GAPS, VALUES, WHOLE = "gaps.", "values.", "whole."
"""How tensors of a file are called: of all elements of a dtype together, and those that it has whole. A gap
is how many elements lie between an element and the one before it in its flattened tensor: 16 bits without a
sign, in an int16."""
GAP_BITS = 0xFFFF
CHANGES = "changes"
"""Key in the file's metadata: its JSON gives name, shape and number of elements of each tensor by dtype."""
PIECE_ELEMENTS = 1 << 26
"""Written at a time: what that takes of the device besides stays small."""
TAKEN_ELEMENTS = 1 << 23
"""Gaps and values that come to the device at a time, one tensor's at least. The server waits for each copy:
there are few, and what they take of the device stays small."""
CHECKED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FILLING = (torch.Tensor.fill_,)
SOCKETS = "prepare-*.sock"
"""Names, beside a file of changes, of the sockets at which processes of a server prepare such a file."""
READY, GIVEN_UP = "ready", "changes are written meanwhile"
"""Answers of a process that has the changes on its device, and of one that was to write them before."""
SPARE_BYTES = 1 << 30
"""What a device has to have free besides what is prepared."""
USUAL_SWITCH_S = sys.getswitchinterval()
SWITCH_S = 2e-5
"""How long a thread that prepares waits for the interpreter at most. Each of its thousands of calls gives it
up for a moment, and an idle server, which looks for requests all the time, takes it: with Python's 5 ms a
server on a GPU prepared for 10 s."""
LOOK_S = 5.0
"""Seconds after which a thread looks whether its socket is still there."""
Named = tuple[str, torch.Tensor]
Entry = tuple[str, list[int], int]
"""A tensor's name and shape, and how many of its elements changed."""


def apply_2(model: Any, named_tensors: Sequence[Named]) -> None:
    """Have the model take a file in the second form there is, whose path is the only tensor: its bytes.
    Raises `RuntimeError` when a NaN got into a parameter: then the model writes weights in another way than
    by copying them, and the server has to be given all of them."""
    [(_, path)] = named_tensors
    file = Path(bytes(path.tolist()).decode())
    began = time.perf_counter()
    with _no_collection():
        spoiled = _places_of(model).applied(model, file)
    log.info("changes of weights written in %.3f s", time.perf_counter() - began)
    if spoiled:
        raise RuntimeError(
            f"{type(model).__name__} does not copy what it loads into {', '.join(sorted(spoiled)[:3])}, so "
            "changes alone cannot be written"
        )
    _listen(model, file.parent)


APPLY = f"sluice_changes.{apply_2.__name__}"
"""Name of `apply_2` among SGLang's custom weight loaders. Another form of the file is another name."""


@contextmanager
def _no_collection() -> Iterator[None]:
    """While inside, no garbage is looked for: that may take a third of a second of a pause."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Copy(NamedTuple):
    """What a model copies of a tensor into the storage of one of its parameters, or buffers."""

    parameter: str
    start: int
    """First element that it copies, in the flattened tensor."""
    offset: int
    """Where that one goes, in elements of the storage."""
    dims: tuple[tuple[int, int, int], ...]
    """Size of each dimension of what it copies, with its strides in the tensor and in the storage. A stride
    in the tensor spans all the dimensions after it."""

    def placed(
        self, where: torch.Tensor, what: torch.Tensor, elements: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where elements go whose positions in a tensor of so many are `where`, and those that go
        there."""
        if self.dims == ((elements, 1, 1),):
            return where + self.offset, what
        left, there = where - self.start, torch.full_like(where, self.offset)
        inside = left >= 0
        for size, stride, stride_there in self.dims:
            at = left.div(stride, rounding_mode="floor")
            inside &= at < size
            there.add_(at, alpha=stride_there)
            left.sub_(at, alpha=stride)
        inside &= left == 0
        return there[inside], what[inside]


class _Known(NamedTuple):
    """All that a model copies of one tensor."""

    shape: list[int]
    dtype: torch.dtype
    copies: tuple[_Copy, ...]


class _Write(NamedTuple):
    """Elements that are on the device, and where they belong."""

    parameter: str
    where: torch.Tensor
    """int32 or int64 [N], in elements of the parameter's storage."""
    what: torch.Tensor


class _Prepared(NamedTuple):
    file: Path
    writes: list[_Write]
    complete: bool
    """Whether the file has nothing else."""


class _Places:
    """Where the elements of a model's tensors belong, as far as that is known."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        """By Hugging Face name."""
        self._never = set[str]()
        """Names of tensors of which the model makes something else than copies."""
        self._storages: Mapping[str, int] = {}
        """Addresses of the parameters when the copies were noted."""
        self._moves = False
        """Whether parameters have other addresses from one version to the next."""
        self._prepared: _Prepared | None = None
        self._stream: torch.cuda.Stream | None = None
        self._lock = threading.Lock()
        """Held while changes are prepared or written."""
        self._writing = threading.Event()
        """Set when changes are to be written: what is not prepared by then is not waited for."""

    def prepare(self, model: Any, file: Path) -> str:
        """Bring the changes of a file to the device, beside the server's own work; return `READY`, or why
        they are not there."""
        with self._lock, torch.no_grad():
            self._prepared = None
            device = next(model.parameters()).device
            if not self._known:
                return "the places of no tensor are known"
            if device.type != "cuda":
                self._prepared = self._read(file, device)
                return READY if self._prepared else GIVEN_UP
            torch.cuda.set_device(device)
            if (free := _free_bytes(device)) < 2 * file.stat().st_size + SPARE_BYTES:
                return f"the device has {free:,} bytes free"
            if self._stream is None:  # always the same one: memory that was of one stream serves no other
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                prepared = self._read(file, device)
            self._stream.synchronize()
            self._prepared = prepared
            return READY if prepared else GIVEN_UP

    def applied(self, model: Any, file: Path) -> set[str]:
        """Have the model take the file, and return the names of what has a NaN since."""
        device = next(model.parameters()).device
        self._writing.set()
        with self._lock, torch.no_grad():
            self._writing.clear()
            tensors = _held(model)
            storages = {name: _address(tensor) for name, tensor in tensors.items()}
            prepared, self._prepared = self._prepared, None
            if storages != self._storages:
                self._moves = bool(self._storages)
                self._known, self._storages, prepared = {}, storages, None
            if prepared is not None and prepared.file != file:
                prepared = None
            writes = self._writes(file, device) if prepared is None else prepared.writes
            for write in writes:
                flat = _flat(tensors[write.parameter])
                flat.index_copy_(0, write.where.long(), write.what.to(flat.dtype))
            complete = prepared is not None and prepared.complete
            spoiled = set[str]() if complete else self._loaded(model, tensors, file, device)
            if device.type == "cuda":  # memory of another stream is free again afterwards
                torch.cuda.current_stream(device).synchronize()
        log.info("changes were %s", "prepared" if prepared else "not prepared")
        return spoiled

    def _read(self, file: Path, device: torch.device) -> _Prepared | None:
        """Return what a file has, or None where changes are to be written before it is all here."""
        with safe_open(file, "pt") as opened:
            complete = not (_any(_entries(opened, self._is_unknown)) or any(_names_whole(opened)))
        writes: list[_Write] = []
        for write in self._writes(file, device):
            if self._writing.is_set():
                return None
            writes.append(write)
        return _Prepared(file, writes, complete)

    def _writes(self, file: Path, device: torch.device) -> Iterator[_Write]:
        """Yield what a file has of tensors whose places are known."""
        with safe_open(file, "pt") as opened:
            for (name, shape, _), where, what in _changed(opened, device, self._is_known):
                for copy in self._known[name].copies:
                    there, values = copy.placed(where, what, prod(shape))
                    yield _Write(copy.parameter, _narrow(copy, there), values)

    def _is_known(self, entry: Entry, dtype: torch.dtype) -> bool:
        found = self._known.get(entry[0])
        return found is not None and (found.shape, found.dtype) == (entry[1], dtype)

    def _is_unknown(self, entry: Entry, dtype: torch.dtype) -> bool:
        return not self._is_known(entry, dtype)

    def _loaded(
        self, model: Any, tensors: Mapping[str, torch.Tensor], file: Path, device: torch.device
    ) -> set[str]:
        """Have the model load all else of the file; return the names of what has a NaN since."""
        with safe_open(file, "pt") as opened:
            if not _any(_entries(opened, self._is_unknown)):
                if whole := list(_whole(opened, device)):
                    model.load_weights(whole)
                return set()
            before, noting = _with_nan(tensors, device), _Noting(tensors)
            with _in_this_thread(), _NanChangesNothing(noting):
                model.load_weights(self._unknown(opened, device, noting))
        found = noting.proved()
        self._never |= noting.begun - found.keys()
        self._known |= found
        return _with_nan(_held(model), device) - before

    def _unknown(self, opened: Any, device: torch.device, noting: "_Noting") -> Iterator[Named]:
        """Yield the tensors whose places are not known, NaN where nothing changed, one at a time: each has
        its full size."""
        for (name, shape, _), where, what in _changed(opened, device, self._is_unknown):
            tensor = torch.full(shape, torch.nan, dtype=what.dtype, device=what.device)
            tensor.view(-1).index_copy_(0, where, what)
            if name in self._never or self._moves:
                yield name, tensor
            else:
                noting.begin(name, tensor)
                yield name, tensor
                noting.end(where, what)
            del tensor  # before there is the next
        yield from _whole(opened, device)
        noting.exhausted()


class _Noting:
    """Notes what a model copies of each tensor that it loads."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._names = {_address(tensor): name for name, tensor in tensors.items() if tensor.numel()}
        self.begun = set[str]()
        """Names of the tensors that the model has been given."""
        self._name, self._loaded = "", torch.empty(0)
        self._copies: list[_Copy] | None = None
        """Copies of the tensor that is being loaded; None where the model does something else with it."""
        self._found: dict[str, _Known] = {}
        self._wrong: list[tuple[str, torch.Tensor]] = []
        """Whether the elements of a tensor are elsewhere than the copies say."""
        self._stage: Literal["between", "loading", "after"] = "between"
        self._computes_after = False
        """Whether the model computes something when it has loaded all."""

    def begin(self, name: str, tensor: torch.Tensor) -> None:
        self.begun.add(name)
        self._name, self._loaded, self._copies, self._stage = name, tensor, [], "loading"

    def end(self, where: torch.Tensor, what: torch.Tensor) -> None:
        """The model has loaded the tensor; `what` has come at the positions `where`."""
        self._stage = "between"
        for copy in self._copies or ():
            there, values = copy.placed(where, what, self._loaded.numel())
            found = _flat(self._tensors[copy.parameter])[there]
            self._wrong.append((self._name, (found != values.to(found.dtype)).any()))
        if self._copies:
            loaded = self._loaded
            self._found[self._name] = _Known([*loaded.shape], loaded.dtype, tuple(self._copies))
        self._loaded = torch.empty(0)

    def exhausted(self) -> None:
        """The model has been given all tensors."""
        if self.begun:
            self._stage = "after"

    def proved(self) -> dict[str, _Known]:
        """Return what is known now: nothing of a model that computes something from what it has loaded."""
        if self._computes_after or not self._wrong:
            return {}
        wrong = torch.stack([each for _, each in self._wrong]).tolist()
        names = {name for (name, _), is_wrong in zip(self._wrong, wrong, strict=True) if is_wrong}
        return {name: known for name, known in self._found.items() if name not in names}

    def copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """The model has copied `source` into `target`."""
        name, dims = self._names.get(_address(target)), _dims(target, source)
        is_of_it = self._stage == "loading" and _address(source) == _address(self._loaded)
        if not is_of_it or name is None or dims is None or target.dtype != self._tensors[name].dtype:
            self._computed()
        elif self._copies is not None:
            start, offset = int(source.storage_offset()), int(target.storage_offset())
            self._copies.append(_Copy(name, start, offset, dims))

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """The model has called a function of torch. One that returns a view, a size or the like is
        harmless, and so is one that fills rows behind a vocabulary with what they have already."""
        if self._stage == "between" or (func in FILLING and not isinstance(args[-1], torch.Tensor)):
            return
        name = getattr(func, "__name__", "")
        results = result if isinstance(result, tuple | list) else (result,)
        if (
            name in ("__set__", "__setitem__")
            or (name.endswith("_") and not name.endswith("__"))
            or "out" in kwargs
            or any(self._is_other(one) for one in results if isinstance(one, torch.Tensor) and one.numel())
        ):
            self._computed()

    def _is_other(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies neither in the model nor in what it is loading."""
        address = _address(tensor)
        return address not in self._names and address != _address(self._loaded)

    def _computed(self) -> None:
        if self._stage == "loading":
            self._copies = None
        elif self._stage == "after":
            self._computes_after = True


def _dims(target: torch.Tensor, source: torch.Tensor) -> tuple[tuple[int, int, int], ...] | None:
    """Return the dimensions of a copy, as `_Copy` has them; None where the strides are no such."""
    if target.shape != source.shape:
        return None
    dims: list[tuple[int, int, int]] = []
    every = zip(source.shape, source.stride(), target.stride(), strict=True)
    for size, stride, there in sorted((each for each in every if each[0] > 1), key=lambda each: -each[1]):
        if stride == 0 or there == 0:
            return None
        if dims:
            outer_size, outer_stride, outer_there = dims[-1]
            if outer_stride < size * stride:
                return None
            if (outer_stride, outer_there) == (size * stride, size * there):
                dims[-1] = (outer_size * size, stride, there)
                continue
        dims.append((size, stride, there))
    return tuple(dims) or ((1, 1, 1),)


def _narrow(copy: _Copy, there: torch.Tensor) -> torch.Tensor:
    """Return places in as few bytes as they need."""
    last = copy.offset + sum((size - 1) * stride for size, _, stride in copy.dims)
    return there.int() if last < 1 << 31 else there


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _held(model: Any) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all that the storage of a tensor has."""
    storage = tensor.untyped_storage()
    return tensor.new_empty(0).set_(storage, 0, (storage.nbytes() // tensor.itemsize,), (1,))


def _any(found: Iterator[object]) -> bool:
    return next(found, None) is not None


def _free_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return free


def _entries(opened: Any, wanted: Callable[[Entry, torch.dtype], bool]) -> Iterator[tuple[str, Entry, int]]:
    """Yield the wanted entries of a file, with their dtype and where their elements begin."""
    for kind, entries in json.loads(opened.metadata()[CHANGES]).items():
        begin = 0
        for name, shape, count in entries:
            if wanted((name, shape, count), getattr(torch, kind)):
                yield kind, (name, shape, count), begin
            begin += count


def _changed(
    opened: Any, device: torch.device, wanted: Callable[[Entry, torch.dtype], bool]
) -> Iterator[tuple[Entry, torch.Tensor, torch.Tensor]]:
    """Yield the entries that are wanted, with the positions of what changed and the new elements."""
    for kind, begin, part in _together(_entries(opened, wanted)):
        counts = [count for _, _, count in part]
        place = slice(begin, begin + sum(counts))
        gaps, values = (opened.get_slice(each + kind)[place].to(device) for each in (GAPS, VALUES))
        yield from zip(
            part, *(torch.split(each, counts) for each in (_positions(gaps, counts), values)), strict=True
        )


def _whole(opened: Any, device: torch.device) -> Iterator[Named]:
    """Yield the tensors that a file has whole."""
    for name in _names_whole(opened):
        yield name.removeprefix(WHOLE), opened.get_tensor(name).to(device)


def _names_whole(opened: Any) -> list[str]:
    return [name for name in opened.keys() if name.startswith(WHOLE)]  # noqa: SIM118 - it is no mapping


@contextmanager
def _in_this_thread() -> Iterator[None]:
    """While inside, what this thread has other threads do, it does itself: DeepSeek's tensors are copied by
    a pool, whose threads have not entered a mode of this one."""
    mine, submit = threading.get_ident(), ThreadPoolExecutor.submit

    def done(pool: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != mine:
            return submit(pool, work, *args, **kwargs)
        future: Future[Any] = Future()
        future.set_result(work(*args, **kwargs))  # an error ends the update, as one of a future does
        return future

    with patch.object(ThreadPoolExecutor, "submit", done):
        yield


def _positions(gaps: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """int64 [N], where the elements lie in their tensors, of which each has so many: all at once. For a
    single tensor, which may be a large one, it is made in one piece of memory."""
    positions = gaps.long().bitwise_and_(GAP_BITS).add_(1).cumsum_(0).sub_(1)
    if len(counts) == 1 or not len(positions):
        return positions
    sizes = torch.tensor(counts, device=gaps.device)
    begins = torch.tensor([0, *accumulate(counts[:-1])], device=gaps.device)
    before = (positions[begins - 1] + 1) * (begins > 0)  # what the tensors before have added up to
    return positions.sub_(before.repeat_interleave(sizes, output_size=len(positions)))


def _together(found: Iterator[tuple[str, Entry, int]]) -> Iterator[tuple[str, int, list[Entry]]]:
    """Yield the entries of consecutive tensors that come to the device in one copy, with their dtype and
    where their elements begin."""
    together: list[Entry] = []
    kind, begin, taken = "", 0, 0
    for kind_here, entry, place in found:
        follows = (kind_here, place) == (kind, begin + taken)
        if together and not (follows and taken + entry[2] <= TAKEN_ELEMENTS):
            yield kind, begin, together
            together = []
        if not together:
            kind, begin, taken = kind_here, place, 0
        together.append(entry)
        taken += entry[2]
    if together:
        yield kind, begin, together


class _NanChangesNothing(TorchFunctionMode):
    """While this context is entered, copying a NaN by `Tensor.copy_` or `tensor[...] = ` leaves what is
    there. What PyTorch's own code copies it does not see: a NaN that gets in by that is found in the end.
    `TorchDispatchMode` would see it, and takes longer over all that is called meanwhile."""

    def __init__(self, noting: _Noting | None = None) -> None:
        super().__init__()
        self._noting = noting

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__setitem__ and isinstance(args[2], torch.Tensor):
            part = args[0][args[1]]
            if _address(part) == _address(args[0]):  # no copy of it
                return self.__torch_function__(torch.Tensor.copy_, types, (part, args[2]))
        if func is not torch.Tensor.copy_ or not args[1].is_floating_point():
            result = func(*args, **(kwargs or {}))
            if self._noting is not None:
                self._noting.called(func, args, kwargs or {}, result)
            return result
        target, source = args[:2]
        if self._noting is not None:
            self._noting.copied(target, source)
        pieces = [(target, source)]
        if target.numel() > PIECE_ELEMENTS:
            rows = max(1, PIECE_ELEMENTS * target.shape[0] // target.numel())
            pieces = [*zip(target.split(rows), source.expand_as(target).split(rows), strict=True)]
        for old, new in pieces:
            torch.where(new.isnan(), old, new.to(old.dtype), out=old)
        return target


def _with_nan(tensors: Mapping[str, torch.Tensor], device: torch.device) -> set[str]:
    """Return the names of the parameters and buffers that have a NaN somewhere."""
    largest = {
        name: tensor.amax().to(device, torch.float64)
        for name, tensor in tensors.items()
        if tensor.dtype in CHECKED and tensor.numel()
    }
    found = torch.stack(list(largest.values())).isnan().tolist()
    return {name for name, is_nan in zip(largest, found, strict=True) if is_nan}


@contextmanager
def short(address: Path) -> Iterator[str]:
    """Inside, the socket has this path, of which the system wants no more than 107 bytes."""
    directory = os.open(address.parent, os.O_PATH)
    try:
        yield f"/proc/self/fd/{directory}/{address.name}"
    finally:
        os.close(directory)


class _Listener:
    """A thread that prepares files of changes when an actor asks for it."""

    def __init__(self, model: Any, address: Path) -> None:
        self.model = ref(model)
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX)
        with short(address) as path:
            self._socket.bind(path)
        self._socket.listen()
        self._socket.settimeout(LOOK_S)
        threading.Thread(target=self._serve, name="prepare changes", daemon=True).start()

    def _serve(self) -> None:
        with self._socket:
            while self._address.exists():
                with suppress(TimeoutError, ConnectionError):
                    asking, _ = self._socket.accept()
                    with asking:
                        asking.settimeout(LOOK_S)
                        asking.sendall(self._answer(asking.makefile().readline().strip()).encode())
        _listeners.pop(self._address, None)

    def _answer(self, file: str) -> str:
        began = time.perf_counter()
        model = self.model()
        sys.setswitchinterval(SWITCH_S)
        try:
            answer = READY if model is None else _places_of(model).prepare(model, Path(file))
        except Exception as error:  # noqa: BLE001 - whatever it is: the server writes them unprepared, and goes on
            answer = repr(error)
        finally:
            sys.setswitchinterval(USUAL_SWITCH_S)
        log.info("changes prepared in %.3f s: %s", time.perf_counter() - began, answer)
        return answer


_places: WeakKeyDictionary[Any, _Places] = WeakKeyDictionary()
_listeners: dict[Path, _Listener] = {}


def _places_of(model: Any) -> _Places:
    return _places.setdefault(model, _Places())


def _listen(model: Any, directory: Path) -> None:
    """Have a thread prepare the next files in a directory. Without one all is done in the pause."""
    address = directory / SOCKETS.replace("*", str(os.getpid()))
    if address in _listeners:
        _listeners[address].model = ref(model)
        return
    try:
        _listeners[address] = _Listener(model, address)
    except OSError as error:  # a directory of another user, or on a file system without sockets
        log.warning("changes are not prepared: %s: %s", address, error)
