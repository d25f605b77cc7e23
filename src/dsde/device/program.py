"""Work that a device goes through by itself, some of it only where, or as long as, a word in its memory says so.

On a CUDA device one graph with conditional nodes, for which PyTorch has no words yet: the driver is asked for them, and
a tiny kernel hands them what the word says. Elsewhere the host looks at the words. Knows nothing of
what is worked on.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, byref, c_char_p, c_int, c_longlong, c_uint, c_ulonglong, c_void_p
from functools import cache
from typing import Any, Protocol

import torch

_OLDEST_DRIVER = 12040
"""The first whose graphs have conditional nodes of both kinds."""
_KERNEL, _CONDITIONAL = 0, 13
"""kinds of nodes"""
_IF, _WHILE = 0, 1
_PARAMS_BYTES = 256

# The driver links the function it calls. A word that is not zero is a yes.
_PTX = b"""
.version 8.3
.target sm_80
.address_size 64
.extern .func cudaGraphSetConditional (.param .b64 handle, .param .b32 value);
.visible .entry look(.param .u64 handle, .param .u64 word)
{
    .reg .b64 %rd<4>;
    .reg .b32 %r<3>;
    .reg .pred %p<2>;
    ld.param.u64 %rd1, [handle];
    ld.param.u64 %rd2, [word];
    cvta.to.global.u64 %rd3, %rd2;
    ld.volatile.global.u32 %r1, [%rd3];
    setp.ne.u32 %p1, %r1, 0;
    selp.u32 %r2, 1, 0, %p1;
    {
        .param .b64 to;
        st.param.b64 [to], %rd1;
        .param .b32 says;
        st.param.b32 [says], %r2;
        call.uni cudaGraphSetConditional, (to, says);
    }
    ret;
}
"""


class ProgramError(RuntimeError):
    """The driver does not take a program."""


class Work(Protocol):
    """A captured graph, or something that can be done as one is replayed."""

    def replay(self) -> None: ...

    def raw_cuda_graph(self) -> int: ...


class Program:
    """Is written once, and run any number of times."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lines: list[tuple[str, list[tuple[torch.Tensor | None, Work]]]] = []
        self._graph: _DriverGraph | None = None

    def then(self, work: Work) -> None:
        self._lines.append(("then", [(None, work)]))

    def as_long_as(self, word: torch.Tensor, work: Work) -> None:
        """Over and over, which is to change the word ([1] int32)."""
        self._lines.append(("while", [(word, work)]))

    def one_of(self, choices: list[tuple[torch.Tensor, Work]]) -> None:
        """Whichever has its word set: one at most."""
        self._lines.append(("if", list(choices)))

    def finish(self) -> None:
        """Nothing more will be written."""
        if self._device.type == "cuda":
            self._graph = _DriverGraph(self._lines)

    def run(self) -> None:
        """Or rather queue it, once it is finished."""
        if self._graph is not None:
            self._graph.launch()
            return
        for kind, choices in self._lines:
            for word, work in choices:
                if kind == "while":
                    while int(word):  # type: ignore[arg-type]
                        work.replay()
                elif word is None or int(word):
                    work.replay()


@cache
def can_run(device: torch.device) -> bool:
    """Whether programs can be run there without the host."""
    if device.type != "cuda":
        return True
    version = c_int()
    try:
        _check(_driver().cuDriverGetVersion(byref(version)), "cuDriverGetVersion")
    except (OSError, ProgramError):  # it goes by another name there
        return False
    return version.value >= _OLDEST_DRIVER and hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph")


