"""What the documents show works as it stands."""

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def run(document: str, monkeypatch: Any, folder: Path) -> dict[str, Any]:
    """Run every block of a document, in order, as one program."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "guide"}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / document).read_text(), re.DOTALL):
        exec(compile(block, document, "exec"), names)
    return names


def test_the_guide_shows_what_does_not_work(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """The resume in docs/trainer.md is bitwise."""
    names = run("trainer.md", monkeypatch, tmp_path)
    assert "bitwise \n" in capsys.readouterr().out
    assert names["trainer"].step == 120


def test_a_hooks_example_does_not_work(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """All hooks of docs/hooks.md run in one training, and every hook that there is has a section."""
    names = run("hooks.md", monkeypatch, tmp_path)
    assert names["trainer"].step == 100
    printed = capsys.readouterr().out
    assert "trained 100" in printed
    assert "iter: 99" in printed
    assert names["store"].load().step == 100
    from trainerd.trainer import hooks

    sections = re.findall(r"^## (.*)$", (DOCS / "hooks.md").read_text(), re.MULTILINE)
    documented = {name for title in sections for name in re.findall(r"[A-Z]\w+", title)}
    assert documented == set(hooks.__all__) - {"HookBase"}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
def test_a_newcomers_snippet_does_not_work(monkeypatch: Any, tmp_path: Path) -> None:
    """The trainings in docs/coming-from.md reach their ends."""
    names = run("coming-from.md", monkeypatch, tmp_path)
    assert names["trainer"].step == 8
    assert names["players"].step == 5
