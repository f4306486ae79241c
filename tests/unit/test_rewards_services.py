"""HTTP reward services: what failing, slow and wrong servers cost, and that a token stays secret."""

import asyncio
import json
import logging
import threading
import time

import numpy as np
import pytest
import uvicorn

from skirl.config.rewards import RewardConfig
from skirl.errors import ConfigError
from skirl.rewards import services
from skirl.rewards.pool import RewardPool
from skirl.rewards.wire import WireError, encode_sample, read_answer
from skirl.testing.reward_samples import make_group, make_sample, to_samples
from skirl.tracking.metrics import finish

TOKEN = "a-secret-that-nobody-sees"


class Server:
    """A uvicorn server in a thread. ``behave(samples, number)``: status and body of the answer to a request; ``empty``:
    the same of one without samples.
    """

    def __init__(self, behave, port=0, empty=(200, {"scores": []})):
        self.behave, self.empty = behave, empty
        self.requests, self.tokens, self.probes, self.paths = [], [], 0, []
        self.busy = self.most_busy = 0
        self.endless_health = False
        settings = {"log_config": None, "lifespan": "off", "interface": "asgi3", "timeout_graceful_shutdown": 1}
        config = uvicorn.Config(self.app, port=port, **settings)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/score"

    async def app(self, scope, receive, send):
        if scope["path"] == "/health":
            self.probes += 1
            if self.endless_health:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                while (await receive())["type"] != "http.disconnect":
                    pass
                return None
            return await answer(send, 200, {})
        body, more = b"", True
        while more:
            message = await receive()
            body += message["body"]
            more = message["more_body"]
        samples = json.loads(body)["samples"]
        self.tokens.append(dict(scope["headers"]).get(b"authorization"))
        if not samples:
            self.paths.append(scope["path"])
            return await answer(send, *self.empty)
        self.requests.append(samples)
        self.busy += 1
        self.most_busy = max(self.busy, self.most_busy)
        result = self.behave(samples, len(self.requests))
        status, content = await result if asyncio.iscoroutine(result) else result
        self.busy -= 1
        await answer(send, status, content)

    def stop(self):
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()


async def answer(send, status, content):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


def lengths(samples, number=0):
    return 200, {"scores": [len(sample["text"]) for sample in samples]}


@pytest.fixture
def serve():
    """Starts servers that are stopped at the end."""
    made = []

    def start(behave=lengths, port=0, **more):
        made.append(Server(behave, port, **more))
        return made[-1]

    yield start
    for server in made:
        server.stop()


@pytest.fixture
def pool(tmp_path):
    made = []

    def make(*servers, source=None, reward=None, **settings):
        urls = [each if isinstance(each, str) else each.url for each in servers]
        section = {"services": {"judge": {"urls": urls, "timeout_s": 5.0, **settings}}, **(reward or {})}
        if source is not None:
            section["python"] = tmp_path / "my_reward.py"
            section["python"].write_text(source)
        made.append(RewardPool(RewardConfig.model_validate({"num_workers": 1, **section}), to_samples))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.close()


def score(pool, *texts, **more):
    return asyncio.run(pool.score(make_group(texts, "one", **more))).scores


def totals(scores):
    return [one.total for one in scores]


def test_scores_come_back_in_order_with_the_weight_of_the_service(serve, pool):
    scores = score(pool(serve(), weight=0.5), "a", "bbb", "cc")
    assert totals(scores) == [0.5, 1.5, 1.0]
    assert scores[1].parts == {"judge": 3.0}


def test_what_a_service_is_sent(serve, pool):
    server = serve()
    row = {"speaker": "child", "vector": np.array([1.0, np.nan]), "clip": b"abc", "messages": [{"role": "user"}]}
    score(pool(server), "a", row=row, num_turns=2)
    [[sample]] = server.requests
    assert sample["row"] == {
        "text": "one",
        "language": "English",
        "speaker": "child",
        "vector": [1.0, None],
        "clip": "YWJj",
        "messages": [{"role": "user"}],
    }
    assert (sample["id"], sample["index"], sample["text"], sample["num_turns"]) == ("made/0", 0, "a", 2)
    assert sample["messages"] == [{"role": "user"}]
    with pytest.raises(WireError, match=r"sample made/0#0: row\.f is a function, which JSON cannot carry"):
        encode_sample(make_sample("x", row={"f": lambda: 1}))


