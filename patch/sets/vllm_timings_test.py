# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The vllm-timings Authors
"""Drives the module that the patch adds to vLLM with a fake application: `python3 -m unittest vllm_timings_test`."""

import asyncio
import importlib.util
import json
import logging
import os
import pathlib
import sys
import tempfile
import types
import unittest

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent
logging.getLogger("vllm_timings").addHandler(logging.NullHandler())
logging.getLogger("vllm_timings").propagate = False


def load(gate=""):
    """The module as the patch would write it."""
    source = (HERE / "vllm_timings.py").read_text().replace("@gate@", gate)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "vllm_timings.py")
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("vllm_timings", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def output(finished=True, prompt=10, cached=4, scheduled=100.0, first=100.05, last=100.25, predicted=8, **more):
    stats = types.SimpleNamespace(scheduled_ts=scheduled, first_token_ts=first, last_token_ts=last, num_generation_tokens=predicted)
    ids = None if prompt is None else [1] * prompt
    fields = dict(finished=finished, metrics=stats, num_cached_tokens=cached, prompt_token_ids=ids, encoder_prompt_token_ids=None, outputs=[types.SimpleNamespace()])
    return types.SimpleNamespace(**{**fields, **more})


TIMINGS = (
    b'{"cache_n":4,"prompt_n":6,"prompt_ms":50,"prompt_per_token_ms":8.333,"prompt_per_second":120,'
    b'"predicted_n":8,"predicted_ms":200,"predicted_per_token_ms":25,"predicted_per_second":40}'
)
MEMBER = b',"timings":' + TIMINGS
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


class Case(unittest.TestCase):
    def setUp(self):
        self.module = load()

    def record(self, n=1, **more):
        self.module.record(output(**more), types.SimpleNamespace(n=n))

    def serve(self, path, app, method="POST"):
        """Runs one request; the messages that reach the server."""
        sent = []

        async def send(message):
            sent.append(message)

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        middleware = self.module._Middleware(app)
        asyncio.run(middleware({"type": "http", "method": method, "path": path}, receive, send))
        return sent

    def app(self, *bodies, record=1, status=200, content_type=b"application/json", end=None, fail_after=None):
        """An application that answers with these messages, JSON where it is one, and whose engine has finished `record`
        requests before its last event but one. Each is made in a task of its own, as vLLM's generators are."""
        stream = content_type.startswith(b"text/event-stream")

        async def engine():
            for _ in range(record):
                self.record()

        async def app(scope, receive, send):
            headers = [(b"content-type", content_type)]
            if not stream:
                headers.append((b"content-length", b"%d" % sum(map(len, bodies))))
            await asyncio.create_task(engine())
            await send({"type": "http.response.start", "status": status, "headers": headers})
            for i, body in enumerate(bodies):
                if i == fail_after:
                    raise RuntimeError("the engine died")
                await send({"type": "http.response.body", "body": body, "more_body": stream or i + 1 < len(bodies)})
            if stream:
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        return app

    def events(self, path, *bodies, **more):
        sent = self.serve(path, self.app(*bodies, content_type=b"text/event-stream; charset=utf-8", **more))
        return [m["body"] for m in sent[1:] if m["body"]]

    def answer(self, path, *bodies, method="POST", **more):
        sent = self.serve(path, self.app(*bodies, **more), method)
        body = b"".join(m["body"] for m in sent[1:])
        self.assertEqual(int(dict(sent[0]["headers"])[b"content-length"]), len(body))
        return body


TOKEN = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"\\"finish_reason\\":\\"stop\\""},"finish_reason":null}]}\n\n'
FINISH = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":""},"finish_reason":"length"}]}\n\n'
USAGE = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":10,"completion_tokens":8}}\n\n'
DONE = b"data: [DONE]\n\n"


def with_timings(event, member=MEMBER):
    return event[:-3] + member + b"}\n\n"


