"""pytest_test(): one test file under pytest. pytest_tests(): one such target for each of many files."""

def pytest_test(name, src, deps = [], data = [], **kwargs):
    """A test file that pytest runs, with the settings of pyproject.toml.

    `bazel test --test_filter=EXPRESSION` becomes pytest's -k, --test_arg=ARG is passed on.

    Args:
      name: the target's name.
      src: the file.
      deps: Python libraries beside pytest itself.
      data: files that the test reads.
      **kwargs: further attributes of py_test.
    """
    native.py_test(
        name = name,
        srcs = [src, "//tools/build:pytest_main.py"],
        args = ["$(location %s)" % src],
        data = data + ["//:pyproject.toml"],
        deps = deps + ["@pypi_pytest"],
        legacy_create_init = False,
        main = "//tools/build:pytest_main.py",
        python_version = "PY3",
        srcs_version = "PY3",
        **kwargs
    )

def pytest_tests(srcs, deps = [], data = [], size = "small", tags = [], options = {}):
    """One target per test file, named like the file: python/deepep/config_test.

    Args:
      srcs: the files, usually a glob.
      deps: Python libraries that all of them need.
      data: files that all of them read.
      size: Bazel's size of those that options does not mention.
      tags: Bazel's tags of all of them.
      options: {FILE: {attribute: value}} for files that need something else; deps, data and tags
        given there are added to those of all.
    """
    for file in options:
        if file not in srcs:
            fail("options name %s, but there is no such test; correct or remove the entry" % file)
    for src in srcs:
        own = dict(options.get(src, {}))
        pytest_test(
            name = src[:-len(".py")],
            src = src,
            data = data + own.pop("data", []),
            size = own.pop("size", size),
            tags = tags + own.pop("tags", []),
            deps = deps + own.pop("deps", []),
            **own
        )
