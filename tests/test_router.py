"""Several models behind one address: which are loaded, who waits for whom, and what clients are told. The models' own
servers are `model_server.py`; `test_serve_models` has real ones."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import ollama
import psutil
import pytest

from patience import PATIENCE_S, until
from serving import KEY, connected, running
from tiermoe.serve import loaded_models, router
from tiermoe.serve.guards import Hosts
from tiermoe.serve.loaded_models import LoadedModels, Model, ModelProcess

SERVER = Path(__file__).parent / "model_server.py"


@pytest.fixture(autouse=True)
def _looks_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_models, "_LOOK_S", 0.01)


class Front:
    """A router over models: their numbers are `enough` and `most`."""

    def __init__(self, address: str, loaded: LoadedModels, said: list[str], threads: ThreadPoolExecutor) -> None:
        self.http = httpx.Client(base_url=address, timeout=PATIENCE_S)
        self.loaded, self.said, self._threads = loaded, said, threads

    def ask(self, model: str, **more: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": model, **more})

    def later(self, model: str, **more: Any) -> Future[httpx.Response]:
        """A request whose answer is not waited for; it has come when this returns."""
        before = self.arrived()
        future = self._threads.submit(self.ask, model, **more)
        until(lambda: self.arrived() > before or future.done())
        return future

    def arrived(self) -> int:
        stats = self.stats()
        return int(stats["waiting"]) + sum(int(each["running"]) for each in stats["models"])

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/stats").json()
        return found

    def of(self, model: str) -> dict[str, Any]:
        return next(each for each in self.stats()["models"] if each["name"] == model)

    def status(self) -> str:
        """First letters of what the models are."""
        return "".join(each["status"]["value"][0] for each in self.http.get("/v1/models").json()["data"])


@contextmanager
def front(
    models: dict[str, tuple[int, int]],
    nbytes: int = 100,
    most_loaded: int | None = None,
    keep_alive_s: float | None = None,
    waiting: int = 8,
    words: dict[str, tuple[str, ...]] | None = None,
    problem: str = "",
    **access: Any,
) -> Iterator[Front]:
    """words: of a model's server behind its name and bytes. problem: of a model `never`."""
    numbers, said = count(), list[str]()
    with tempfile.TemporaryDirectory() as sockets, ThreadPoolExecutor(8) as threads:

        def starter(name: str) -> Callable[[int], ModelProcess]:
            def process_of(budget: int) -> ModelProcess:
                path = Path(sockets) / f"{next(numbers)}.sock"
                more = (words or {}).get(name, ())
                command = [sys.executable, str(SERVER), str(path), name, str(budget), *more]
                return ModelProcess(command, path, budget, said.append)

            return process_of

        served = [Model(name, *sizes, 64, starter(name), [f"{name}-alias"]) for name, sizes in models.items()]
        if problem:
            served.append(Model("never", 0, 0, 0, starter("never"), problem=problem))
        loaded = LoadedModels(served, nbytes, most_loaded, keep_alive_s, waiting, said.append)
        with running(router.create_router(loaded, 64, **access)) as address:
            try:
                yield Front(address, loaded, said, threads)
            finally:
                loaded.close()
    assert not servers()


def servers() -> list[psutil.Process]:
    """Processes of models that run."""
    found = []
    for each in psutil.Process().children():
        try:
            if str(SERVER) in each.cmdline() and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
        except psutil.Error:  # it has just ended
            continue
    return found


