# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The vllm-timings Authors
# [vllm-timings] This file is not part of vLLM. `vllm-timings patch` added it, and `vllm-timings patch revert` removes it.
"""Puts llama.cpp's `timings` into vLLM's answers.

Two hooks in vLLM's own files call this: `install` where the web application is made, and `record` where a request's
output leaves the engine. What ties them is a context variable: a list that is made for each HTTP request, to which each
engine request that it leads to adds its figures. Tasks inherit the context, so the list is found however deep a handler
nests its tasks and generators. The middleware then adds one member to the answer's bytes, and so needs to know nothing
of the serving code, which is different in every version of vLLM.
"""

import collections
import contextvars
import json
import logging
import math
import os
import re

_GATE = "@gate@"  # an environment variable that switches this on; none: it is on
_ON = not _GATE or os.environ.get(_GATE, "").strip().lower() not in ("", "0", "false", "no", "off")

_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations")

_logger = logging.getLogger(__name__)
_records = contextvars.ContextVar("vllm_timings_records", default=None)
_background = collections.OrderedDict()  # the newest responses that run in the background: id to records
_failed = False


def install(app):
    """Adds the middleware. It must be the first that is added: then it is the innermost, and sees plain bytes."""
    if _ON:
        app.add_middleware(_Middleware)
        _logger.info("Answers carry `timings`.")


def record(out, sampling_params):
    """Notes the figures of an engine request that has finished. This runs for each output of each request."""
    if not out.finished:
        return
    records = _records.get()
    if records is not None:
        try:
            records.append(_figures(out, sampling_params))
        except Exception:
            records.append(None)
            _complain()


def _figures(out, sampling_params):
    """What the engine says of one request, None if that is not enough: prompt tokens computed, cached ones, seconds of
    prefill and of decode, tokens generated, draft tokens proposed and accepted."""
    stats = out.metrics  # None with --disable-log-stats
    if stats is None or sampling_params.n > 1:
        return None
    scheduled, first, last = stats.scheduled_ts, stats.first_token_ts, stats.last_token_ts
    if not (0 < scheduled <= first <= last and math.isfinite(last)):
        return None  # it was aborted before its first token
    cached = out.num_cached_tokens
    if cached is not None and cached < 0:
        cached = None
    prompt = out.prompt_token_ids  # None where the prompt came as embeddings
    if prompt is not None:
        prompt = max(0, len(prompt) + len(getattr(out, "encoder_prompt_token_ids", None) or ()) - (cached or 0))
    spec = getattr(out.outputs[0], "spec_decode_metrics", None) if out.outputs else None
    spec = spec.to_dict() if spec is not None else {}
    drafts, accepted = spec.get("num_draft_tokens", 0), spec.get("num_accepted_draft_tokens", 0)
    return prompt, cached, first - scheduled, last - first, stats.num_generation_tokens, drafts, accepted


def _timings(records, several):
    """The JSON of `timings`, None if there is nothing to tell. Only where `several` is true do several engine requests
    make one answer, and their sums are its figures; elsewhere they are several answers."""
    if not records or None in records or len(records) > 1 and not several:
        return None
    sums = [None if None in column else sum(column) for column in zip(*records)]
    prompt, cached, prefill, decode, predicted, drafts, accepted = sums
    members = {} if cached is None else {"cache_n": cached}
    for name, n, seconds in (("prompt", prompt, prefill), ("predicted", predicted, decode)):
        if n is not None:
            members[name + "_n"] = n
        members[name + "_ms"] = _rounded(seconds * 1000)
        if n is not None:
            members[name + "_per_token_ms"] = _rounded(seconds * 1000 / n if n else 0)
            members[name + "_per_second"] = _rounded(n / seconds if seconds else 0)
    if drafts:
        members.update(draft_n=drafts, draft_n_accepted=accepted)
    if cached is None and prompt is not None:
        members["estimated"] = True
    return json.dumps(members, separators=(",", ":"), allow_nan=False).encode()


def _rounded(x):
    x = round(x, 3)
    return int(x) if x == int(x) else x


