#!/usr/bin/env python3
"""What ./dev lint finds: retired words, subjects of commits, programs in documents that no test runs. usage: lint_test.py SOURCE_DIRECTORY"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

DOCS = pathlib.Path(sys.argv[1]) / "docs"


def run(script, directory):
    done = subprocess.run([sys.executable, DOCS / script, directory], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def vocabulary(root):
    write(root, "include/nibble/nibble.h", "/* was nib_execute\n */\nint nib_plan_run(void);  // EpilogueArgs\nint act_limit;\n")
    write(root, "cli/commands/options.cpp", 'add("--act-scheme", "--a-dtype"); json["a_dtype"] = act; {"act_scheme", 1}')
    write(root, "python/nibble/__init__.py", 'def run(a_dtype, *, act_scheme=""):\n    act = 1\n    return act\n')
    write(root, "python/src/module.cpp", 'm.def("pack", &pack, "a_dtype"_a);')
    write(root, "src/kernels/row.cuh", "// The producer loads activations.\nbool warm_up = true;\n")
    write(root, "docs/kernels/page.md", "Weights are loaded first.\n")
    write(root, "CHANGELOG.md", "Nobody brings this.\n")
    assert run("vocabulary.py", root) == (0, []), run("vocabulary.py", root)
    for path, text, line in [
        ("include/nibble/nibble.h", "/* ...\n */\nint nib_execute(void);\n", 3),
        ("include/nibble/plan.hpp", "struct LinearSpec {\n  DType act = DType::f32;\n};\n", 2),
        ("include/nibble/conv.hpp", "std::optional<Extent> kernel;\n", 1),
        ("include/nibble/nibble.hpp", '\n#include "nibble/activations.hpp"\n', 2),
        ("cli/commands/bench.cpp", 'add("--act", "");', 1),
        ("cli/commands/verify.cpp", '\n\njson["act"] = 1;', 3),
        ("cli/report/report.cpp", 'OrderedJson{{"kernel_height", 1}}', 1),
        ("python/nibble/torch.py", "def run(\n    *, act='f32'\n): ...\n", 2),
        ("python/src/calls.cpp", '"activations"_a', 1),
        ("src/kernels/row.cuh", "// loads\n// TMA brings patches of images\n", 2),
        ("src/kernels/row.cuh", "bool rehearsal = true;\n", 1),
        ("docs/kernels/page.md", "101 µs (measured once)\n", 1),
        ("README.md", "\nNobody waits.\n", 2),
    ]:
        before = (root / path).read_text() if (root / path).exists() else None
        write(root, path, text)
        code, lines = run("vocabulary.py", root)
        assert code == 1 and len(lines) == 1 and lines[0].startswith(f"{path}:{line}: "), (path, lines)
        (root / path).unlink() if before is None else write(root, path, before)


def subjects(root):
    def git(*arguments):
        subprocess.run(["git", "-C", root, "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", *arguments], check=True, capture_output=True)

    assert run("subjects.py", root / "nothing") == (0, [])
    if not shutil.which("git"):
        return
    git("init", "-b", "main")
    assert run("subjects.py", root) == (0, [])
    git("commit", "--allow-empty", "-m", "No area here")
    code, lines = run("subjects.py", root)
    assert code == 1 and len(lines) == 1 and lines[0].endswith("No area here"), lines
    git("checkout", "-b", "work", "--track", "main")
    for subject in ["kernel.hpp, nibble.h: laid out anew", "a: " + "x" * 69]:
        git("commit", "--allow-empty", "-m", subject, "-m", "A body with no area.")
    assert run("subjects.py", root) == (0, []), run("subjects.py", root)  # main has its own
    git("commit", "--allow-empty", "-m", "a: " + "x" * 70)
    git("commit", "--allow-empty", "-m", "b: the last is well")
    code, lines = run("subjects.py", root)
    assert code == 1 and len(lines) == 1 and "73 characters" in lines[0], lines


def programs(root):
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(DOCS))
    import render

    quoted = "<!-- render: source examples/checkpoint.cpp#layers -->\n```cpp\nold\n```\n<!-- end -->\n```\nplain text\n```\n"
    write(root, "page.md", quoted)
    assert "weights.push_back" in render.render(root / "page.md")[1]
    write(root, "page.md", quoted + "```python\nimport nibble\n```\n")
    try:
        render.render(root / "page.md")
    except SystemExit as refused:
        assert "the program 'import nibble' is in no file that tests run" in str(refused), refused
    else:
        raise AssertionError("a program that was typed into a page")


with tempfile.TemporaryDirectory() as name:
    vocabulary(pathlib.Path(name) / "tree")
    subjects_root = pathlib.Path(name) / "commits"
    subjects_root.mkdir()
    subjects(subjects_root)
    programs(pathlib.Path(name) / "pages")