def test_models_are_loaded_by_name_and_share_the_budget() -> None:
    with front({"a": (40, 60), "b": (40, 90), "c": (40, 50)}) as here:
        assert here.status() == "uuu"
        assert here.ask("a").json()["by"] == "a"
        assert here.ask("b").json()["by"] == "b"
        assert (here.of("a")["memory_budget_bytes"], here.of("b")["memory_budget_bytes"]) == (60, 40)
        assert here.ask("a").json()["by"] == "a"
        assert here.ask("c").json()["by"] == "c"  # b was not used for longer
        assert here.status() == "lul"
        assert here.of("c")["memory_budget_bytes"] == 40
        assert here.stats()["last_change"]["unloaded"] == ["b"]
        assert here.of("a")["loads"] == 1
        assert len(servers()) == 2
        metrics = here.http.get("/metrics").text
        assert 'tiermoe:model_loaded{model="a"} 1.0' in metrics
        assert 'tiermoe:model_loaded{model="b"} 0.0' in metrics
        assert here.http.get("/health").json()["models"] == {"a": "loaded", "b": "unloaded", "c": "loaded"}


def test_as_many_are_loaded_at_once_as_are_allowed_and_each_has_its_part() -> None:
    with front({"a": (10, 90), "b": (10, 90), "c": (10, 90)}, most_loaded=2) as here:
        for model in "abc":
            here.ask(model)
        assert here.status() == "ull"
        assert [each["memory_budget_bytes"] for each in here.stats()["models"]] == [0, 50, 50]


def test_a_model_waits_for_running_answers_and_later_requests_wait_behind_it(tmp_path: Path) -> None:
    with front({"a": (60, 60), "b": (60, 60)}) as here:
        first = here.later("a", hold=str(tmp_path / "first"))
        until(lambda: here.of("a")["running"])
        other = here.later("b", hold=str(tmp_path / "other"))
        until(lambda: "waiting for the running answers of a (1)" in (here.stats()["doing"] or ""))
        second = here.later("a")
        assert not other.done()
        assert not second.done()  # though a is loaded
        (tmp_path / "first").touch()
        assert first.result().json()["by"] == "a"
        until(lambda: here.of("b")["running"])
        assert not second.done()
        (tmp_path / "other").touch()
        assert (other.result().json()["by"], second.result().json()["by"]) == ("b", "a")
        assert (here.of("a")["loads"], here.of("b")["loads"]) == (2, 1)