class Streams(Case):
    def test_finish_event_without_usage(self):
        self.assertEqual(self.events(CHAT, TOKEN, FINISH, DONE), [TOKEN, with_timings(FINISH), DONE])

    def test_usage_event(self):
        for path in (CHAT, TEXT, "/invocations", "/prefix" + CHAT):
            self.assertEqual(self.events(path, TOKEN, FINISH, USAGE, DONE), [TOKEN, FINISH, with_timings(USAGE), DONE])

    def test_another_event_after_the_finish_event(self):
        self.assertEqual(self.events(CHAT, FINISH, TOKEN, FINISH, DONE), [FINISH, TOKEN, with_timings(FINISH), DONE])
        error = b'data: {"error":{"message":"x"}}\n\n'
        self.assertEqual(self.events(CHAT, FINISH, error, DONE), [FINISH, error, DONE])

    def test_end_without_done(self):
        self.assertEqual(self.events(CHAT, TOKEN, FINISH), [TOKEN, FINISH])

    def test_application_dies_with_the_finish_event_held(self):
        sent = []

        async def send(message):
            sent.append(message)

        app = self.app(TOKEN, FINISH, DONE, content_type=b"text/event-stream", fail_after=2)
        scope = {"type": "http", "method": "POST", "path": CHAT}
        with self.assertRaisesRegex(RuntimeError, "the engine died"):
            asyncio.run(self.module._Middleware(app)(scope, None, send))
        self.assertEqual([m["body"] for m in sent[1:]], [TOKEN, FINISH])

    def test_several_choices_prompts_or_none(self):
        for record in (0, 2):
            self.assertEqual(self.events(CHAT, TOKEN, FINISH, USAGE, DONE, record=record), [TOKEN, FINISH, USAGE, DONE])
            self.assertEqual(self.events(TEXT, TOKEN, FINISH, DONE, record=record), [TOKEN, FINISH, DONE])

    def test_messages_that_are_not_one_event(self):
        """Nothing is lost, whatever the messages are: the whole stream cut at every two places."""
        stream = TOKEN + FINISH + USAGE + DONE
        changed = {TOKEN + FINISH + with_timings(USAGE) + DONE, stream}
        for i in range(1, len(stream) - 1):
            for j in range(i + 1, len(stream), 7):
                got = b"".join(self.events(CHAT, stream[:i], stream[i:j], stream[j:]))
                self.assertIn(got, changed)
        self.assertEqual(self.events(CHAT, TOKEN, FINISH + USAGE, DONE), [TOKEN, FINISH + USAGE, DONE])

    def test_event_that_begins_inside_another(self):
        cut = b'data: {"choices":[{"delta":{"content":"'
        odd = b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n'  # it continues the text
        self.assertEqual(self.events(CHAT, cut, odd, DONE), [cut, odd, DONE])

    def test_responses(self):
        created = b'event: response.created\ndata: {"response":{"id":"resp_1","usage":null},"type":"response.created"}\n\n'
        for kind in (b"completed", b"incomplete"):
            last = b'event: response.%s\ndata: {"response":{"id":"resp_1","usage":{"input_tokens":10}},"type":"response.%s"}\n\n' % (kind, kind)
            self.assertEqual(self.events(RESPONSES, created, last), [created, with_timings(last)])
        failed = b'event: response.failed\ndata: {"response":{"id":"resp_1"}}\n\n'
        self.assertEqual(self.events(RESPONSES, failed), [failed])

    def test_responses_with_metrics(self):
        last = b'event: response.completed\ndata: {"response":{"id":"resp_1","metrics":{"queue_time_ms":1.5},"o":"\xc3\xa9"},"type":"response.completed"}\n\n'
        want = b'event: response.completed\ndata: {"response":{"id":"resp_1","o":"\xc3\xa9"},"type":"response.completed"' + MEMBER + b"}\n\n"
        self.assertEqual(self.events(RESPONSES, last), [want])

    def test_messages(self):
        start = b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":10}}}\n\n'
        last = b'event: message_delta\ndata: {"type":"message_delta","usage":{"input_tokens":10,"output_tokens":8}}\n\n'
        self.assertEqual(self.events(MESSAGES, start, last, DONE), [start, with_timings(last), DONE])

    def test_events_are_not_held_where_nothing_will_come(self):
        """With n > 1 one choice can end long before the others do."""
        sent = []

        async def send(message):
            sent.append(message["type"])

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
            await send({"type": "http.response.body", "body": FINISH, "more_body": True})
            self.assertEqual(len(sent), 2)

        asyncio.run(self.module._Middleware(app)({"type": "http", "method": "POST", "path": CHAT}, None, send))

    def test_concurrent_requests_do_not_mix(self):
        async def one(i):
            async def app(scope, receive, send):
                async def engine():
                    for _ in range(i % 3):
                        await asyncio.sleep(0)
                    self.record(predicted=i)

                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
                await asyncio.gather(engine())
                for body in (FINISH, DONE):
                    await send({"type": "http.response.body", "body": body, "more_body": True})

            got = []

            async def send(message):
                got.append(message.get("body"))

            await self.module._Middleware(app)({"type": "http", "method": "POST", "path": CHAT}, None, send)
            return json.loads(got[1][6:])["timings"]["predicted_n"]

        async def all_of_them():
            return await asyncio.gather(*map(one, range(1, 40)))

        self.assertEqual(asyncio.run(all_of_them()), list(range(1, 40)))


