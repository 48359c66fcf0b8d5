"""What the locked wheels hold beyond Python: C++ headers to use, and large parts to leave out."""

LAYOUT = {
    "numpy": {"exclude": [
        "site/numpy/**/tests/**",
        "site/numpy/_core/include/**",
        "site/numpy/f2py/**",
    ]},
    "pybind11": {"include_dirs": ["pybind11/include"]},
    # Every excluded file is one link less in the runfiles of each test that imports torch.
    "torch": {"exclude": [
        "site/torch/**/*.a",
        "site/torch/include/**",
        "site/torch/share/**",
        "site/torch/test/**",
    ]},
}