def test_ollamas_clients_find_all_models_and_name_them_with_a_tag() -> None:
    with front({"a": (40, 40), "b": (40, 40)}) as here:
        assert [each["model"] for each in here.http.get("/api/tags").json()["models"]] == ["a", "b"]
        assert here.http.get("/api/ps").json() == {"models": []}
        for body in ({"model": "b:latest"}, {"name": "b"}):
            answer = here.http.post("/api/show", json=body).json()
            assert (answer["by"], answer["asked"]["model"], answer["where"].rstrip("?")) == ("b", "b", "/api/show")
        assert [each["name"] for each in here.http.get("/api/ps").json()["models"]] == ["b"]
        assert here.http.get("/api/version").json()["version"]
        refused = here.http.post("/api/chat", json={"model": "c"})
        assert (refused.status_code, list(refused.json())) == (404, ["error"])
        refused = here.http.post("/v1/messages", json={"model": "c"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")


def test_an_idle_model_leaves_before_one_that_answers(tmp_path: Path) -> None:
    with front({"a": (40, 40), "b": (40, 40), "c": (40, 40)}) as here:
        held = here.later("a", hold=str(tmp_path / "a"))
        here.ask("b")
        assert here.ask("c").json()["by"] == "c"
        assert here.status() == "lul"
        (tmp_path / "a").touch()
        assert held.result().json()["by"] == "a"


def test_a_client_that_leaves_changes_nothing(tmp_path: Path) -> None:
    with front({"a": (60, 60), "b": (60, 60)}) as here:
        held = here.later("a", hold=str(tmp_path / "a"))
        until(lambda: here.of("a")["running"])
        with connected(str(here.http.base_url), "/v1/completions", {"model": "b"}):
            until(lambda: here.stats()["waiting"] == 1)
        until(lambda: here.stats()["waiting"] == 0)
        assert here.ask("a").json()["by"] == "a"  # nobody waits for it to leave
        assert here.of("b")["loads"] == 0
        with here.http.stream(
            "POST", "/v1/completions", json={"model": "a", "stream": True, "hold": str(tmp_path / "never")}
        ) as told:
            lines = told.iter_lines()
            assert next(lines) == "data: begun"
            assert here.of("a")["running"] == 2
        until(lambda: here.of("a")["running"] == 1)
        (tmp_path / "a").touch()
        assert held.result().status_code == 200


def test_a_client_that_leaves_while_its_model_is_loaded_stops_no_load(tmp_path: Path) -> None:
    with front({"a": (60, 60)}, words={"a": (str(tmp_path / "loaded"),)}) as here:
        with connected(str(here.http.base_url), "/v1/completions", {"model": "a"}):
            until(lambda: here.of("a")["status"] == "loading")
        until(lambda: here.stats()["waiting"] == 0)
        (tmp_path / "loaded").touch()
        until(lambda: here.http.get("/health").json()["models"]["a"] == "loaded")
        assert (here.of("a")["running"], here.stats()["waiting"]) == (0, 0)


def test_a_stream_says_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "KEEP_ALIVE_S", 0.1)
    with front({"slow": (60, 60)}, words={"slow": (str(tmp_path / "loaded"),)}) as here:
        with here.http.stream("POST", "/v1/completions", json={"model": "slow", "stream": True}) as told:
            lines = told.iter_lines()
            until(lambda: next(lines) == ": loading slow: packing, 1 of 2")
            (tmp_path / "loaded").touch()
            assert [line for line in lines if line and line[0] != ":"] == ["data: begun", "data: [DONE]"]
        assert here.ask("slow", stream=True).text == "data: begun\n\ndata: [DONE]\n\n"


def test_ollamas_streams_are_kept_alive_by_objects_without_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "KEEP_ALIVE_S", 0.1)
    with front({"slow": (60, 60)}, words={"slow": (str(tmp_path / "loaded"),)}) as here:
        client = ollama.Client(str(here.http.base_url), timeout=PATIENCE_S)
        told = client.chat("slow", [{"role": "user", "content": "a"}], stream=True)
        for _ in range(2):
            first = next(told)
            assert (first.model, first.message.content, first.done) == ("slow", "", False)
        (tmp_path / "loaded").touch()
        assert [each.done for each in told if each.done or each.message.content] == [True]
    with front({"bad": (60, 60)}, words={"bad": (str(tmp_path / "begun"), "the model is damaged")}) as here:
        client = ollama.Client(str(here.http.base_url), timeout=PATIENCE_S)
        replies = client.generate("bad", "a", stream=True)
        first = next(replies)
        assert (first.response, first.done) == ("", False)
        (tmp_path / "begun").touch()
        with pytest.raises(ollama.ResponseError, match="bad was not loaded: the model is damaged"):
            list(replies)
        whole = here.http.post("/api/generate", json={"model": "bad", "prompt": "a", "stream": False})
        assert whole.status_code == 500


def test_a_model_that_is_not_loaded_hurts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with front({"good": (40, 40), "bad": (40, 40)}, words={"bad": ("", "the model is damaged")}) as here:
        here.ask("good")
        for _ in range(2):
            told = here.ask("bad")
            assert told.status_code == 500
            assert told.json()["error"]["message"] == "bad was not loaded: the model is damaged"
        assert here.http.get("/v1/models/bad").json()["status"] == {
            "value": "unloaded", "failed": True, "error": "the model is damaged",
        }  # fmt: skip
        monkeypatch.setattr(router, "KEEP_ALIVE_S", 0.01)
        told = here.ask("bad", stream=True)  # an error after comments is an event
        assert told.status_code == 200
        assert "event: error\ndata: " in told.text
        assert "bad was not loaded: the model is damaged" in told.text
        assert here.ask("good").json()["by"] == "good"
        assert here.of("good")["loads"] == 1


