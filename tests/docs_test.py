"""The documents are true where a machine can tell: examples run, links lead somewhere.

Every ```python block of README.md and docs/ runs on the CPU. A comment on the line before a block
changes that: `<!-- ranks: 4 -->` runs it on 4 ranks under torchrun, `<!-- not run: reason -->` not
at all.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

# The tree itself, not Bazel's links to a part of it.
ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SKIPPED = re.compile(r"(bazel-.*|\..+|node_modules)")
TIMEOUT = 240  # seconds for one example

BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```python\n(.*?)^```$", re.M | re.S)
CODE = re.compile(r"^```.*?^```$|^    [^\n]*$|`[^`\n]*`", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SYMPTOM = re.compile(r"^\| `([^`]+)` \|", re.M)
HEADING = re.compile(r"^#+ (.*)$", re.M)


class Example(NamedTuple):
    page: str
    line: int
    code: str
    ranks: int  # 0: started without torchrun

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def examples(page: str, text: str) -> Iterator[Example]:
    """The blocks of a page that run."""
    for found in BLOCK.finditer(text):
        mark, code = found[1] or "", found[2]
        line = text.count("\n", 0, found.start(2))
        if re.fullmatch(r"not run: \S.*", mark):
            continue
        ranks = re.fullmatch(r"ranks: (\d+)", mark)
        yield Example(page, line, code, int(ranks[1]) if ranks else 0)


def documents() -> Iterator[Path]:
    """All .md files of the tree, without what tools and builds put there."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = sorted(name for name in folders if not SKIPPED.fullmatch(name))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".md"))


def anchors(text: str) -> set[str]:
    """The names by which a page's headings can be linked to."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {heading.strip().replace(" ", "-") for heading in plain}


def broken_links(page: Path, text: str) -> Iterator[str]:
    """Relative links that lead to no file, or to no heading of a page."""
    for link in LINK.findall(CODE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists():
            yield f"{page.name}: {link} leads to no file"
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            yield f"{page.name}: {link} leads to no heading"


EXAMPLES = [
    example
    for page in PAGES
    if page.exists()
    for example in examples(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_example_runs(example: Example, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(example.code, encoding="utf-8")
    command = [sys.executable]
    if example.ranks:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={example.ranks}"]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry),
        "GLOO_SOCKET_IFNAME": "lo",  # all ranks are here; the machine's name need not resolve
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*command, str(script)],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, f"{example} exited {done.returncode}:\n{done.stdout}"


def test_the_readme_has_an_example_of_one_rank_and_of_many() -> None:
    ranks = [example.ranks for example in EXAMPLES if example.page == "README.md"]
    assert 0 in ranks and any(number > 1 for number in ranks)


def test_relative_links_lead_somewhere() -> None:
    pages = [*documents()]
    assert set(PAGES) <= set(pages), f"{ROOT} is not the whole tree"
    assert [line for page in pages for line in broken_links(page, page.read_text("utf-8"))] == []


def test_the_readme_links_every_page() -> None:
    linked = LINK.findall(PAGES[0].read_text(encoding="utf-8"))
    missing = [page.name for page in PAGES[1:] if f"docs/{page.name}" not in linked]
    assert missing == [], "add them to the table of documents in README.md"


def messages(source: str) -> str:
    """All texts of a Python file, as they read when put together; values are left out."""
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
            texts.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return "\n".join(texts)


def unknown_symptoms(page: str, said: str) -> list[str]:
    """Messages in the first column of the page's tables that nothing says."""
    return [words for words in SYMPTOM.findall(page) if words not in said]


def test_messages_under_troubleshooting_are_ones_that_come() -> None:
    package = (ROOT / "python/deepep").rglob("*.py")
    said = "\n".join(messages(path.read_text(encoding="utf-8")) for path in package)
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    assert len(SYMPTOM.findall(page)) > 5
    assert unknown_symptoms(page, said) == []


# ---- That the test itself sees what is wrong


def test_unknown_messages_are_seen() -> None:
    said = messages('raise ValueError(f"row {row} is "\n"too long")\nother = "or not"')
    page = "| `is too long` | a |\n| `or not` | b |\n| `too short` | c |\n"
    assert unknown_symptoms(page, said) == ["too short"]


def test_broken_links_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# Two words\n")
    text = (
        "[a](other.md) [b](other.md#two-words) [c](#here) [d](https://example.org/x) `[e](no.md)`\n"
        "# Here\n    [f](no.md)\n[g](none.md) [h](other.md#three)\n"
    )
    page.write_text(text)
    assert [*broken_links(page, text)] == [
        "page.md: none.md leads to no file",
        "page.md: other.md#three leads to no heading",
    ]


def test_marks_are_obeyed() -> None:
    text = (
        "```python\n1\n```\n\n<!-- ranks: 4 -->\n```python\n2\n```\n"
        "<!-- not run: needs a GPU -->\n```python\n3\n```\n<!-- not run -->\n```python\n4\n```\n"
        "    ```python\n"
    )
    found = [(example.line, example.code, example.ranks) for example in examples("x.md", text)]
    assert found == [(1, "1\n", 0), (6, "2\n", 4), (14, "4\n", 0)]
