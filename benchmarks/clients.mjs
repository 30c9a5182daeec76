// Clients that others wrote for Node.js, unchanged, over a server that runs: what works with which version.
//
//   npm install ai @ai-sdk/openai-compatible @ai-sdk/openai zod @langchain/openai @langchain/core cohere-ai
//   node clients.mjs http://127.0.0.1:8000 SPEECH CHAT TOOLS VECTORS RERANK
//
// Run a copy of it in a folder where they are installed. Asks with whatever of them is there, and compares each answer
// with what the same server says to a plain request.

import fs from "node:fs";
import { createRequire } from "node:module";

const [url, speech, chat, tools, vectors, rerank, recording = "recording.wav"] = process.argv.slice(2);
const base = `${url}/v1`;
const here = createRequire(`${process.cwd()}/`);
const schema = {
  type: "object",
  properties: { colour: { type: "string", enum: ["red", "green"] } },
  required: ["colour"],
  additionalProperties: false,
};

async function plain(path, body) {
  const asked = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  return (await fetch(base + path, asked)).json();
}

const expected = {
  async transcription() {
    const form = new FormData();
    form.append("model", speech);
    form.append("file", new Blob([fs.readFileSync(recording)]), "recording.wav");
    return (await (await fetch(`${base}/audio/transcriptions`, { method: "POST", body: form })).json()).text;
  },
  async chat() {
    const asked = { model: chat, messages: [{ role: "user", content: "hi" }], temperature: 0, max_tokens: 8 };
    return (await plain("/chat/completions", asked)).choices[0].message.content;
  },
  vectors: async () => (await plain("/embeddings", { model: vectors, input: "hi" })).data[0].embedding.slice(0, 4),
  rerank: async () =>
    (await plain("/rerank", { model: rerank, query: "what", documents: ["a b", "c d"] })).results[0].index,
};

const clients = {
  async *"@ai-sdk/openai-compatible"() {
    const { createOpenAICompatible } = await import(here.resolve("@ai-sdk/openai-compatible"));
    const { embed, generateObject, generateText, jsonSchema, streamText, tool } = await import(here.resolve("ai"));
    const options = { name: "it", baseURL: base, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true };
    const provider = createOpenAICompatible(options);
    const greedy = { model: provider(chat), prompt: "hi", temperature: 0, maxOutputTokens: 8, maxRetries: 0 };
    const free = { prompt: "hi", maxOutputTokens: 150, maxRetries: 0 };
    yield ["chat", async () => (await generateText(greedy)).text];
    yield ["chat, streamed", async () => streamText(greedy).text];
    yield [
      "structured",
      async () => (await generateObject({ ...free, model: provider(chat), schema: jsonSchema(schema) })).object.colour,
    ];
    const paint = tool({ description: "Paints it.", inputSchema: jsonSchema(schema) });
    const must = { tools: { paint }, toolChoice: { type: "tool", toolName: "paint" } };
    yield [
      "tool",
      async () => (await generateText({ ...free, ...must, model: provider(tools) })).toolCalls[0].input.colour,
    ];
    const model = provider.textEmbeddingModel(vectors);
    yield ["vectors", async () => (await embed({ model, value: "hi" })).embedding.slice(0, 4)];
  },
  async *"@ai-sdk/openai"() {
    const { createOpenAI } = await import(here.resolve("@ai-sdk/openai"));
    const { experimental_transcribe, generateText, streamText, transcribe } = await import(here.resolve("ai"));
    const provider = createOpenAI({ baseURL: base, apiKey: "none" });
    const hear = transcribe ?? experimental_transcribe;
    const greedy = { model: provider.chat(chat), prompt: "hi", temperature: 0, maxOutputTokens: 8, maxRetries: 0 };
    const audio = fs.readFileSync(recording);
    yield ["transcription", async () => (await hear({ model: provider.transcription(speech), audio })).text];
    yield ["chat, by provider.chat(...)", async () => (await generateText(greedy)).text];
    yield ["chat, by provider.chat(...), streamed", async () => streamText(greedy).text];
    yield ["chat, by provider(...)", async () => (await generateText({ ...greedy, model: provider(chat) })).text];
  },
  async *"@langchain/openai"() {
    const { ChatOpenAI, OpenAIEmbeddings } = await import(here.resolve("@langchain/openai"));
    const place = { apiKey: "none", configuration: { baseURL: base }, maxRetries: 0 };
    const greedy = new ChatOpenAI({ ...place, model: chat, temperature: 0, maxTokens: 8 });
    const free = (model) => new ChatOpenAI({ ...place, model, maxTokens: 150 });
    const named = { title: "verdict", ...schema };
    const paint = { type: "function", function: { name: "paint", parameters: schema } };
    yield ["chat", async () => (await greedy.invoke("hi")).content];
    yield [
      "chat, streamed",
      async () => {
        let text = "";
        for await (const part of await greedy.stream("hi")) text += part.content;
        return text;
      },
    ];
    yield [
      "structured",
      async () => (await free(chat).withStructuredOutput(named, { method: "jsonSchema" }).invoke("hi")).colour,
    ];
    const must = free(tools).bindTools([paint], { tool_choice: "paint" });
    yield ["tool", async () => (await must.invoke("hi")).tool_calls[0].args.colour];
    const texts = new OpenAIEmbeddings({ ...place, model: vectors });
    yield ["vectors", async () => (await texts.embedQuery("hi")).slice(0, 4)];
  },
  async *"cohere-ai"() {
    const { CohereClientV2 } = here("cohere-ai");
    const client = new CohereClientV2({ token: "none", environment: url });
    const asked = { model: rerank, query: "what", documents: ["a b", "c d"] };
    yield ["rerank", async () => (await client.rerank(asked)).results[0].index];
  },
};

function same(told, wanted) {
  if (!Array.isArray(wanted)) return told === wanted;
  return wanted.every((one, index) => Math.abs(one - told[index]) < 1e-3);
}

function version(name) {
  const path = `node_modules/${name}/package.json`;
  return fs.existsSync(path) ? JSON.parse(fs.readFileSync(path)).version : null;
}

async function came(name, call) {
  const kind = name.split(",")[0];
  try {
    const told = await call();
    const right = kind in expected ? same(told, await expected[kind]()) : ["red", "green"].includes(told);
    return right ? "works" : `another answer: ${JSON.stringify(told)}`;
  } catch (error) {
    return `${error.name}: ${error.message}`.slice(0, 200);
  }
}

console.log("| client | version | call | |\n| --- | --- | --- | --- |");
for (const [name, calls] of Object.entries(clients)) {
  if (version(name) === null) continue;
  for await (const [call, made] of calls()) {
    console.log(`| ${name} | ${version(name)} | ${call} | ${await came(call, made)} |`);
  }
}
