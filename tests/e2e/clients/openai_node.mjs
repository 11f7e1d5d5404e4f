// Drive the gateway with the OpenAI Node SDK; prints one JSON object of findings.
import OpenAI from "openai";

const [url, key, model, sim] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];
const found = {};

const chat = (more = {}, options = {}) =>
  client.chat.completions.create({ model, messages, max_tokens: 5, ...more }, options);
const all = async (stream) => { const parts = []; for await (const part of await stream) parts.push(part); return parts; };
const failure = async (call) => {
  try { await call(); return null; }
  catch (error) { return [error.constructor.name, error.status ?? null, error.code ?? null, error.param ?? null]; }
};
const timed = async (name, call) => {
  const started = performance.now();
  found[name] = await call();
  found[`${name}_waited`] = (performance.now() - started) / 1000;
};
const inject = (fault) => fetch(`${sim}/sim/faults`, { method: "POST", body: JSON.stringify({ fault }), headers: { "content-type": "application/json" } });

found.models = (await all(client.models.list())).map((each) => each.id).sort();
found.model = (await client.models.retrieve(model)).id;

const reply = await chat();
found.chat = [reply.choices[0].finish_reason, reply.usage.completion_tokens];
let chunks = await all(chat({ stream: true }));
found.stream = [chunks.at(-1).choices[0].finish_reason, chunks.every((chunk) => chunk.choices.length > 0)];
chunks = await all(chat({ stream: true, stream_options: { include_usage: true } }));
found.usage = [chunks.at(-2).choices[0].finish_reason, chunks.at(-1).usage.completion_tokens];

const tools = [{ type: "function", function: { name: "look_up", parameters: { type: "object", properties: {} } } }];
const wish = { tools, max_tokens: 20, messages: [{ role: "user", content: "use the tool" }] };
found.tool = (await chat(wish)).choices[0].message.tool_calls[0].function.name;
found.tool_stream = (await all(chat({ ...wish, stream: true })))
  .flatMap((chunk) => chunk.choices[0].delta.tool_calls ?? [])[0].function.name;

const response = await client.responses.create({ model, input: "hello", max_output_tokens: 5 });
found.response = [response.status, response.usage.output_tokens];
const events = await all(client.responses.create({ model, input: "hello", max_output_tokens: 5, stream: true }));
found.response_stream = [events[0].type, events.at(-1).type];

const weather = { type: "object", properties: { place: { type: "string" }, degrees: { type: "number" } } };
const form = { name: "weather", schema: weather };
let parsed = await client.chat.completions.parse({ model, messages, response_format: { type: "json_schema", json_schema: form } });
found.parsed = parsed.choices[0].message.parsed.degrees;
parsed = await client.responses.parse({ model, input: "hello", text: { format: { type: "json_schema", ...form } } });
found.response_parsed = parsed.output_parsed.degrees;

// The default of this SDK asks for base64 and decodes it.
found.embedding = (await client.embeddings.create({ model, input: "x" })).data.length;
found.request_id = (await chat({ max_tokens: 1 }))._request_id.startsWith("req_");

found.no_model = await failure(() => chat({ model: "none" }));
const wrong = new OpenAI({ baseURL: `${url}/v1`, apiKey: "gw_wrong", maxRetries: 0 });
found.bad_key = await failure(() => wrong.embeddings.create({ model, input: "x" }));
found.too_long = await failure(() => chat({ messages: [{ role: "user", content: "word ".repeat(200000) }] }));

const patient = { maxRetries: 1 };
await timed("down", () => failure(() => chat({ model: "down" }, patient)));
await timed("limited", () => failure(() => chat({ model: "busy" }, patient)));
await inject("http_500:429@1");
await timed("served_later", async () => (await chat({}, patient)).choices[0].finish_reason);

await inject("reset_after:3@1");
found.broken_stream = await failure(() => all(chat({ max_tokens: 20, stream: true })));
await inject("reset_after:3@1");
found.broken_response = await failure(() => all(client.responses.create({ model, input: "hello", max_output_tokens: 20, stream: true })));

for await (const chunk of await chat({ max_tokens: 3000, stream: true })) { found.left = chunk.choices.length > 0; break; }
console.log(JSON.stringify(found));
