"""What docs/store.md shows works as it stands."""

import pathlib
import re

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs/store.md"


def test_the_page_about_the_store_shows_what_does_not_work(tmp_path, monkeypatch, capsys):
    """Its blocks run in order, as one program."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "guide"}
    for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        exec(compile(block, DOCUMENT.name, "exec"), names)
    printed = capsys.readouterr().out
    assert "100 anything docs/checkpoint-format.md lists ()" in printed
    assert "['weight', 'bias']" in printed
    assert "100 valid 40" in printed
    names["owner"].release()
