"""A user's own table of variants, as the repository @own_variants; without one, an empty table.

DEEPEP_VARIANTS=/path/to/table.bzl names it. The table may lie anywhere and is written by hand, or by
`./bazelw run //tools:gen_variants -- --table FILE`.
"""

_TABLE = "DEEPEP_VARIANTS"

def _own_variants_impl(rctx):
    path = rctx.os.environ.get(_TABLE, "")
    rctx.file("WORKSPACE", "")
    rctx.file("BUILD", "")
    if not path:
        rctx.file("variants.bzl", "VARIANTS = []\n")
        return
    if not path.startswith("/"):
        fail("%s is %s, but must be an absolute path, since Bazel runs elsewhere; write %s=$PWD/%s" %
             (_TABLE, path, _TABLE, path))
    if not rctx.path(path).exists:
        fail("%s is %s, but there is no such file; correct it, or make the table with " % (_TABLE, path) +
             "./bazelw run //tools:gen_variants -- --table " + path)

    # A link, not a copy: Bazel then sees when the table changes.
    rctx.symlink(path, "variants.bzl")

own_variants = repository_rule(
    implementation = _own_variants_impl,
    environ = [_TABLE],
)