class _KernelParams(ctypes.Structure):
    _fields_ = (
        ("function", c_void_p),
        *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")),
        ("arguments", c_void_p),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


class _ConditionalParams(ctypes.Structure):
    _fields_ = (
        ("handle", c_ulonglong),
        ("kind", c_int),
        ("num_bodies", c_uint),
        ("bodies", POINTER(c_void_p)),
        ("context", c_void_p),
    )


class _AnyParams(ctypes.Union):
    _fields_ = (("reserved", c_longlong * 29), ("kernel", _KernelParams), ("conditional", _ConditionalParams))


class _NodeParams(ctypes.Structure):
    _fields_ = (("kind", c_int), ("reserved0", c_int * 3), ("of", _AnyParams), ("reserved2", c_longlong))


assert ctypes.sizeof(_NodeParams) == _PARAMS_BYTES, "not the driver's layout"


class _DriverGraph:
    def __init__(self, lines: list[tuple[str, list[tuple[torch.Tensor | None, Work]]]]) -> None:
        self._driver = _driver()
        self._look, self._context = _look_kernel(torch.cuda.current_device())
        # Child graphs are copied, but not the memory that they work on.
        self._lines = lines
        self._graph, self._executable = c_void_p(), c_void_p()
        _check(self._driver.cuGraphCreate(byref(self._graph), c_uint(0)), "cuGraphCreate")
        weakref.finalize(self, _destroy, self._graph, self._executable).atexit = False
        last: list[c_void_p] = []
        for kind, choices in lines:
            last = [self._add(self._graph, last, kind, word, work) for word, work in choices]
        rc = self._driver.cuGraphInstantiateWithFlags(byref(self._executable), self._graph, c_ulonglong(0))
        _check(rc, "cuGraphInstantiateWithFlags")

    def launch(self) -> None:
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(self._driver.cuGraphLaunch(self._executable, stream), "cuGraphLaunch")

    def _add(
        self, graph: c_void_p, after: list[c_void_p], kind: str, word: torch.Tensor | None, work: Work
    ) -> c_void_p:
        if word is None:
            return self._add_child(graph, after, work)
        handle = c_ulonglong()
        # At every launch it begins as a no.
        rc = self._driver.cuGraphConditionalHandleCreate(byref(handle), graph, self._context, c_uint(0), c_uint(1))
        _check(rc, "cuGraphConditionalHandleCreate")
        look = self._add_look(graph, after, handle, word)
        params = _NodeParams(kind=_CONDITIONAL)
        params.of.conditional = _ConditionalParams(
            handle.value, _WHILE if kind == "while" else _IF, 1, None, self._context.value
        )
        node = self._add_node(graph, [look], params)
        body = c_void_p(params.of.conditional.bodies[0])
        done = self._add_child(body, [], work)
        if kind == "while":
            self._add_look(body, [done], handle, word)
        return node

    def _add_look(self, graph: c_void_p, after: list[c_void_p], handle: c_ulonglong, word: torch.Tensor) -> c_void_p:
        place = c_ulonglong(word.data_ptr())
        # Read while the node is added, not later.
        arguments = (c_void_p * 2)(ctypes.addressof(handle), ctypes.addressof(place))
        params = _NodeParams(kind=_KERNEL)
        params.of.kernel = _KernelParams(
            self._look.value, 1, 1, 1, 1, 1, 1, 0, ctypes.addressof(arguments), None, None, None
        )
        return self._add_node(graph, after, params)

    def _add_node(self, graph: c_void_p, after: list[c_void_p], params: _NodeParams) -> c_void_p:
        node = c_void_p()
        before = (c_void_p * max(len(after), 1))(*after)
        rc = self._driver.cuGraphAddNode(byref(node), graph, before, ctypes.c_size_t(len(after)), byref(params))
        _check(rc, "cuGraphAddNode")
        return node

    def _add_child(self, graph: c_void_p, after: list[c_void_p], work: Work) -> c_void_p:
        node = c_void_p()
        before = (c_void_p * max(len(after), 1))(*after)
        child = c_void_p(work.raw_cuda_graph())
        rc = self._driver.cuGraphAddChildGraphNode(byref(node), graph, before, ctypes.c_size_t(len(after)), child)
        _check(rc, "cuGraphAddChildGraphNode")
        return node


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _look_kernel(device: int) -> tuple[c_void_p, c_void_p]:
    """And the context that it is loaded in, which is that of the device."""
    driver, module, kernel, context = _driver(), c_void_p(), c_void_p(), c_void_p()
    _check(driver.cuCtxGetCurrent(byref(context)), "cuCtxGetCurrent")
    _check(driver.cuModuleLoadData(byref(module), _PTX), "cuModuleLoadData")
    _check(driver.cuModuleGetFunction(byref(kernel), module, b"look"), "cuModuleGetFunction")
    return kernel, context


def _destroy(graph: c_void_p, executable: c_void_p) -> None:
    _driver().cuCtxSynchronize()  # it may be under way
    if executable:
        _driver().cuGraphExecDestroy(executable)
    _driver().cuGraphDestroy(graph)


def _check(rc: int, call: str) -> None:
    if rc:
        name = c_char_p()
        _driver().cuGetErrorName(rc, byref(name))
        raise ProgramError(f"{call} failed: {(name.value or b'unknown').decode()}.")
