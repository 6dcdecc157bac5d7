// Drives the openai library for Node, as clients.py does those for Python: a line {"case": NAME, "base": URL} on stdin
// makes that call to the server at URL, and a line {"seen": [...]} or {"error": "..."} on stdout says what came of it.
// The one argument is the folder whose node_modules has the library.

import { createRequire } from "node:module";
import { join } from "node:path";
import { createInterface } from "node:readline";

const require = createRequire(join(process.argv[2], "package.json"));
const { OpenAI } = require("openai");

const MODEL = "tiny";
const PROMPT = "Tell me, client, what do you read?";
const MESSAGES = [{ role: "user", content: PROMPT }];
const COMMON = { model: MODEL, max_tokens: 11, temperature: 0, seed: 1, ignore_eos: true };
const CHAT = { ...COMMON, messages: MESSAGES };
const TEXT = { ...COMMON, prompt: PROMPT };
const RESPONSES = { model: MODEL, input: PROMPT, max_output_tokens: 11, temperature: 0, ignore_eos: true };
const USAGE = { stream_options: { include_usage: true } };

// No retries: a connection that the server cut must be seen.
const client = (base) => new OpenAI({ baseURL: base + "/v1", apiKey: "none", maxRetries: 0 });

async function all(stream) {
  const seen = [];
  for await (const event of await stream) seen.push(event);
  return seen;
}

const cases = {
  chat: async (c) => [await c.chat.completions.create(CHAT)],
  chat_stream: (c) => all(c.chat.completions.create({ ...CHAT, stream: true })),
  chat_stream_usage: (c) => all(c.chat.completions.create({ ...CHAT, ...USAGE, stream: true })),
  chat_helper: async (c) => {
    const stream = c.chat.completions.stream({ ...CHAT, ...USAGE });
    return [...(await all(stream)), await stream.finalChatCompletion().catch((e) => e.constructor.name)];
  },
  chat_with_response: async (c) => {
    const { data, response } = await c.chat.completions.create(CHAT).withResponse();
    return [response.status, response.headers.get("content-type"), data];
  },
  text: async (c) => [await c.completions.create(TEXT)],
  text_stream: (c) => all(c.completions.create({ ...TEXT, stream: true })),
  responses: async (c) => [await c.responses.create(RESPONSES)],
  responses_stream: (c) => all(c.responses.create({ ...RESPONSES, stream: true })),
  responses_helper: async (c) => {
    const stream = c.responses.stream(RESPONSES);
    return [...(await all(stream)), await stream.finalResponse()];
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  let answer;
  try {
    answer = { seen: await cases[request.case](client(request.base)) };
  } catch (e) {
    answer = { error: e.stack };
  }
  process.stdout.write(JSON.stringify(answer) + "\n");
}
