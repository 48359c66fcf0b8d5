"""One configuration that kernels are generated for: its name, its legality, its derived numbers.

Templates read a Variant as `v`. Every number that follows from a configuration is a property here,
with a docstring that `python -m codegen explain` prints; templates do no arithmetic.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal, cast

from codegen.arch import ARCHS, Arch
from codegen.errors import CodegenError, unknown

Topology = Literal["intranode", "lowlatency", "internode"]
ArchName = Literal["host", "sm80", "sm90"]
DType = Literal["bf16", "fp8"]

UNITS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "intranode": ("variant", "notify", "dispatch", "combine"),
        "lowlatency": ("variant", "dispatch", "combine"),
        "internode": ("variant", "notify", "dispatch", "combine"),
    }
)
"""Translation units of a library, by topology; `variant` exports the library's identity."""

ELEM_BYTES: Mapping[str, int] = MappingProxyType({"bf16": 2, "fp8": 1})
ROW_ALIGNMENT = 16  # Bytes of the widest load and store of one thread.
MAX_HIDDEN = 1 << 20  # Keeps every offset inside a row, and a few rows, within 32 bits.
MAX_RANKS = 64  # Ranks of one memory domain: DEEPEP_MAX_RANKS in kernels/abi/deepep_kernel.h.
MAX_NODES = 64

GRAMMAR = "<topology>_<arch>_h<hidden|any>_<dtype>_r<ranks|any>"
_NAME = re.compile(
    r"(?P<topology>[a-z]+)_(?P<arch>[a-z0-9]+)_h(?P<hidden>any|[1-9][0-9]{0,9})"
    r"_(?P<dtype>[a-z0-9]+)_r(?P<ranks>any|[1-9][0-9]{0,9})(x(?P<nodes>[1-9][0-9]{0,9}))?"
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A legal configuration: constructing an illegal one raises CodegenError."""

    topology: Annotated[Topology, "How the ranks reach each other."]
    arch: Annotated[ArchName, "What the kernels run on."]
    hidden: Annotated[int, "Elements of one token; 0: given at run time."]
    dtype: Annotated[DType, "Elements that dispatch carries; combine always carries bf16."]
    num_ranks: Annotated[int, "Ranks of one memory domain; 0: given at run time."]
    num_nodes: Annotated[int, "Memory domains; 0: given at run time."] = 1

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def parse(cls, name: str) -> "Variant":
        """Return the variant that has this name; the inverse of `name`."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise CodegenError(
                f"variant name is {name!r}, but must read {GRAMMAR} in lower case, numbers without "
                "leading zeros, and ranks of several nodes as r<ranks per node>x<nodes>; "
                "write it like intranode_sm90_h7168_fp8_r8 (docs/variants.md)"
            )
        topology, arch, hidden, dtype, ranks, _, nodes = match.groups()
        any_nodes = topology == "internode" and ranks == "any"
        try:
            variant = cls(
                topology=cast(Topology, topology),
                arch=cast(ArchName, arch),
                hidden=0 if hidden == "any" else int(hidden),
                dtype=cast(DType, dtype),
                num_ranks=0 if ranks == "any" else int(ranks),
                num_nodes=int(nodes) if nodes else 0 if any_nodes else 1,
            )
        except CodegenError as error:
            raise CodegenError(f"variant {name}: {error}") from None
        if variant.name != name:
            raise CodegenError(
                f"variant name is {name!r}, but one node has no x1; write {variant.name}"
            )
        return variant

    def check(self) -> None:
        """Raise CodegenError unless kernels can be generated for this configuration."""
        for what, known in (("topology", UNITS), ("arch", ARCHS), ("dtype", ELEM_BYTES)):
            if getattr(self, what) not in known:
                raise unknown(what, getattr(self, what), known)
        if not 0 <= self.hidden <= MAX_HIDDEN:
            raise CodegenError(
                f"hidden is {self.hidden}, but must be 1 to {MAX_HIDDEN}, or 0 for any; "
                "write hany to give it at run time"
            )
        if self.row_bytes % ROW_ALIGNMENT:
            step = ROW_ALIGNMENT // self.elem_bytes
            raise CodegenError(
                f"hidden is {self.hidden}, in {self.dtype} a row of {self.row_bytes} bytes, but "
                f"a row must be a multiple of {ROW_ALIGNMENT} bytes; "
                f"pad hidden to {-(-self.hidden // step) * step}"
            )
        if not 0 <= self.num_ranks <= MAX_RANKS:
            raise CodegenError(
                f"ranks is {self.num_ranks}, but one memory domain has 1 to {MAX_RANKS}, or 0 "
                "for any; spread more ranks over nodes with internode and r<ranks per node>x<nodes>"
            )
        spans_nodes = self.topology == "internode"
        if not spans_nodes and self.num_nodes != 1:
            raise CodegenError(
                f"nodes is {self.num_nodes}, but {self.topology} joins ranks of one memory domain; "
                "write r<ranks> without x<nodes>, or choose internode"
            )
        any_ranks, any_nodes = self.num_ranks == 0, self.num_nodes == 0
        many_nodes = 2 <= self.num_nodes <= MAX_NODES
        if spans_nodes and (any_ranks != any_nodes or not (any_nodes or many_nodes)):
            raise CodegenError(
                f"ranks a node is {self.num_ranks} and nodes is {self.num_nodes}, but "
                f"internode joins 2 to {MAX_NODES} nodes, or 0 for any with any ranks; "
                "write r<ranks per node>x<nodes> or rany, or choose intranode for one node"
            )

    @property
    def name(self) -> str:
        """The variant's one name: table row, Bazel target, folder, library, manifest key."""
        ranks = str(self.num_ranks or "any")
        if self.num_nodes > 1:
            ranks += f"x{self.num_nodes}"
        hidden = self.hidden or "any"
        return f"{self.topology}_{self.arch}_h{hidden}_{self.dtype}_r{ranks}"

    @property
    def is_fp8(self) -> bool:
        """Dispatch carries FP8 rows and scales beside them."""
        return self.dtype == "fp8"

    @property
    def elem_bytes(self) -> int:
        """Bytes of one element that dispatch carries."""
        return ELEM_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token that dispatch carries, without scales; 0: given at run time."""
        return self.hidden * self.elem_bytes

    @property
    def is_host(self) -> bool:
        """Runs on the CPU, between processes or threads, without a GPU."""
        return self.arch == "host"

    @property
    def arch_facts(self) -> Arch:
        """The architecture's row of facts, for questions such as arch_facts.has_tma."""
        return ARCHS[self.arch]

    @property
    def arch_header(self) -> str:
        """Repository path of the header with the architecture's primitives."""
        return self.arch_facts.header

    @property
    def source_suffix(self) -> str:
        """File name suffix of rendered sources."""
        return self.arch_facts.source_suffix

    @property
    def needs_nvshmem(self) -> bool:
        """Links NVSHMEM: GPUs that no shared memory joins."""
        return self.topology == "internode" and not self.is_host

    @property
    def units(self) -> tuple[str, ...]:
        """Translation units of the library, one template each."""
        return UNITS[self.topology]

    @property
    def library(self) -> str:
        """File name of the shared library."""
        return f"libdeepep_{self.name}.so"

    @property
    def bazel_target(self) -> str:
        """Bazel target that builds the library; its output group `source` holds the sources."""
        return f"//kernels:{self.name}"