class Bodies(Case):
    def test_answer(self):
        for path in (CHAT, TEXT, RESPONSES, MESSAGES, "/invocations"):
            self.assertEqual(self.answer(path, b'{"id":"\xc3\xa9","usage":{}}'), b'{"id":"\xc3\xa9","usage":{}' + MEMBER + b"}")

    def test_unchanged(self):
        body = b'{"id":"c","usage":{}}'
        for more in (dict(record=0), dict(record=2), dict(status=400), dict(content_type=b"text/plain")):
            self.assertEqual(self.answer(CHAT, body, **more), body)
        for path in ("/v1/embeddings", "/v1/messages/count_tokens", "/v1/chat/completions/render", "/metrics"):
            self.assertEqual(self.answer(path, body), body)
        self.assertEqual(self.answer(CHAT, body, method="GET"), body)
        self.assertEqual(self.answer(CHAT, body[:5], body[5:]), body)
        for odd in (b"[1]", b"", b"{", b'{"metrics":{}', b'{"timings":{"a":1},"b":2}'):
            self.assertEqual(self.answer(CHAT, odd), odd)

    def test_metrics_go_where_timings_come(self):
        got = self.answer(CHAT, b'{"id":"c","metrics":{"queue_time_ms":1e-05},"logprob":-1.25,"text":"\xc3\xa9"}')
        self.assertEqual(got, b'{"id":"c","logprob":-1.25,"text":"\xc3\xa9"' + MEMBER + b"}")
        nested = b'{"tools":[{"metrics":{"type":"object"}}],"metrics":null}'
        self.assertEqual(self.answer(CHAT, nested), nested[:-1] + MEMBER + b"}")
        several = b'{"metrics":{"queue_time_ms":1}}'
        self.assertEqual(self.answer(CHAT, several, record=2), several)

    def test_turns_of_a_response_are_summed(self):
        timings = json.loads(self.answer(RESPONSES, b'{"id":"resp_1"}', record=2))["timings"]
        self.assertEqual((timings["cache_n"], timings["prompt_n"], timings["predicted_n"]), (8, 12, 16))
        self.assertEqual((timings["prompt_ms"], timings["predicted_ms"]), (100, 400))

    def test_response_in_the_background(self):
        records = []

        async def app(scope, receive, send):
            records.append(self.module._records.get())
            body = b'{"id":"resp_7","status":"queued"}'
            head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": body})

        self.assertEqual(self.serve(RESPONSES, app)[1]["body"], b'{"id":"resp_7","status":"queued"}')
        records[0].append((6, 4, 0.05, 0.2, 8, 0, 0))
        get = dict(method="GET", record=0)
        running, done = b'{"id":"resp_7","status":"in_progress"}', b'{"id":"resp_7","status":"completed"}'
        self.assertEqual(self.answer(RESPONSES + "/resp_7", running, **get), running)
        self.assertEqual(self.answer(RESPONSES + "/resp_7", done, **get), done[:-1] + MEMBER + b"}")
        self.assertEqual(self.answer(RESPONSES + "/resp_8", done, **get), done)
        for i in range(300):
            self.module._remember(b'{"id":"resp_x%d"}' % i, [])
        self.assertEqual(len(self.module._background), 256)

    def test_application_that_sends_no_body(self):
        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})

        self.assertEqual([m["type"] for m in self.serve(CHAT, app)], ["http.response.start"])

    def test_a_failure_of_ours_changes_nothing(self):
        def broken(*_):
            raise ValueError("x")

        self.module._timings = broken
        body = b'{"id":"c"}'
        self.assertEqual(self.answer(CHAT, body), body)
        self.assertEqual(self.events(CHAT, TOKEN, FINISH, USAGE, DONE), [TOKEN, FINISH, USAGE, DONE])


