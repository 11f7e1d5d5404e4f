// Drive the gateway with the Vercel AI SDK, the strictest reader of event streams; prints one JSON object.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, RetryError, embed, generateText, jsonSchema, streamText, tool } from "ai";

const [url, key, model, sim] = process.argv.slice(2);
const provide = (apiKey) => createOpenAICompatible({ name: "gateway", baseURL: `${url}/v1`, apiKey, includeUsage: true });
const provider = provide(key);
const ask = (more = {}) => ({ model: provider(model), prompt: "hello", maxOutputTokens: 5, maxRetries: 0, ...more });
const found = {};

const failure = async (call) => {
  try { await call(); return null; }
  catch (error) {
    const last = RetryError.isInstance(error) ? error.lastError : error;
    return [error.name, APICallError.isInstance(last) ? last.statusCode : null];
  }
};
// A stream tells its failures as parts; the SDK prints them too unless asked not to.
const read = async (asked) => {
  const result = streamText({ ...asked, onError: () => {} });
  for await (const part of result.fullStream) if (part.type === "error") throw part.error;
  return [await result.finishReason, (await result.usage).outputTokens];
};
const timed = async (name, call) => {
  const started = performance.now();
  found[name] = await call();
  found[`${name}_waited`] = (performance.now() - started) / 1000;
};
const inject = (fault) => fetch(`${sim}/sim/faults`, { method: "POST", body: JSON.stringify({ fault }), headers: { "content-type": "application/json" } });

const reply = await generateText(ask());
found.chat = [reply.finishReason, reply.usage.outputTokens];
found.usage = await read(ask());
const look_up = tool({ description: "", inputSchema: jsonSchema({ type: "object", properties: {} }) });
const called = await generateText(ask({ prompt: "use the tool", maxOutputTokens: 20, tools: { look_up } }));
found.tool = called.toolCalls[0].toolName;
found.embedding = (await embed({ model: provider.textEmbeddingModel(model), value: "x", maxRetries: 0 })).embedding.length > 0;
found.no_model = await failure(() => generateText(ask({ model: provider("none") })));
found.bad_key = await failure(() => embed({ model: provide("gw_wrong").textEmbeddingModel(model), value: "x", maxRetries: 0 }));
found.too_long = await failure(() => generateText(ask({ prompt: "word ".repeat(200000) })));

await timed("down", () => failure(() => generateText(ask({ model: provider("down"), maxRetries: 1 }))));
await timed("limited", () => failure(() => generateText(ask({ model: provider("busy"), maxRetries: 1 }))));
await inject("http_500:429@1");
await timed("served_later", async () => (await generateText(ask({ maxRetries: 1 }))).finishReason);

await inject("reset_after:3@1");
found.broken_stream = (await failure(() => read(ask({ maxOutputTokens: 20 })))) !== null;

const leaving = new AbortController();
const left = streamText({ ...ask({ maxOutputTokens: 3000 }), abortSignal: leaving.signal, onError: () => {} });
for await (const part of left.textStream) { found.left = part.length > 0; leaving.abort(); break; }
console.log(JSON.stringify(found));