class _Middleware:
    """Plain ASGI: Starlette's BaseHTTPMiddleware would put a queue between each event and its client."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        method, path = scope.get("method"), scope.get("path", "")
        head, _, last = path.rpartition("/")
        retrieved = method == "GET" and head.endswith("/v1/responses") and last in _background
        if scope["type"] != "http" or not (retrieved or method == "POST" and path.endswith(_PATHS)):
            await self.app(scope, receive, send)
            return
        records = _background[last] if retrieved else []
        answer = _Answer(send, records, "responses" if retrieved else last, retrieved)
        token = _records.set(records)
        try:
            await self.app(scope, receive, answer.send)
        finally:
            _records.reset(token)
            await answer.release()


class _Answer:
    """An answer on its way to the client. `_next` is what to do with the next message, None when all is done: it gets
    the messages that are held back as well, and returns what to send now. If it fails, all of them go out as they are."""

    def __init__(self, send, records, kind, retrieved):
        self._send, self._records, self._kind, self._retrieved = send, records, kind, retrieved
        self._next = self._start
        self._held = []
        self._between = True  # nothing of an event that has not ended yet was sent

    async def send(self, message):
        if self._next is None:
            await self._send(message)
            return
        held, self._held = self._held, []
        try:
            messages = self._next(held, message)
        except Exception:
            self._next, self._held, messages = None, [], [*held, message]
            _complain()
        for message in messages:
            await self._send(message)

    async def release(self):
        """Sends what is held back still, if the application ended without sending more."""
        held, self._held, self._next = self._held, [], None
        for message in held:
            await self._send(message)

    def _start(self, held, message):
        self._next = None
        if message["type"] == "http.response.start" and message["status"] == 200:
            content_type = dict(message.get("headers", ())).get(b"content-type", b"")
            if content_type.startswith(b"text/event-stream"):
                self._next = self._event
            elif content_type.startswith(b"application/json"):
                self._next = self._json  # the length in the head has to be right
                self._held = [message]
                return []
        return [message]

    def _json(self, held, message):
        self._next = None
        body = message.get("body", b"")
        if message.get("more_body"):
            return [*held, message]
        if self._kind == "responses" and not self._records:
            _remember(body, self._records)
        if self._retrieved and json.loads(body).get("status") not in ("completed", "incomplete"):
            return [*held, message]
        edited = _with(body, self._timings())
        headers = [(k, b"%d" % len(edited) if k.lower() == b"content-length" else v) for k, v in held[0]["headers"]]
        return [dict(held[0], headers=headers), dict(message, body=edited)]

    def _event(self, held, message):
        """Takes one message of a stream, which in vLLM is one event. One that is several, or a part of one, goes through
        as it is. JSON escapes quotes and line feeds, so no text can look like a member or like the end of an event."""
        body = message.get("body", b"")
        begins = self._between
        self._between = body.endswith(b"\n\n") if body else begins
        if not message.get("more_body"):
            self._next = None
        elif not begins or not self._between:
            pass
        elif self._last(body):  # it is there to carry the figures of the whole answer
            self._next = None
            return [*held, self._edited(message)]
        elif self._kind in ("responses", "messages"):
            pass
        elif body == b"data: [DONE]\n\n":
            self._next = None
            return [*map(self._edited, held), message]
        elif b'"finish_reason":"' in body and self._timings() is not None:
            self._held = [message]  # until the next event tells whether the client asked for usage
            return held
        return [*held, message]

    def _last(self, body):
        if self._kind == "responses":
            return body.startswith((b"event: response.completed\n", b"event: response.incomplete\n"))
        if self._kind == "messages":
            return body.startswith(b"event: message_delta\n") and b'"usage":{' in body
        return b'"choices":[]' in body and b'"usage":{' in body

    def _edited(self, message):
        body = message["body"]
        start = 6 if body.startswith(b"data: ") else body.index(b"\ndata: ") + 7
        data = body[start:-2]
        if b"\n" in data:
            return message
        return dict(message, body=body[:start] + _with(data, self._timings()) + b"\n\n")

    def _timings(self):
        return _timings(self._records, self._kind == "responses")


def _with(data, timings):
    """The JSON object `data` with `timings` for its last member, and without vLLM's own `metrics`: llama-swap takes
    prompt_n for the whole prompt where it sees both, and then shows a wrong speed."""
    if timings is None or not (data.startswith(b"{") and data.endswith(b"}")):
        return data
    if b'"metrics":{' in data or b'"timings":' in data:
        answer = json.loads(data)
        if "timings" in answer:
            return data
        objects = [o for o in (answer, answer.get("response")) if isinstance(o, dict) and isinstance(o.get("metrics"), dict)]
        for o in objects:
            del o["metrics"]
        if objects:
            data = json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
    return data[:-1] + b',"timings":' + timings + b"}"


def _remember(body, records):
    """Keeps the records of a response that runs in the background: it is fetched by its id, by another request."""
    found = re.search(rb'"id":"(resp_[^"\\]+)"', body)
    if found:
        _background[found.group(1).decode()] = records
        while len(_background) > 256:
            _background.popitem(last=False)


def _complain():
    global _failed
    if not _failed:
        _failed = True
        _logger.exception("Some answers go out without `timings`. This is told once.")