class Figures(Case):
    def timings(self, n=1, **more):
        figures = self.module._figures(output(**more), types.SimpleNamespace(n=n))
        text = self.module._timings([figures], False)
        return text if text is None else json.loads(text)

    def test_none(self):
        nan, inf = float("nan"), float("inf")
        for more in (
            dict(n=2), dict(metrics=None), dict(scheduled=0.0), dict(first=0.0), dict(last=0.0), dict(last=nan),
            dict(last=inf), dict(first=99.0), dict(last=100.01),
        ):  # fmt: skip
            self.assertIsNone(self.timings(**more), more)

    def test_unfinished_outputs_and_other_requests(self):
        records = []
        token = self.module._records.set(records)
        self.record(finished=False)
        self.assertEqual(records, [])
        self.record()
        self.module._records.reset(token)
        self.record()
        self.assertEqual(len(records), 1)

    def test_a_failure_while_recording(self):
        token = self.module._records.set(records := [])
        self.module.record(types.SimpleNamespace(finished=True), None)
        self.module._records.reset(token)
        self.assertEqual(records, [None])

    def test_one_token(self):
        timings = self.timings(predicted=1, last=100.05)
        self.assertEqual([timings["predicted_" + k] for k in ("n", "ms", "per_token_ms", "per_second")], [1, 0, 0, 0])

    def test_cached_unknown(self):
        for cached in (None, -1):
            timings = self.timings(cached=cached)
            self.assertNotIn("cache_n", timings)
            self.assertEqual((timings["prompt_n"], timings["estimated"]), (10, True))
        self.assertEqual(list(self.timings(cached=None))[-1], "estimated")

    def test_prompt_embeddings(self):
        timings = self.timings(prompt=None)
        self.assertEqual(sorted(k for k in timings if k.startswith("prompt")), ["prompt_ms"])

    def test_encoder_prompt(self):
        self.assertEqual(self.timings(encoder_prompt_token_ids=[1, 2])["prompt_n"], 8)

    def test_drafts(self):
        def outputs(drafts):
            metrics = types.SimpleNamespace(to_dict=lambda: dict(num_draft_tokens=drafts, num_accepted_draft_tokens=2))
            return [types.SimpleNamespace(spec_decode_metrics=metrics)]

        timings = self.timings(outputs=outputs(3))
        self.assertEqual(list(timings.items())[-2:], [("draft_n", 3), ("draft_n_accepted", 2)])
        self.assertNotIn("draft_n", self.timings(outputs=outputs(0)))
        self.assertNotIn("draft_n", self.timings(outputs=[types.SimpleNamespace(spec_decode_metrics=None)]))


class Gate(unittest.TestCase):
    def installed(self, gate):
        added = []
        load(gate).install(types.SimpleNamespace(add_middleware=added.append))
        return bool(added)

    def test_gate(self):
        self.assertTrue(self.installed(""))
        name = "VLLM_TIMINGS_TEST_GATE"
        self.addCleanup(os.environ.pop, name, None)
        self.assertFalse(self.installed(name))
        for value, on in (("", False), ("0", False), (" Off ", False), ("no", False), ("FALSE", False), ("1", True), ("yes", True)):
            os.environ[name] = value
            self.assertEqual(self.installed(name), on, value)


if __name__ == "__main__":
    unittest.main()
