"""State of ranks' widgets, as known without asking the ranks."""

from __future__ import annotations

from typing import Any

from hvdlab.kernel_ext.notebook.comm_relay import WIDGET, WidgetStates

MODEL = {
    "_model_name": "ImageModel",
    "_model_module": "@jupyter-widgets/controls",
    "_model_module_version": "2.0.0",
}


def states(monkeypatch: Any) -> WidgetStates:
    found = WidgetStates()
    monkeypatch.setattr(found, "_serve", lambda: None)
    return found


def test_the_last_state_counts_whoever_has_told_it(monkeypatch: Any) -> None:
    known = states(monkeypatch)
    known.opened("a", WIDGET, {"state": {**MODEL, "value": 1, "text": "x"}}, ())
    known.opened("other", "hvdlab.panel", {"state": {}}, ())
    known.message_passed("a", {"method": "update", "state": {"value": 2}}, ())
    known.message_passed("a", {"method": "echo_update", "state": {"value": 3}}, ())
    known.message_passed("a", {"method": "custom", "content": {"state": {"value": 4}}}, ())
    found, paths, buffers = known.add_to({"own": {}}, [], [])
    assert set(found) == {"own", "a"}
    assert found["a"]["model_name"] == "ImageModel"
    assert found["a"]["state"] == {**MODEL, "value": 3, "text": "x"}
    assert (paths, buffers) == ([], [])


def test_buffers_are_kept_where_they_belong_and_go_with_their_value(monkeypatch: Any) -> None:
    known = states(monkeypatch)
    opened = {"state": {**MODEL, "parts": [None, 2]}, "buffer_paths": [["value"], ["parts", 0]]}
    known.opened("a", WIDGET, opened, (b"old", b"part"))
    known.message_passed("a", {"method": "update", "state": {}, "buffer_paths": [["value"]]}, (b"new",))
    own: dict[str, Any] = {"own": {}}
    own_paths: list[list[str | int]] = [["own", "state", "v"]]
    own_buffers = [b"own"]
    _, paths, buffers = known.add_to(own, own_paths, own_buffers)
    assert dict(zip(map(tuple, paths), buffers, strict=True)) == {
        ("own", "state", "v"): b"own",
        ("a", "state", "value"): b"new",
        ("a", "state", "parts", 0): b"part",
    }
    assert (own, own_paths, own_buffers) == ({"own": {}}, [["own", "state", "v"]], [b"own"])
    known.message_passed("a", {"method": "update", "state": {"parts": []}}, ())
    assert known.add_to({}, [], [])[1:] == ([["a", "state", "value"]], [b"new"])


def test_nothing_stays_of_what_is_closed(monkeypatch: Any) -> None:
    known = states(monkeypatch)
    for one in "ab":
        known.opened(one, WIDGET, {"state": MODEL}, ())
    known.closed("a")
    known.message_passed("a", {"method": "update", "state": {"value": 1}}, ())
    assert set(known.add_to({}, [], [])[0]) == {"b"}
    known.clear()
    assert known.add_to({}, [], []) == ({}, [], [])
