"""What the locked wheels hold beyond Python: C++ headers to use, and large parts to leave out."""

# Every excluded file is one link less in the runfiles of each test that imports torch.
LAYOUT = {
    "mpmath": {"exclude": ["site/mpmath/tests/**"]},
    "networkx": {"exclude": ["site/networkx/**/tests/**"]},
    "numpy": {"exclude": [
        "site/numpy/**/tests/**",
        "site/numpy/_core/include/**",
        "site/numpy/f2py/**",
    ]},
    "pybind11": {"include_dirs": ["pybind11/include"]},
    "ruff": {"programs": True},
    "sympy": {"exclude": [
        "site/sympy/**/benchmarks/**",
        "site/sympy/**/tests/**",
    ]},
    "torch": {"exclude": [
        "site/torch/**/*.a",
        "site/torch/include/**",
        "site/torch/share/**",
        "site/torch/test/**",
    ]},
}
