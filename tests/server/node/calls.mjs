// Asks a server what OpenAI's own client for Node.js can ask, and prints what came of each call, as JSON.
//
//   node calls.mjs URL RECORDING IMAGE

import fs from "node:fs";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, recording, image] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });

const greedy = { model: "llama", temperature: 0, max_tokens: 8 };
const messages = [{ role: "user", content: "hi" }];
const verdict = z.object({ colour: z.enum(["red", "green"]) });
const long = { model: "llama", n: 100, max_tokens: 400, ignore_eos: true };
const structured = { model: "llama", messages, seed: 1, max_tokens: 200 };
const speech = () => fs.createReadStream(recording);
const transcribe = (options) => client.audio.transcriptions.create({ file: speech(), model: "whisper", ...options });
const translate = (options) => client.audio.translations.create({ file: speech(), model: "whisper", ...options });

async function all(stream) {
  const found = [];
  for await (const one of stream) found.push(one);
  return found;
}

const calls = {
  models: async () => (await all(client.models.list())).map((one) => one.id),
  model: async () => (await client.models.retrieve("bert")).id,
  chat: () => client.chat.completions.create({ ...greedy, messages }),
  chat_n: () => client.chat.completions.create({ model: "llama", messages, n: 2, seed: 7, max_tokens: 8 }),
  chat_logprobs: () => client.chat.completions.create({ ...greedy, messages, logprobs: true, top_logprobs: 2 }),
  chat_stream: async () => {
    const stream = { stream: true, stream_options: { include_usage: true } };
    return all(await client.chat.completions.create({ ...greedy, messages, ...stream }));
  },
  chat_helper: async () => client.chat.completions.stream({ ...greedy, messages }).finalContent(),
  chat_image: () =>
    client.chat.completions.create({
      ...greedy,
      model: "qwen2_vl",
      messages: [
        {
          role: "user",
          content: [
            { type: "image_url", image_url: { url: `data:image/png;base64,${fs.readFileSync(image, "base64")}` } },
            { type: "text", text: "What is it?" },
          ],
        },
      ],
    }),
  json_object: async () => {
    const answer = await client.chat.completions.create({ ...structured, response_format: { type: "json_object" } });
    return typeof JSON.parse(answer.choices[0].message.content);
  },
  parse: async () => {
    const response_format = zodResponseFormat(verdict, "verdict");
    return (await client.chat.completions.parse({ ...structured, response_format })).choices[0].message.parsed;
  },
  tool: async () => {
    const colours = { type: "object", properties: { colour: { type: "string", enum: ["red", "green"] } } };
    const parameters = { ...colours, required: ["colour"], additionalProperties: false };
    const tools = [{ type: "function", function: { name: "paint", strict: true, parameters } }];
    const tool_choice = { type: "function", function: { name: "paint" } };
    const answer = await client.chat.completions.parse({ ...structured, model: "qwen3", tools, tool_choice });
    const call = answer.choices[0].message.tool_calls[0];
    const result = { role: "tool", tool_call_id: call.id, content: "done" };
    const more = [...messages, answer.choices[0].message, result];
    await client.chat.completions.create({ ...greedy, model: "qwen3", tools, messages: more });
    return call.function;
  },
  completion: () => client.completions.create({ ...greedy, prompt: ["one", "two"] }),
  completion_stream: async () => all(await client.completions.create({ ...greedy, prompt: "one", stream: true })),
  embedding: () => client.embeddings.create({ model: "bert", input: "one" }),
  embedding_float: () => client.embeddings.create({ model: "bert", input: ["one", "two"], encoding_format: "float" }),
  transcription: () => transcribe({}),
  transcription_text: () => transcribe({ response_format: "text" }),
  transcription_srt: () => transcribe({ response_format: "srt" }),
  transcription_verbose: () =>
    transcribe({ response_format: "verbose_json", timestamp_granularities: ["word", "segment"], language: "en" }),
  transcription_options: () => transcribe({ chunking_strategy: { type: "server_vad" }, include: ["logprobs"] }),
  transcription_stream: async () => all(await transcribe({ stream: true })),
  transcription_vtt: () => transcribe({ response_format: "vtt" }),
  translation: () => translate({}),
  translation_verbose: () => translate({ response_format: "verbose_json" }),
  request_id: async () => {
    const { data, request_id, response } = await client.embeddings
      .create({ model: "bert", input: "one" }, { headers: { "x-request-id": "mine" } })
      .withResponse();
    return [request_id, response.headers.get("x-request-id"), data._request_id];
  },
  no_model: () => client.chat.completions.create({ ...greedy, model: "nobody", messages }),
  no_such_member: () => client.chat.completions.create({ ...greedy, messages, temprature: 1 }),
  no_text: () => client.chat.completions.create({ ...greedy, model: "bert", messages, stream: true }),
  no_audio: async () => transcribe({ file: await OpenAI.toFile(Buffer.from("nothing"), "speech.mp3") }),
  no_tokens: () => client.embeddings.create({ model: "bert", input: [[1, 2]] }),
  impatient: () => client.chat.completions.create({ ...long, messages }, { timeout: 100 }),
  left: async () => {
    const stream = await client.chat.completions.create({ ...long, messages, stream: true });
    for await (const one of stream) return one.object; // which aborts the request
  },
};

function told(error) {
  const { status, code, param, type, requestID, message } = error;
  return { class: error.constructor.name, status, code, param, type, requestID, message };
}

const found = {};
for (const [name, call] of Object.entries(calls)) {
  try {
    found[name] = { answer: await call() };
  } catch (error) {
    found[name] = { error: told(error) };
  }
}
console.log(JSON.stringify(found));
