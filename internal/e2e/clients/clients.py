"""Drives Python client libraries: for each line on stdin, {"case": NAME, "base": URL}, it makes that call to the server
at URL and writes one line of JSON:

    {"seen": [...]}     everything that the library handed to the caller, in order: objects, chunks, events, texts
    {"error": "..."}    what the call raised

One process serves all the tests, as the imports take seconds.
"""

import asyncio
import json
import os
import sys
import traceback

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or its import downloads one

import anthropic
import litellm
import openai

MODEL = "tiny"
MESSAGES = [{"role": "user", "content": "Tell me, client, what do you read?"}]
PROMPT = "Tell me, client, what do you read?"
TOKENS = 11
EXTRA = {"ignore_eos": True}
CHAT = dict(model=MODEL, messages=MESSAGES, max_tokens=TOKENS, temperature=0, seed=1, extra_body=EXTRA)
TEXT = dict(model=MODEL, prompt=PROMPT, max_tokens=TOKENS, temperature=0, seed=1, extra_body=EXTRA)
RESPONSES = dict(model=MODEL, input=PROMPT, max_output_tokens=TOKENS, temperature=0, extra_body=EXTRA)
# The anthropic library knows no temperature any more.
MESSAGES_API = dict(model=MODEL, messages=MESSAGES, max_tokens=TOKENS, extra_body=EXTRA | {"temperature": 0})
USAGE = {"include_usage": True}


# No retries: a connection that the server cut must be seen.
def oai(base):
    return openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=0, timeout=120)


def ant(base):
    return anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, timeout=120)


def chat(base):
    return [oai(base).chat.completions.create(**CHAT)]


def chat_stream(base):
    return list(oai(base).chat.completions.create(**CHAT, stream=True))


def chat_stream_usage(base):
    return list(oai(base).chat.completions.create(**CHAT, stream=True, stream_options=USAGE))


def chat_helper(base):
    with oai(base).chat.completions.stream(**CHAT, stream_options=USAGE) as stream:
        seen = list(stream)
        try:
            return [*seen, stream.get_final_completion()]
        except openai.LengthFinishReasonError as e:  # max_tokens ended it, of course
            return [*seen, e.completion]


def chat_raw(base):
    raw = oai(base).chat.completions.with_raw_response.create(**CHAT)
    return [raw.status_code, raw.headers["content-type"], json.loads(raw.text), raw.parse()]


def chat_raw_stream(base):
    raw = oai(base).chat.completions.with_raw_response.create(**CHAT, stream=True)
    return [raw.headers["content-type"], *raw.parse()]


def chat_raw_lines(base):
    create = oai(base).chat.completions.with_streaming_response.create
    with create(**CHAT, stream=True) as response:
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in data]


def chat_async(base):
    async def run():
        async with openai.AsyncOpenAI(base_url=base + "/v1", api_key="none", max_retries=0) as client:
            return [c async for c in await client.chat.completions.create(**CHAT, stream=True, stream_options=USAGE)]

    return asyncio.run(run())


def chat_pooled(base):
    """Three streams and a plain call over one client: each goes over the connection that the one before left."""
    client, seen = oai(base), []
    for _ in range(3):
        seen += client.chat.completions.create(**CHAT, stream=True)
    return [*seen, client.chat.completions.create(**CHAT)]


def text(base):
    return [oai(base).completions.create(**TEXT)]


def text_stream(base):
    return list(oai(base).completions.create(**TEXT, stream=True))


def text_stream_usage(base):
    return list(oai(base).completions.create(**TEXT, stream=True, stream_options=USAGE))


def responses(base):
    return [oai(base).responses.create(**RESPONSES)]


def responses_raw(base):
    raw = oai(base).responses.with_raw_response.create(**RESPONSES)
    return [raw.status_code, json.loads(raw.text), raw.parse()]


def responses_stream(base):
    return list(oai(base).responses.create(**RESPONSES, stream=True))


def responses_helper(base):
    with oai(base).responses.stream(**RESPONSES) as stream:
        seen = list(stream)
        return [*seen, stream.get_final_response()]


def messages(base):
    return [ant(base).messages.create(**MESSAGES_API)]


def messages_raw(base):
    raw = ant(base).messages.with_raw_response.create(**MESSAGES_API)
    return [raw.status_code, json.loads(raw.text()), raw.parse()]


def messages_stream(base):
    return list(ant(base).messages.create(**MESSAGES_API, stream=True))


def messages_helper(base):
    with ant(base).messages.stream(**MESSAGES_API) as stream:
        seen = list(stream)
        return [*seen, stream.get_final_message()]


def messages_text(base):
    with ant(base).messages.stream(**MESSAGES_API) as stream:
        return [*stream.text_stream, stream.get_final_text()]


LITELLM = dict(CHAT, model="openai/" + MODEL, api_key="none", num_retries=0)


def litellm_chat(base):
    return [litellm.completion(**LITELLM, api_base=base + "/v1")]


def litellm_chat_stream(base):
    return list(litellm.completion(**LITELLM, api_base=base + "/v1", stream=True))


def litellm_chat_stream_usage(base):
    return list(litellm.completion(**LITELLM, api_base=base + "/v1", stream=True, stream_options=USAGE))


def litellm_text(base):
    args = dict(TEXT, model="text-completion-openai/" + MODEL, api_key="none", num_retries=0)
    return [litellm.text_completion(**args, api_base=base + "/v1")]


def plain(value):
    """value as JSON; extra fields are kept, as pydantic's model_dump keeps them."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", warnings=False)
    return value


def main():
    protocol, sys.stdout = sys.stdout, sys.stderr  # some libraries print
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"seen": [plain(v) for v in globals()[request["case"]](request["base"])]}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=protocol, flush=True)


if __name__ == "__main__":
    main()
