// Drive /v1/messages with the Anthropic Node SDK; prints one JSON object of findings.
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";

const [url, key, model, sim] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];
const asked = { model, max_tokens: 5, messages };
const found = {};

const failure = async (call) => {
  try { await call(); return null; }
  catch (error) { return [error.constructor.name, error.status ?? null, error.type ?? null, error.errorCode ?? null]; }
};
const timed = async (name, call) => {
  const started = performance.now();
  found[name] = await call();
  found[`${name}_waited`] = (performance.now() - started) / 1000;
};
const inject = (fault) => fetch(`${sim}/sim/faults`, { method: "POST", body: JSON.stringify({ fault }), headers: { "content-type": "application/json" } });

const ids = [];
for await (const each of client.models.list()) ids.push(each.id);
found.models = ids.sort();
const reply = await client.messages.create(asked);
found.message = [reply.stop_reason, reply.usage.output_tokens];
found.knows_its_id = reply._request_id.startsWith("req_");
const final = await client.messages.stream(asked).finalMessage();
found.message_stream = [final.stop_reason, final.usage.output_tokens];
const tools = [{ name: "look_up", input_schema: { type: "object", properties: {} } }];
const wish = [{ role: "user", content: "use the tool" }];
const called = await client.messages.create({ model, tools, max_tokens: 20, messages: wish });
found.message_tool = [called.stop_reason, called.content.at(-1).name];
const lookUp = betaTool({
  name: "look_up", description: "", inputSchema: { type: "object", properties: { value: { type: "string" } } },
  run: ({ value }) => value,
});
const turns = [];
const runner = client.beta.messages.toolRunner({ model, max_tokens: 20, messages: wish, tools: [lookUp], max_iterations: 2 });
for await (const turn of runner) turns.push(turn);
const [first, second] = turns.map((turn) => turn.usage.input_tokens);
found.message_tool_runner = [turns[0].stop_reason, second > first];
found.count = (await client.messages.countTokens({ model, messages })).input_tokens > 0;

found.message_no_model = await failure(() => client.messages.create({ ...asked, model: "none" }));
const wrong = new Anthropic({ baseURL: url, apiKey: "gw_wrong", maxRetries: 0 });
found.message_bad_key = await failure(() => wrong.messages.create(asked));
const long = [{ role: "user", content: "word ".repeat(200000) }];
found.message_too_long = await failure(() => client.messages.create({ ...asked, messages: long }));

const patiently = (name) => client.messages.create({ ...asked, model: name }, { maxRetries: 1 });
await timed("message_down", () => failure(() => patiently("down")));
await timed("message_limited", () => failure(() => patiently("busy")));
await inject("http_500:429@1");
await timed("message_served_later", async () => (await patiently(model)).stop_reason);

await inject("reset_after:3@1");
found.message_broken_stream = await failure(async () => {
  for await (const _ of await client.messages.create({ ...asked, max_tokens: 20, stream: true }));
});
for await (const event of await client.messages.create({ ...asked, max_tokens: 3000, stream: true })) { found.message_left = event.type; break; }
console.log(JSON.stringify(found));
