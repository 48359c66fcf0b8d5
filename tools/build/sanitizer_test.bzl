"""sanitizer_test(): a C++ program over one host variant, all of it compiled with a sanitizer.

A sanitizer sees only code that it compiled, so the variant's rendered sources and the runtime are
compiled anew here, not linked from //kernels. Ranks must be threads of the program: ThreadSanitizer
sees no race between processes.
"""

load("//tools/build:deepep_kernel.bzl", "rendered_files")

_OPTIONS = {
    "address": [
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ],
    "none": [],
    "thread": ["-fsanitize=thread"],
}

def sanitizer_test(name, srcs, variant, sanitizer, args = [], defines = [], expect = "", size = "medium", **kwargs):
    """Builds and runs the program; any report of the sanitizer fails the test.

    Args:
      name: the target's name.
      srcs: the program's own sources.
      variant: the host variant whose rendered sources are linked in; they export deepep_*.
      sanitizer: "thread", "address" (with undefined behaviour), or "none" for a program that looks
        itself, where many runs count.
      args: the program's arguments.
      defines: macros for all sources, the rendered ones and the runtime included: a planted fault.
      expect: when set, the program must fail and print a match of this extended regular expression:
        a test of the test.
      size: Bazel's size of the test.
      **kwargs: further attributes of the test.
    """
    options = _OPTIONS[sanitizer]
    native.cc_binary(
        name = name + "_program",
        testonly = True,
        srcs = srcs + ["//kernels:" + source for source in rendered_files(variant)] + [
            "//kernels/runtime:sources",
        ],
        copts = options + [
            "-std=c++17",
            "-O1",
            "-UNDEBUG",
            "-g",
            "-fno-omit-frame-pointer",
            "-Wall",
            "-Wextra",
            "-Werror",
        ],
        linkopts = options + [
            "-ldl",
            "-lpthread",
            "-lrt",
        ],
        linkstatic = True,
        local_defines = defines,
        deps = ["//kernels/host"],
    )
    native.sh_test(
        name = name,
        size = size,
        srcs = ["//tools/build:sanitizer_test.sh"],
        args = ["$(location :%s_program)" % name, "'%s'" % expect] + args,
        data = [":%s_program" % name],
        **kwargs
    )