def test_named_parts_turns_and_refusals(serve, pool):
    given = [{"clarity": 1, "style": None}, {"clarity": 0.5, "style": 2}, {"error": "no idea"}]
    scores = score(pool(serve(lambda samples, _: (200, {"scores": given[: len(samples)]})), batch_size=3), "a", "b")
    assert scores[0].parts == {"judge/clarity": 1.0}
    parts = read_answer(json.dumps({"scores": [{"turns": [1, 2]}, *given[1:]]}).encode(), "judge", [2, 1, 1])
    assert parts[0] == {"judge/turns": (1.0, 2.0)}
    assert parts[1] == {"judge/clarity": 0.5, "judge/style": 2.0}
    assert parts[2].message == "it gave no score: no idea"


def test_the_function_sees_the_scores_and_combines_them(serve, pool):
    source = "def reward(sample): return {'mine': 10 * sample.scores['judge']}"
    scores = score(pool(serve(), source=source), "a", "bb")
    assert totals(scores) == [11.0, 22.0]
    scores = score(pool(serve(), source=source, reward={"combine": "python"}), "a", "bb")
    assert totals(scores) == [10.0, 20.0]
    assert scores[1].parts == {"judge": 2.0, "mine": 20.0}


def test_a_whole_group_is_called_without_the_samples_that_failed(serve, pool):
    def behave(samples, _):
        return 200, {"scores": [{"error": "no"} if s["text"] == "bad" else 1.0 for s in samples]}

    source = "def reward(samples): return [sum(s.scores['judge'] for s in samples)] * len(samples)"
    scores = score(pool(serve(behave), source=source), "a", "bad", "c")
    assert totals(scores) == [3.0, None, 3.0]
    assert scores[1].failure.kind == "service"
    assert scores[1].failure.message.endswith("/score: it gave no score: no")


def test_scoring_begins_before_the_group_is_whole(serve, pool):
    server = serve()
    one = pool(server, source="def reward(samples): return [0.0] * len(samples)")
    group = make_group(["a", "bb"])

    async def run():
        one.begin(group.prompt, group.rollouts[1], group.sampling)
        while not server.requests:
            await asyncio.sleep(0.01)
        return await one.score(group)

    assert totals(asyncio.run(run()).scores) == [1.0, 2.0]
    assert [[s["index"] for s in samples] for samples in server.requests] == [[1], [0]]


def test_500_then_200(serve, pool):
    server = serve(lambda samples, number: lengths(samples) if number > 1 else (500, b"oh"))
    assert totals(score(pool(server), "a", "bb")) == [1.0, 2.0]
    assert server.probes >= 2  # at the start, and to come back


def test_metrics_of_services(serve, pool):
    """Requests since the last call, retries since the start, servers that rest now."""

    async def slow(samples, number):
        await asyncio.sleep(0.05)
        return lengths(samples) if number != 3 else (500, b"oh")

    one = pool(serve(slow), batch_size=1)
    assert finish(one.metrics()) == {"reward/retries/judge": 0.0, "reward/resting/judge": 0.0}
    score(one, "a", "bb")
    found = finish(one.metrics())
    assert 0.05 < found.pop("reward/request_s/judge") < 1
    assert found == {"reward/retries/judge": 0.0, "reward/resting/judge": 0.0}
    assert totals(score(one, "a", "bb")) == [1.0, 2.0]
    found = one.metrics()
    assert found["reward/request_s/judge"].denominator == 2  # of three: the third since the start failed
    assert found["reward/retries/judge"].numerator == 1
    assert "reward/request_s/judge" not in one.metrics()


def test_a_server_that_rests_is_counted(serve, pool):
    server = serve(lambda samples, number: (500, b"oh"))
    one = pool(server, retries=0)
    server.empty = (401, b"no")  # so that it does not come back
    assert totals(score(one, "a")) == [None]
    assert one.metrics()["reward/resting/judge"].numerator == 1


def test_a_server_that_dies_costs_nothing_and_comes_back(serve, pool, caplog):
    async def behave(samples, _):
        await asyncio.sleep(0.02)
        return lengths(samples)

    first, second = serve(behave), serve(behave)
    one = pool(first, second, batch_size=2, max_in_flight=2)
    texts = ["x" * (n % 5) for n in range(60)]

    async def run():
        task = asyncio.create_task(one.score(make_group(texts)))
        while len(first.requests) < 2:
            await asyncio.sleep(0.002)
        await asyncio.to_thread(first.stop)
        return await task

    assert totals(asyncio.run(run()).scores) == [float(len(text)) for text in texts]
    assert first.requests
    assert len(second.requests) > len(first.requests)
    again = serve(behave, first.port)
    end = time.monotonic() + 8
    while not again.requests and time.monotonic() < end:
        assert totals(score(one, *"abcdef")) == [1.0] * 6
        time.sleep(0.05)
    assert again.requests


