"""The dashboard answers on this machine alone and shows what comes into the store while it runs."""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request

import pytest

from fp4dse.dse import ConfigError, Recipe, Space
from fp4dse.results import open_store
from fp4dse.results.store.spaces import store_name
from fp4dse.sweeps.dashboard import serve as dashboard
from fp4dse.sweeps.dashboard.serve import Follower, default_storage, serve
from fp4dse.sweeps.dashboard.storages import open_storage
from fp4dse.sweeps.running.state import SweepState, write_state
from tests.sweeps.made import row

RECIPES = list(Space(axes={"*.scale": ["e4m3", "ue5m3", "e5m2"]}).recipes())


@pytest.fixture
def store(tmp_path):
    made = open_store(tmp_path / "zoo" / "store", create=True)
    made.add([row(Recipe.named("bf16")), row(RECIPES[0], loss=1.5)], "rows")
    return made


def get(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def trials(address: str) -> list[dict]:
    while True:
        try:
            (study,) = get(f"{address}/api/studies")["study_summaries"]
            return get(f"{address}/api/studies/{study['study_id']}?after=0")["trials"]
        except (ValueError, urllib.error.HTTPError):  # the study is just being made anew
            time.sleep(0.1)


@pytest.fixture
def served(store, monkeypatch):
    """The address of a dashboard that looks for new rows all the time."""
    monkeypatch.setattr(dashboard, "FOLLOW_S", 0.05)
    monkeypatch.setattr(dashboard, "SHARE", 1.0)
    stop, ready, found = threading.Event(), threading.Event(), []
    storage = open_storage(default_storage(store.path))
    told = lambda address: (found.append(address), ready.set())  # noqa: E731
    server = threading.Thread(target=serve, args=(store, store_name(store), storage, 0, True, told, stop))
    server.start()
    assert ready.wait(60)
    yield found[0]
    stop.set()
    server.join(60)
    assert not server.is_alive()


def test_the_page_and_the_studies_are_served_on_loopback_and_follow_the_store(served, store):
    assert served.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(f"{served}/dashboard", timeout=30) as page:
        assert page.status == 200
        assert b"<html" in page.read().lower()
    assert get(f"{served}/api/studies")["study_summaries"][0]["study_name"] == "zoo vision:small"
    assert [trial["state"] for trial in trials(served)] == ["Complete"]
    store.add([row(RECIPES[1], loss=1.2)], "more")
    deadline = time.monotonic() + 60
    while len(trials(served)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(trials(served)) == 2


def test_a_page_follows_its_study_when_it_is_made_anew(served, store):
    (study,) = get(f"{served}/api/studies")["study_summaries"]
    page = f"{served}/api/studies/{study['study_id']}"
    assert len(get(f"{page}?after=0")["trials"]) == 1
    store.add([row(RECIPES[1], loss=1.2), row(RECIPES[2], loss=None)], "more")  # the first values of an axis
    deadline = time.monotonic() + 60
    while len(get(f"{page}?after=0")["trials"]) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (now,) = get(f"{served}/api/studies")["study_summaries"]
    assert now["study_id"] != study["study_id"]
    found = get(f"{page}?after=0")
    assert {trial["state"] for trial in found["trials"]} == {"Complete", "Fail"}
    assert [param["name"] for param in found["union_search_space"]] == ["*.scale"]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{served}/api/studies/99?after=0")


def answer(address: str, method: str = "GET", path: str = "/api/studies", **headers: str | None) -> int:
    """The status of a request with headers of our choice; None: without that header."""
    host, _, port = address.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    sent = {"Host": f"{host}:{port}", **{name.title(): value for name, value in headers.items()}}
    connection.putrequest(method, path, skip_host=True)
    for name, value in {**sent, "Content-Length": "0"}.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    return status


METHODS = ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"]
FOREIGN = [
    {"host": "evil.example:{port}"},
    {"host": "evil.example"},
    {"host": "127.0.0.1"},
    {"host": "127.0.0.1:1"},
    {"host": "127.0.0.1:{port}.evil.example"},
    {"host": "evil.example@127.0.0.1:{port}"},
    {"host": ""},
    {"host": None},
    {"origin": "http://evil.example"},
    {"origin": "http://evil.example:{port}"},
    {"origin": "https://127.0.0.1:{port}"},
    {"origin": "http://127.0.0.1:1"},
    {"origin": "http://127.0.0.1:{port}/"},
    {"origin": "null"},
    {"origin": ""},
]


def test_a_foreign_host_or_origin_is_refused_whatever_it_asks_and_deletes_nothing(served):
    port = served.rpartition(":")[2]
    (study,) = get(f"{served}/api/studies")["study_summaries"]
    for headers in FOREIGN:
        sent = {name: value and value.format(port=port) for name, value in headers.items()}
        for method in METHODS:
            for path in ("/api/studies", f"/api/studies/{study['study_id']}", "/dashboard", "/report"):
                assert answer(served, method, path, **sent) == 403, (method, path, sent)
    assert get(f"{served}/api/studies")["study_summaries"] == [study]


def test_our_own_page_is_served_by_both_names_and_may_delete(served):
    port = served.rpartition(":")[2]
    (study,) = get(f"{served}/api/studies")["study_summaries"]
    for name in ("127.0.0.1", "localhost"):
        assert answer(served, host=f"{name}:{port}") == 200
        assert answer(served, host=f"{name}:{port}", origin=f"http://{name}:{port}") == 200
    assert answer(served, "DELETE", f"/api/studies/{study['study_id']}", origin=served) in (200, 204)
    assert get(f"{served}/api/studies")["study_summaries"] == []


def test_the_report_that_notes_link_to_is_served_once_it_is_there(served, store):
    assert answer(served, path="/report") == 404
    (store.path.parent / "report.html").write_text("<p>found</p>")
    with urllib.request.urlopen(f"{served}/report", timeout=30) as page:
        assert page.read() == b"<p>found</p>"
        assert page.headers["Content-Type"] == "text/html; charset=utf-8"


def test_a_port_that_is_taken_or_none_is_named(served, store):
    for port in (int(served.rpartition(":")[2]), 99_999):
        with pytest.raises(ConfigError, match=f"--port: found {port}"):
            serve(store, "zoo", open_storage(default_storage(store.path)), port, follow=False)


def test_a_store_that_did_not_change_is_not_mirrored_again(store):
    follower = Follower(store, "zoo", open_storage(default_storage(store.path)))
    assert follower.update() == {"zoo vision:small": 1}
    assert follower.update() == {}
    store.add([row(RECIPES[1])], "more")
    assert follower.update() == {"zoo vision:small": 2}


def test_a_recipe_of_a_running_sweep_is_shown_when_all_its_lanes_are_there(store):
    store.add([row(Recipe.named("bf16"), seed=1)], "baseline")
    follower = Follower(store, "zoo", open_storage(default_storage(store.path)))
    write_state(store.path, SweepState(name="zoo", asked=4, stored=0))
    assert follower.update() == {"zoo vision:small": 0}
    write_state(store.path, SweepState(name="zoo", asked=4, stored=0, ended="finished"))
    assert follower.update() == {"zoo vision:small": 1}
