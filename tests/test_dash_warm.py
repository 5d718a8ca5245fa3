"""The newest run's first screen is made while the browser loads the page."""

import pytest
from ampscope_dashboards.callbacks import overview
from ampscope_dashboards.reader import RunStore
from ampscope_dashboards.warm import warm

from tests.helpers_log import make_layers, records, write_run

ASK = {"run": "run", "rank": 0, "theme": "light", "range": None, "narrow": False}


def test_the_first_screen_is_made_before_it_is_asked_for(tmp_path, monkeypatch):
    """The answer to the first viewer makes no curve of its own."""
    kinds = make_layers(3)
    write_run(tmp_path, kinds, records(300, kinds), name="run")
    store = RunStore(tmp_path)
    warm(store).join(20)

    def never(*_):
        raise AssertionError("made again")

    monkeypatch.setattr(overview.views, "overview", never)
    monkeypatch.setattr(overview.views, "tiles", never)
    chart, *_ = overview.answer(store, ASK, None)
    assert len(chart["data"]) > 5


@pytest.mark.parametrize("made", [(), ("ampscope-0-rank0.arrows",)])
def test_a_folder_that_cannot_be_read_ends_quietly(tmp_path, made):
    """Missing, or with a damaged run: the page says it, not a thread's traceback."""
    folder = tmp_path / "logs"
    if made:
        (folder / "run").mkdir(parents=True)
    for name in made:
        (folder / "run" / name).write_bytes(b"junk" * 100)
    thread = warm(RunStore(folder))
    thread.join(20)
    assert not thread.is_alive()
