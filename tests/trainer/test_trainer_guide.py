"""The guide's examples run as they stand."""

import re
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).parents[2] / "docs" / "trainer.md"


def test_the_guide_shows_what_does_not_work(capsys: Any) -> None:
    """Every block of docs/trainer.md runs, in order, and the resume in it is bitwise."""
    names: dict[str, Any] = {"__name__": "guide"}
    for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        exec(block, names)
    assert capsys.readouterr().out.startswith("bitwise \n")
    assert names["trainer"].step == 120
