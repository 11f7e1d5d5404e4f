// Drive the gateway with the OpenAI Node SDK; prints one JSON object of findings.
import OpenAI from "openai";

const [url, key, model, sim] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];
const found = {};

const reply = await client.chat.completions.create({ model, messages, max_tokens: 5 });
found.chat = [reply.choices[0].finish_reason, reply.usage.completion_tokens];

let last;
for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 5, stream: true })) last = chunk;
found.stream = last.choices[0].finish_reason;

const tools = [{ type: "function", function: { name: "look_up", parameters: { type: "object", properties: {} } } }];
const called = await client.chat.completions.create({
  model, tools, max_tokens: 20, messages: [{ role: "user", content: "use the tool" }],
});
found.tools = called.choices[0].message.tool_calls[0].function.name;
found.embedding = (await client.embeddings.create({ model, input: "x", encoding_format: "float" })).data.length;

const failure = async (call) => {
  try { await call(); return null; } catch (error) { return [error.constructor.name, error.code ?? null, error.param ?? null]; }
};
found.no_model = await failure(() => client.chat.completions.create({ model: "none", messages }));
found.bad_key = await failure(() => new OpenAI({ baseURL: `${url}/v1`, apiKey: "gw_wrong", maxRetries: 0 }).models.list());
found.too_long = await failure(() =>
  client.chat.completions.create({ model, max_tokens: 5, messages: [{ role: "user", content: "word ".repeat(200000) }] }));
await fetch(`${sim}/sim/faults`, { method: "POST", body: '{"fault": "reset_after:3@1"}', headers: { "content-type": "application/json" } });
found.broken_stream = await failure(async () => {
  for await (const _ of await client.chat.completions.create({ model, messages, max_tokens: 20, stream: true }));
});
console.log(JSON.stringify(found));
