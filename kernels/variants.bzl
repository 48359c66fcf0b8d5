"""The one table of what is built: families of axes, expanded to variant names.

A name is a row here, a Bazel target, a folder of generated source, a library and a manifest key;
docs/variants.md explains its parts. Adding a configuration is one word in one list.

Must hold: this file loads nothing and uses only what Starlark and Python read alike, since codegen
reads it without Bazel. Whether a name is legal, codegen/variant.py decides when it is built.
"""

def _family(topology, archs, hidden, dtypes, ranks):
    """Every combination of the given values, as names."""
    return [
        "_".join([topology, arch, "h" + h, dtype, "r" + r])
        for arch in archs
        for h in hidden
        for dtype in dtypes
        for r in ranks
    ]

def _unique(names):
    """The names in their order, each once: EXTRA may repeat one of a family."""
    return list({name: None for name in names})

_DTYPES = ["bf16", "fp8"]

# What every build holds, and the tests use: any shape on the CPU, and exact shapes to compare with.
DEFAULT = (
    _family("intranode", ["host"], ["any"], _DTYPES, ["any"]) +
    _family("intranode", ["host"], ["7168"], _DTYPES, ["8"]) +
    _family("intranode", ["host"], ["512", "2048"], ["bf16"], ["4"]) +
    _family("lowlatency", ["host"], ["any"], _DTYPES, ["any"]) +
    _family("lowlatency", ["host"], ["7168"], ["fp8"], ["8"]) +
    _family("internode", ["host"], ["any"], _DTYPES, ["any"]) +
    _family("internode", ["host"], ["512"], ["bf16"], ["2x2"])
)

# Any shape, and DeepSeek-V3's, on the GPU architectures.
GPU = (
    _family("intranode", ["sm80", "sm90"], ["any"], _DTYPES, ["any"]) +
    _family("intranode", ["sm80", "sm90"], ["7168"], _DTYPES, ["8"]) +
    _family("lowlatency", ["sm80", "sm90"], ["any"], _DTYPES, ["any"]) +
    _family("lowlatency", ["sm80", "sm90"], ["7168"], _DTYPES, ["8"])
)

# Exact kernels for well-known public models, 8 ranks to a node.
_MODELS = {
    "2048": "Qwen3-30B",
    "2880": "gpt-oss",
    "3072": "MiniMax-M2",
    "4096": "Qwen3-235B, Mixtral",
    "5120": "GLM-4.5",
}

CATALOG = (
    _family("intranode", ["sm80", "sm90"], list(_MODELS), _DTYPES, ["8"]) +
    _family("lowlatency", ["sm80", "sm90"], list(_MODELS), _DTYPES, ["8"]) +
    _family("internode", ["sm80", "sm90"], ["any"], _DTYPES, ["any"])
)

# Variants that were added one by one. `./bazelw run //tools:gen_variants -- --help` checks new rows,
# writes them here, sorted, and says how to build them; a name may be typed in as well.
EXTRA = [
]

# The sets that //kernels:libraries can hold, chosen by --kernels=NAME. The default one builds without
# CUDA, so it takes the host variants of EXTRA only.
SETS = {
    "default": _unique(DEFAULT + [name for name in EXTRA if "_host_" in name]),
    "gpu": _unique(DEFAULT + GPU + EXTRA),
    "catalog": _unique(DEFAULT + GPU + EXTRA + CATALOG),
}

# Every name once; each is a target of //kernels.
VARIANTS = SETS["catalog"]