def test_one_sample_that_a_server_chokes_on_costs_itself(serve, pool):
    def behave(samples, _):
        return (500, b"cannot") if any(s["text"] == "bad" for s in samples) else lengths(samples)

    server = serve(behave)
    one = pool(server, retries=2, max_in_flight=1)
    scores = score(one, "a", "bad", "ccc", "dd")
    assert totals(scores) == [1.0, None, 3.0, 2.0]
    assert scores[1].failure.message == (
        f"reward.services.judge: POST {server.url}: status 500: cannot (tried 3 times)"
    )


def test_a_slow_server_is_left_for_another(serve, pool):
    async def sleeps(samples, _):
        await asyncio.sleep(3)
        return lengths(samples)

    slow, quick = serve(sleeps), serve()
    began = time.monotonic()
    assert totals(score(pool(slow, quick, timeout_s=0.5), *"abcd")) == [1.0] * 4
    assert time.monotonic() - began < 2.5
    assert slow.requests


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"scores": [1.0, 2.0]}', "the answer has 2 scores for 1 samples"),
        ('{"rewards": [1.0]}', "the answer has no list \"scores\": {'rewards': [1.0]}"),
        ("<html>", "the answer is not JSON (Expecting value: line 1 column 1 (char 0)): b'<html>'"),
        ("[" * 200_000, f"the answer is not JSON (it is nested too deeply): b'{'[' * 80}'"),
    ],
)
def test_answers_of_another_form_are_refused(body, said):
    with pytest.raises(WireError) as caught:
        read_answer(body.encode(), "judge", [1])
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("score", "said"),
    [
        ("NaN", "scores[1] is nan; a score must be a finite number"),
        ("1e999", "scores[1] is inf; a score must be a finite number"),
        ('{"a": "high"}', "scores[1].a is 'high', not a number"),
        ("{}", "scores[1] is empty"),
        ("null", "scores[1] is 'None', not a number"),
        ('{"turns": [1, 2]}', "scores[1].turns must be a list of 1 numbers, one a turn"),
    ],
)
def test_a_score_of_another_form_stands_alone(score, said):
    first, second = read_answer(f'{{"scores": [1.0, {score}]}}'.encode(), "judge", [1, 1])
    assert first == {"judge": 1.0}
    assert isinstance(second, WireError)
    assert str(second) == said


def test_an_answer_of_another_form_is_a_typed_failure(serve, pool):
    [wrong, nan] = [serve(lambda *_, body=body: (200, body)) for body in (b'{"scores": [1, 2]}', b'{"scores": [NaN]}')]
    [one] = score(pool(wrong, retries=0), "a")
    assert one.failure.kind == "service"
    assert one.failure.message.endswith("status 200, but the answer has 2 scores for 1 samples (tried 1 time)")
    [one] = score(pool(nan, retries=1), "a")
    assert one.failure.message.endswith("scores[0] is nan; a score must be a finite number (tried 2 times)")


def test_a_score_that_is_none_costs_itself_and_no_server_rests(serve, pool, caplog):
    """One NaN in an answer is that sample's failure: its siblings in the request have scores of their own."""

    def nan_for_b(samples, number):
        return 200, b'{"scores": [%s]}' % b", ".join(b"NaN" if s["text"] == "b" else b"1" for s in samples)

    server = serve(nan_for_b)
    found = score(pool(server, retries=0, max_in_flight=1), *"abc")
    assert [len(request) for request in server.requests] == [1, 2]
    assert totals(found) == [1.0, None, 1.0]
    assert "is nan; a score must be a finite number (tried 1 time)" in found[1].failure.message
    assert not caplog.records


def test_no_more_in_flight_than_allowed(serve, pool):
    async def behave(samples, _):
        await asyncio.sleep(0.03)
        return lengths(samples)

    server = serve(behave)
    assert totals(score(pool(server, batch_size=4, max_in_flight=3), *["a"] * 60)) == [1.0] * 60
    assert server.most_busy == 3
    assert len(server.requests) >= 15
    assert max(map(len, server.requests)) == 4


def test_requests_go_where_the_fewest_are(serve, pool):
    async def behave(samples, _):
        await asyncio.sleep(0.1)
        return lengths(samples)

    first, second = serve(behave), serve(behave)
    score(pool(first, second, batch_size=1), *["a"] * 8)
    assert (len(first.requests), len(second.requests)) == (4, 4)


def test_all_servers_gone_ends_in_a_failure_that_says_so(serve, pool):
    server = serve()
    one = pool(server, timeout_s=0.6, retries=100)
    server.stop()
    began = time.monotonic()
    scores = score(one, "a", "b")
    assert time.monotonic() - began < 3
    assert [each.failure.kind for each in scores] == ["service"] * 2
    assert f"no server is healthy: GET http://127.0.0.1:{server.port}/health: ConnectError" in scores[0].failure.message


