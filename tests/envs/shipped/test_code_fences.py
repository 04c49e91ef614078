"""Which program is in a text, by its fenced blocks."""

from __future__ import annotations

import pytest

from streamrl.envs.shipped.code_fences import Block, fenced_blocks, program_in

F = "def f(x):\n    return x + 1\n"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("c = 3", "c = 3"),
        ("```python\n  def f(x):\n    return x + 1\n  ```", "def f(x):\n  return x + 1\n"),
        (f"```python\n{F}```".replace("\n", "\r"), F),
        (f"```language-python\n{F}```", F),
        (f"```code\n{F}```", F),
        (f"```txt\n{F}```", F),
        (f"```tool_code\n{F}```", F),
        (f"```python-repl\n{F}```", F),
        (f"```src/main.py\n{F}```", F),
        (f"```text\n{F}```", F),
        (f"```python\n{F}```\n```text\nclass of f: int\ndef f\n```", F),
        (f"```python\n{F}```\nRun it:\n```bash\npython a.py\n```", F),
        (f"```python\n{F}```\nOutput:\n```\n3\n```", F),
        (f"```python3\n{F}```", F),
        (f"```Python title='a.py'\n{F}```", F),
        (f"``` {{.python .numberLines}}\n{F}```", F),
        (f"```python:a.py\n{F}```", F),
        (f"```[python]\n{F}```", F),
        (f"```python3.11\n{F}```", F),
        ("```python def f(x): return x + 1```", "def f(x): return x + 1"),
        (
            "```python\nN = 1\n```\n```python\ndef f(x): return x + N\n```",
            "N = 1\n\ndef f(x): return x + N\n",
        ),
        (f"```python\nx = int(input())\n```\n```python\n{F}```", F),
        (f"```\n{F}```", F),
        (f"~~~python\n{F}~~~", F),
        (f"````\n{F}````", F),
        (f"```python\n{F}", F),
        (f"```python\n{F}```".replace("\n", "\r\n"), F),
        (f"Code: ```python\n{F}```\nand ```x``` is code", F),
        (f"1. First:\n\n   ```python\n   {F.replace('    ', '       ')}   ```", F),
        (f"```python\n{F}```\nUsage:\n```python\nprint(f(3))\n```", F),
        (f"```python\ndef f(x) return\n```\nCorrected:\n```python\n{F}```", F),
        ("```python\nimport math\n```\n```python\nf = lambda x: math.pi\n```",
         "import math\n\nf = lambda x: math.pi\n"),
        ("```python\ndef g(x): return 1\n```\n```python\ndef f(x): return g(x)\n```",
         "def g(x): return 1\n\ndef f(x): return g(x)\n"),
        ("```python\na = 1\n```\n```\n2\n```", "a = 1\n"),
        ("```js\nclass A {}\n```", ""),
        (f"````markdown\nSo:\n```python\n{F}```\n````", F),
        ("```python\ndef f(x):\n    '''\n    ```\n    3\n    ```\n    '''\n    return 4\n```",
         "def f(x):\n    '''\n    ```\n    3\n    ```\n    '''\n    return 4\n"),
        ("```python\ndef f(x): return 4```", "def f(x): return 4\n"),
    ],
)  # fmt: skip
def test_the_program_of_a_text(text: str, program: str):
    assert program_in(text) == program


def test_a_closing_fence_has_the_same_sign_and_at_least_the_length():
    text = "~~~~text\n```\n~~~\nlast\n~~~~~\n``` x\n```"
    assert fenced_blocks(text) == [Block("text", "```\n~~~\nlast\n"), Block("x", "\n")]


@pytest.mark.parametrize("piece", ["~~~", "`", "```python\n", "> ", "x = ", "````md\n"])
def test_a_text_of_a_megabyte_is_read(piece: str):
    """A search that is not linear would take hours."""
    assert isinstance(program_in(piece * (1_000_000 // len(piece)) + "`"), str)


def test_a_form_feed_ends_no_line():
    assert program_in("```python\ns = '\x0c\u2028'\ndef f(): pass\n```") == (
        "s = '\x0c\u2028'\ndef f(): pass\n"
    )