def test_a_crash_fails_its_answers_alone(tmp_path: Path) -> None:
    with front({"a": (40, 40), "b": (40, 40)}) as here:
        held = here.later("b", hold=str(tmp_path / "b"))
        told = here.ask("a", crash=True)
        assert told.status_code == 502
        assert "a has ended, or its process does not answer" in told.json()["error"]["message"]
        assert until(lambda: here.of("a")["error"]) == "its process has ended with exit code 3"
        assert here.ask("a").json()["by"] == "a"
        assert here.of("a")["error"] is None
        (tmp_path / "b").touch()
        assert held.result().status_code == 200


def test_idle_models_are_unloaded(tmp_path: Path) -> None:
    with front({"a": (40, 40), "b": (40, 40)}, keep_alive_s=0.3) as here:
        held = here.later("a", hold=str(tmp_path / "a"))
        here.ask("b")
        until(lambda: here.status() == "lu")
        assert any(line.startswith("unloaded b, idle for 0.3 s") for line in here.said)
        (tmp_path / "a").touch()
        assert held.result().status_code == 200
        until(lambda: here.status() == "uu")
        assert not servers()


def test_a_share_grows_in_a_pause_once_others_have_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loaded_models, "PAUSE_S", 0.1)
    with front({"a": (60, 60), "b": (30, 200), "c": (20, 20)}) as here:
        here.ask("a")
        held = here.later("b", hold=str(tmp_path / "b"))
        until(lambda: here.of("b")["running"])
        here.ask("c")  # a leaves for it
        assert (here.status(), here.of("b")["memory_budget_bytes"]) == ("ull", 40)
        time.sleep(0.3)  # three pauses
        assert here.of("b")["loads"] == 1  # it answers
        (tmp_path / "b").touch()
        assert held.result().json()["by"] == "b"
        until(lambda: here.of("b")["memory_budget_bytes"] == 80)
        assert here.ask("b").json()["by"] == "b"
        assert (here.of("b")["loads"], here.of("c")["loads"]) == (2, 1)


def test_ends_while_a_model_is_being_loaded() -> None:
    with front({"a": (40, 40), "b": (40, 40)}, words={"a": ("never",)}) as here:
        loading, waiting = here.later("a"), here.later("b")
        until(servers)
        here.loaded.close()
        for told in (loading.result(), waiting.result(), here.ask("b")):
            assert (told.status_code, told.headers["Retry-After"]) == (503, "5")
            assert told.json()["error"]["message"] == "the server is about to end"
        assert not servers()


def test_running_answers_are_finished_in_the_end(tmp_path: Path) -> None:
    with front({"a": (40, 40)}) as here:
        held = here.later("a", hold=str(tmp_path / "a"))
        until((tmp_path / "a.arrived").exists)  # the router counts it as running before
        with ThreadPoolExecutor(1) as thread:
            closing = thread.submit(here.loaded.close)
            assert until(lambda: here.ask("a").status_code == 503)
            assert not closing.done()
            (tmp_path / "a").touch()
            closing.result()
        assert held.result().json()["by"] == "a"


def test_requests_wait_in_a_queue_with_a_bound(tmp_path: Path) -> None:
    with front({"a": (40, 40)}, words={"a": (str(tmp_path / "loaded"),)}, waiting=1) as here:
        first = here.later("a")
        told = here.ask("a")
        assert (told.status_code, told.headers["Retry-After"]) == (503, "5")
        assert "1 requests wait for a model" in told.json()["error"]["message"]
        (tmp_path / "loaded").touch()
        assert first.result().json()["by"] == "a"


def test_what_a_model_is_called() -> None:
    with front({"a": (40, 40), "b": (40, 40)}, problem="it needs 2 GiB") as here:
        told = here.ask("b-alias", temperature=0.1, seed=12345678901234567890).json()
        assert told["asked"] == {"model": "b", "temperature": 0.1, "seed": 12345678901234567890}
        assert [(each["id"], each["aliases"]) for each in here.http.get("/v1/models").json()["data"][:2]] == [
            ("a", ["a-alias"]), ("b", ["b-alias"]),
        ]  # fmt: skip
        for name, status, message in (
            ("nobody", 404, "the model 'nobody' does not exist; this server has a, b, never"),
            ("", 400, "name a model; this server has a, b, never"),
            ("never", 400, "never cannot be loaded: it needs 2 GiB"),
        ):
            told = here.ask(name)
            assert (told.status_code, told.json()["error"]["message"]) == (status, message)
            assert told.json()["error"]["param"] == "model"
        assert here.http.get("/v1/models/a-alias").json()["id"] == "a"
        assert here.status() == "ulu"


