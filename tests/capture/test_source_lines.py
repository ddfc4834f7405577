"""Source lines are the user's, wherever the project lies."""

from __future__ import annotations

from pathlib import Path

import torch

from autopar.capture.flat import source_of


def _trace(*frames: tuple[str, int]) -> str:
    return "\n".join(f'  File "{file}", line {line}, in forward' for file, line in frames)


def test_the_innermost_line_outside_of_torch_is_named():
    linear = f"{Path(torch.__file__).parent}/nn/modules/linear.py"
    assert source_of(_trace(("/home/me/model.py", 7), (linear, 134))) == "model.py:7, in forward"


def test_a_folder_that_is_called_like_a_library_is_the_users():
    for folder in ("/home/me/autopar/.venv/lib/python3.11/site-packages/zoo", "/src/torch/mine"):
        assert source_of(_trace((f"{folder}/model.py", 7))) == "model.py:7, in forward"
