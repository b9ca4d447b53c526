"""The documents: what they show runs, their site builds, its links exist and it loads nothing, the messages that they name exist."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import documents
import pytest
import quoted_page
import torch
from documents import Block
from places import DOCS, ROOT

from autopar.program.weights import write_file
from autopar.rules.table import TABLE
from examples.classifier import model as classifier

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", DOCS / "README.md"])
PAGES += sorted(path for room in ("guide", "concepts", "reference") for path in (DOCS / room).glob("*.md"))
BLOCKS = [block for page in PAGES for block in documents.blocks(page)]
NAMES = sorted({block.page for block in BLOCKS if block.runs})


# -- what a page takes for granted --


def _readme(folder: Path) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes))
    ids = torch.randint(0, 256, (8, 16))
    batch = {"input_ids": ids, "labels": ids}
    return {"model": model, "batch": batch, "loader": [batch] * 2}


def _precision(folder: Path) -> dict[str, Any]:
    import autopar

    return {"program": autopar.compile(classifier()[0].half(), 2, classifier()[1], precision="float16")}


def _weights(folder: Path) -> dict[str, Any]:
    (folder / "MODEL_FOLDER").mkdir()
    write_file(folder / "MODEL_FOLDER" / "model.safetensors", classifier()[0].state_dict())
    return {}


def _rows(folder: Path) -> dict[str, Any]:
    torch.save({"tokens": torch.randint(0, 1000, (64, 32)), "labels": torch.randint(0, 10, (64,))}, folder / "data.pt")
    return {}


def _program(folder: Path) -> dict[str, Any]:
    emit = Block("the program of other pages", 0, "console", "", "")
    status, text = documents._command(
        emit, "autopar emit examples/classifier.py:model --devices 2 -o demo/classifier", True
    )
    assert status == 0, text
    return {}


GIVEN: dict[str, Callable[[Path], dict[str, Any]]] = {
    "README.md": _readme,
    "docs/guide/checkpoints.md": _weights,
    "docs/reference/numerics.md": _precision,
    "docs/guide/data.md": _rows,
    "docs/guide/faults.md": _program,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a page's blocks run: a folder with the checkout's examples and documents in it. Rules that a page adds go with it."""
    rules = dict(TABLE)
    for name in ("examples", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    TABLE.clear()
    TABLE.update(rules)
    for name in ("my_ops", "my_data"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.fast and block.runs}))
def test_what_a_page_shows_runs(page: str, folder: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in BLOCKS:
        if block.page == page and block.fast:
            documents.run(block, namespace, own_process=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", NAMES)
def test_all_that_a_page_shows_runs(page: str, folder: Path) -> None:
    namespace = {"__name__": "__main__", **GIVEN.get(page, lambda _: {})(folder)}
    for block in BLOCKS:
        if block.page == page and block.runs:
            documents.run(block, namespace, own_process=True)


def test_marks_are_those_that_are_read() -> None:
    for block in BLOCKS:
        if block.mark and not block.mark.startswith(("end", "made: ")):
            assert re.fullmatch(r"fast|ends with 1|not run: .{10,}|file: \w+\.(py|sh)", block.mark), (
                f"{block.name}: {block.mark}"
            )
    assert sum(not block.runs for block in BLOCKS) <= len(BLOCKS) // 6


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("one step: 3.31 s", "one step: 3.31 s", True),
        ("one step: 3.31 s", "one step: 3.45 s", False),
        ("memory  72.1 GB", "memory 72.1 GB", True),
        ("data 8", "tensor 8", False),
        ("or: use 5 devices: ...", "or: use 5 devices: no pipeline", True),
        ("or: use 5 devices: ...", "or: use 6 devices: no pipeline", False),
        ("planned in  4.81 s, 519 MB of memory", "planned in  9.00 s, 700 MB of memory", True),
    ],
)
def test_output_is_compared(shown: str, printed: str, same: bool) -> None:
    assert documents.alike(shown, printed) == same


# -- the site --


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from a copy of the documents; a link to a page or a heading that doesn't exist ends the build."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build" / "docs"


def test_the_site_has_every_page_in_its_navigation(site: Path) -> None:
    """Each page has the whole navigation; this one links to few others by itself."""
    page = site / "evidence" / "volumes.html"
    targets = re.findall(r'href="([^"#:]+)', page.read_text())
    linked = {str((page.parent / target).resolve().relative_to(site)) for target in targets}
    for path in DOCS.rglob("*.md"):
        name = str(path.relative_to(DOCS))
        html = name.replace("README.md", "index.html") if path.name == "README.md" else name.replace(".md", ".html")
        assert html in linked, name


def test_the_site_links_to_files_that_exist(site: Path) -> None:
    """Pictures and entries of the navigation, too, which the build doesn't check."""
    for page in site.rglob("*.html"):
        for target in re.findall(r'(?:href|src)="([^"#?:]+)["#?]', page.read_text()):
            if page.name != "404.html":  # whose links are the server's
                path = page.parent / target
                assert (path / "index.html" if path.is_dir() else path).is_file(), f"{page.relative_to(site)}: {target}"


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) >= len(list(DOCS.rglob("*.md")))
    loaded = re.compile(r"""(?:<(?:script|img|iframe)[^>]*\ssrc|<link[^>]*\shref|url\()=?["'(]?(?:https?:)?//""")
    for path in [*pages, *site.rglob("*.css")]:
        assert not loaded.search(path.read_text()), path


def test_every_page_is_linked_from_the_index() -> None:
    text = (DOCS / "README.md").read_text()
    missing = [str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md") if f"({p.relative_to(DOCS)})" not in text]
    assert missing == ["README.md"], missing


# -- figures --


@pytest.mark.parametrize("page", quoted_page.PAGES, ids=lambda path: path.name)
def test_a_page_quotes_what_the_evidence_says(page: Path) -> None:
    text = page.read_text()
    assert "<!-- quoted " in text and text == quoted_page.written(page), "make report NAME=quoted"


# -- messages --


OF_TORCH = {"BackendCompilerFailed": "torch._dynamo.exc", "InductorError": "torch._inductor.exc"}


def _messages() -> str:
    """The texts of all sources, without what is put into them: ``{...}`` is a gap, and neighbouring strings are one."""
    text = "\n".join(path.read_text() for room in ("autopar", "passes") for path in sorted((ROOT / room).rglob("*.py")))
    return re.sub(r'"\s*\n?\s*f?"', "", text)


def test_the_messages_of_the_troubleshooting_page_exist() -> None:
    """Words in capitals, numbers and dots of a message stand for anything, in a gap of the source's text."""
    sources, page = _messages(), (DOCS / "guide" / "troubleshooting.md").read_text()
    named = [
        cell
        for row in re.findall(r"^\| (`[^|]+`)(?: \(a note\))? \|", page, re.MULTILINE)
        for cell in re.findall(r"`([^`]+)`", row)
    ]
    assert len(named) > 20
    unknown = []
    for message in named:
        if message in OF_TORCH:
            assert hasattr(importlib.import_module(OF_TORCH[message]), message)
            continue
        parts = re.split(r"\s*(?:\.\.\.|\b[A-Z]{1,5}(?::[A-Z]+)?\b)\s*", message)
        pattern = r"[^\n]{0,90}?".join(re.escape(part) for part in parts if part)
        if not re.search(pattern, sources):
            unknown.append(message)
    assert not unknown