def test_a_request_reaches_its_model_as_it_was_sent() -> None:
    with front({"a": (40, 40)}, keys=[KEY]) as here:
        body = b'{"model": "a",  "prompt": "\xc3\xa9"}'
        headers = {"Authorization": f"Bearer {KEY}", "X-Session-Id": "7", "Content-Type": "application/json"}
        told = here.http.post("/v1/messages?beta=true", content=body, headers=headers).json()
        assert told["where"] == "/v1/messages?beta=true"
        assert told["asked"]["prompt"] == "é"
        assert "x-session-id: 7" in told["head"].lower()
        assert KEY not in told["head"]
        assert f"content-length: {len(body)}" in told["head"].lower()
        told = here.http.get("/experts?model=a", headers=headers)
        assert told.json()["where"] == "/experts?model=a"
        refused = here.http.post("/v1/completions", json={"model": "a", "refuse": True}, headers=headers)
        assert refused.status_code == 418


def test_bad_requests_load_nothing() -> None:
    origins = ["http://localhost:3000"]
    with front({"a": (40, 40)}, keys=[KEY], hosts=Hosts("127.0.0.1"), origins=origins) as here:
        headers = {"Authorization": f"Bearer {KEY}"}
        told = here.http.get("/health", headers={"Origin": origins[0]})
        assert told.headers["Access-Control-Allow-Origin"] == origins[0]
        assert here.http.get("/", headers={"Accept": "text/html"}).headers["Content-Security-Policy"]
        assert here.http.get("/").text == "Ollama is running"
        assert here.http.head("/v1/models", headers=headers).status_code == 200
        told = here.http.get("/stats?model=a", headers=headers)
        assert (told.status_code, "a is not loaded" in told.json()["error"]["message"]) == (503, True)
        assert here.http.get("/experts", headers=headers).status_code == 404
        for content, status, message in (
            (b"{", 400, "no JSON"),
            (b'{"model": "a", "temperature": NaN}', 400, "no JSON"),
            (b'{"model": "\\ud800"}', 400, "no JSON"),
            (b"[" * 300 + b"]" * 300, 400, "no JSON"),
            (b'["a"]', 400, "the body must be an object"),
            (b'{"model": 1}', 400, "the body must be an object"),
            (b"[" + b"1," * 50_000 + b"1]", 413, "would take"),
            (b" " * (1 << 20), 413, "the body has more than"),
        ):
            told = here.http.post("/v1/completions", content=content, headers=headers)
            assert (told.status_code, message in told.json()["error"]["message"]) == (status, True), content[:30]
        assert here.http.post("/v1/completions", json={"model": "a"}).status_code == 401
        told = here.http.post("/v1/completions", json={"model": "a"}, headers=headers | {"Host": "evil.example"})
        assert told.status_code == 403
        assert here.http.delete("/v1/models/a", headers=headers).status_code == 405
        assert here.http.get("/v1/models", headers=headers).json()["data"][0]["status"] == {"value": "unloaded"}


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_page_has_a_choice_of_models(tmp_path: Path) -> None:
    with front({"a": (40, 40), "b <i>": (40, 40)}) as here:
        command = [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
            "--virtual-time-budget=3000", "--dump-dom", str(here.http.base_url),
        ]  # fmt: skip
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert '<select id="models" aria-label="Model"><option>a</option><option>b &lt;i&gt;</option></select>' in shown
        assert here.status() == "uu"