def test_a_service_that_is_not_there_is_refused_at_the_start(pool, monkeypatch):
    monkeypatch.setattr(services, "START_WAIT_S", 0.2)
    with pytest.raises(
        ConfigError, match=r"reward\.services\.judge: no server is ready \(GET http://127.*ConnectError"
    ):
        pool("http://127.0.0.1:9/score")
    with pytest.raises(ConfigError, match=r"reward\.services\.judge\.urls: '127\.0\.0\.1:9' is no HTTP address"):
        pool("127.0.0.1:9")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "status 401: no; it wants a token: set reward.services.judge.token_env"),
        (403, "status 403: no; it wants a token: set reward.services.judge.token_env"),
        (404, "status 404: no; correct the path in reward.services.judge.urls (of `skirl serve-reward`: /score)"),
        (405, "status 405: no; correct the path in reward.services.judge.urls (of `skirl serve-reward`: /score)"),
        (307, "status 307: no; redirects are not followed: put the address meant into reward.services.judge.urls"),
    ],
)
def test_a_wrong_token_or_path_is_found_before_anything_is_sampled(serve, pool, monkeypatch, status, said):
    """It answers /health: only a request says that it takes none of this run, and one without samples costs nothing."""
    monkeypatch.setattr(services, "START_WAIT_S", 0.2)
    server = serve(empty=(status, b"no"))
    with pytest.raises(ConfigError) as caught:
        pool(server)
    assert str(caught.value).startswith(f"reward.services.judge: no server is ready (POST {server.url}: {said})")
    assert set(server.paths) == {"/score"}
    assert not server.requests


@pytest.mark.parametrize("status", [200, 400, 413, 422, 500, 503])
def test_what_a_server_makes_of_no_samples_is_its_own_matter(serve, pool, status):
    assert totals(score(pool(serve(empty=(status, b"what?"))), "a")) == [1.0]


def test_a_server_that_is_late_or_hangs_on_no_samples_is_waited_for(serve, pool, monkeypatch):
    monkeypatch.setattr(services, "START_WAIT_S", 5.0)
    monkeypatch.setattr(services, "HEALTH_TIMEOUT_S", 0.2)
    server = serve(empty=(404, b"not yet"))
    timer = threading.Timer(0.5, lambda: setattr(server, "empty", (200, b"")))
    timer.start()
    assert totals(score(pool(server), "a")) == [1.0]
    timer.join()
    assert len(server.paths) >= 2


def test_one_of_several_that_refuses_rests_and_costs_no_sample(serve, pool, caplog):
    wrong, right = serve(lambda *_: (404, b"no"), empty=(404, b"no")), serve()
    one = pool(wrong, right, retries=0)
    assert totals(score(one, *"abcd")) == [1.0] * 4
    assert "correct the path in reward.services.judge.urls" in caplog.text
    assert not wrong.requests


def test_a_health_page_without_end_is_not_read(serve, pool):
    """Its status is all that counts."""
    server = serve()
    server.endless_health = True
    began = time.monotonic()
    assert totals(score(pool(server), "a")) == [1.0]
    assert time.monotonic() - began < 3


def test_the_token_is_sent_and_never_shown(serve, pool, monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_TOKEN", TOKEN)
    server = serve(lambda samples, number: (401, b"go away"))
    with caplog.at_level(logging.DEBUG):
        one = pool(server, token_env="JUDGE_TOKEN", retries=1)
        [failed] = score(one, "a")
    assert set(server.tokens) == {f"Bearer {TOKEN}".encode()}
    assert failed.failure.message.endswith(
        "status 401: go away; it does not take the token in JUDGE_TOKEN (tried 2 times)"
    )
    [service] = one._sources._services
    shown = [repr(one), repr(service), repr(service._client.headers), one._config.model_dump_json(), str(failed)]
    assert not any(TOKEN in text for text in [*shown, caplog.text])


def test_a_password_in_an_address_is_not_shown(serve, pool):
    server = serve(lambda *_: (500, b""))
    [one] = score(pool(server.url.replace("http://", "http://me:hidden@"), retries=0), "a")
    assert "hidden" not in one.failure.message
    assert server.url in one.failure.message


@pytest.mark.parametrize("value", [None, "two\nlines"])
def test_a_token_that_cannot_be_sent_is_refused_without_showing_it(pool, monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("JUDGE_TOKEN", value)
    with pytest.raises(ConfigError, match=r"reward\.services\.judge\.token_env") as caught:
        pool("http://127.0.0.1:9/score", token_env="JUDGE_TOKEN")
    assert "two" not in str(caught.value)
